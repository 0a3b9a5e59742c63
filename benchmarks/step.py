"""Compare a training step with that of other projects: python -m benchmarks.step objective=mae encoder=ti …

Its options are those of `ssvit benchmark`. Each contender is trained by ssvit's loop with AdamW on the same images,
with recipe.backend=auto once without compilation (ssvit with its kernels, and with plain modules) and once compiled.
`share` is the useful work of a step relative to the machine's own matrix products, measured in the same rounds; for all
contenders it is the matrix products of ssvit's step.
"""

import copy
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path

from benchmarks.peers import PEERS, with_plain_attention
from ssvit.checkpoints.checkpoint import PRETRAIN
from ssvit.cli import benchmark
from ssvit.config.composed import Config
from ssvit.errors import OptionError
from ssvit.training.benchmark import Rate, Steps, gflop_of_image, measure_steps, rate_table
from ssvit.training.session import Session

OURS, EAGER, PLAIN, COMPILED = "ssvit", "ssvit, eager", ", plain attention", ", compiled"


class Step(benchmark.Benchmark):
    """The training step that is compared."""

    peers: Sequence[str] | None = None
    """Parts of the names of the contenders to measure, such as timm or plain; null: all that are installed."""


def contenders(objective: str, wanted: Sequence[str] | None) -> list[str]:
    """Return the names of the peers of an objective that are installed and wanted.

    Raises:
        OptionError: None of them is.
    """
    names = list(PEERS.get(objective, ()))
    names += [f"{name}{PLAIN}" for name in names if name.startswith(("timm", "transformers"))]
    chosen = [name for name in names if wanted is None or any(part in name for part in wanted)]
    if wanted and not chosen:
        raise OptionError("peers", list(wanted), f"must be parts of names: {', '.join(names) or 'there is no peer'}")
    return [name for name in chosen if find_spec(name.split()[0].replace("-", "_"))]


def build(names: Sequence[str], config: Config) -> tuple[dict[str, Steps], float]:
    """Build the training steps of contenders.

    Args:
        names: Names of contenders; those that end with COMPILED are compiled.
        config: Configuration of ssvit's run.

    Returns:
        The steps by name, and the GFLOP of the matrix products in ssvit's step of an image.
    """
    session = Session(config.options, Path(config.options.outputs), stage=PRETRAIN)
    recipe, _, ours, loader = session.build(config.options)
    gflop = gflop_of_image(ours, loader)
    images = next(loader.batches(0, 1))
    scaled = images._replace(views={key: view / 255 for key, view in images.views.items()})
    steps = {}
    for name in names:
        contender = name.removesuffix(COMPILED)
        backend = "kernels" if name == OURS and session.processes.device.type == "cpu" else "eager"
        numbers = recipe.changed(optimizer="adamw", backend=backend if name == contender else "compile")
        if contender in (OURS, EAGER):
            steps[name] = Steps(session.processes, copy.deepcopy(ours), numbers, images)
            continue
        peer = PEERS[config.choices["objective"]][contender.removesuffix(PLAIN)](config.options)
        if contender.endswith(PLAIN):
            with_plain_attention(peer)
        steps[name] = Steps(session.processes, peer, numbers, scaled)
    return steps, gflop


def measure(config: Config) -> list[Rate]:
    """Return the rates of ssvit, its peers and the machine's products in images or GFLOP a second."""
    options: Step = config.options
    names = [OURS, *contenders(config.choices["objective"], options.peers)]
    compiled = [f"{name}{COMPILED}" for name in names]
    names.insert(1, EAGER)
    names = {"eager": names, "compile": compiled}.get(options.recipe.backend, [*names, *compiled])
    steps, gflop = build(names, config)
    return measure_steps(steps, gflop=gflop, rounds=options.rounds, reference=names[0])


def run(config: Config) -> None:
    """Measure each batch size in each precision, print a table for each, and write the rates if `output` is set."""
    results = {}
    for case in benchmark.cases(config):
        recipe, choices = case.options.recipe, case.choices
        title = f"{choices['objective']}, encoder={choices['encoder']}, {case.options.data.image_size} px"
        title += f", {recipe.batch_size} images, {recipe.precision}, {recipe.backend}"
        results[title] = measure(case)
        print(rate_table(title, results[title]))
    if config.options.output is not None:
        text = json.dumps({title: list(map(asdict, rates)) for title, rates in results.items()}, indent=2)
        Path(config.options.output).write_text(text + "\n")


command = replace(benchmark.command, run=run, options=Step)

if __name__ == "__main__":
    command.main(sys.argv[1:])
