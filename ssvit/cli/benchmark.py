"""Measure training steps and the loader, or inference, on this machine.

Usage: ssvit benchmark objective=mae encoder=s. With batch_sizes=[64,128,256] precisions=[bf16-mixed,32-true], every
batch size is measured in every precision. With part=inference image_sizes=[64,224], forward passes of the encoder are
measured.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Literal

from ssvit.cli import pretrain
from ssvit.config.composed import Config
from ssvit.config.declaration import Count, Name, Run
from ssvit.options import file_to_write
from ssvit.training.options import Pretrain


class Benchmark(Pretrain):
    """The steps and batches of a pre-training run, or forward passes of its encoder, measured in one process."""

    part: Literal["training", "inference"] = "training"
    """training: steps and the loader; inference: forward passes of the encoder in each precision, with and without
    kernels."""
    rounds: Count = 7
    """Number of rounds. Results are medians over the rounds."""
    batch_sizes: Sequence[Count] = ()
    """Batch sizes to measure; []: only recipe.batch_size, or for inference 1 and 32."""
    image_sizes: Sequence[Count] = ()
    """Image sizes to measure for inference; []: only data.image_size."""
    threads: Sequence[Count] = (1, 2)
    """Numbers of threads to measure for inference."""
    precisions: Sequence[Literal["auto", "bf16-mixed", "32-true", "64-true"]] = ()
    """Precisions of training to measure; []: only recipe.precision."""
    output: Name | None = None
    """JSON file for the rates; None: no file."""


def cases(config: Config) -> list[Config]:
    """Return a validated configuration for each combination of batch size and precision."""
    options: Benchmark = config.options
    if options.output is not None:
        file_to_write("output", options.output)
    changed = [
        config.changed({"recipe.batch_size": batch_size, "recipe.precision": precision, "fabric.devices": 1})
        for precision in options.precisions or [options.recipe.precision]
        for batch_size in options.batch_sizes or [options.recipe.batch_size]
    ]
    for case in changed:
        Run(case.options).check()
    return changed


def run(config: Config) -> None:
    """Measure, print a table, and write the rates if `output` is set."""
    if config.options.part == "inference":
        _inference(config)
        return
    checked = cases(config)

    from ssvit.training.benchmark import step_and_loader, table

    options: Benchmark = config.options
    rates = {rate.name: rate for case in checked for rate in step_and_loader(case, rounds=options.rounds)}
    title = ", ".join(f"{name}={config.choices[name]}" for name in ("objective", "encoder", "data"))
    print(table(title, list(rates.values())))
    if options.output is not None:
        Path(options.output).write_text(json.dumps([asdict(rate) for rate in rates.values()], indent=2) + "\n")


def _inference(config: Config) -> None:
    """Measure forward passes of the encoder at each image size."""
    options: Benchmark = config.options
    if options.output is not None:
        file_to_write("output", options.output)
    single = config.changed({"fabric.devices": 1})
    sizes = [single.changed({"data.image_size": size}) for size in options.image_sizes] or [single]
    for case in sizes:
        Run(case.options).check()

    from ssvit.training import runtime
    from ssvit.training.latency import Latency, latencies, table

    device = runtime.start(options.recipe, **sizes[0].options.fabric.values()).device
    batches, threads, rounds = options.batch_sizes or (1, 32), options.threads, options.rounds
    rows: list[Latency] = []
    for case in sizes:
        encoder = case.options.encoder.build()
        rows += latencies(encoder, batch_sizes=batches, threads=threads, rounds=rounds, device=device)
    print(table(f"inference, encoder={config.choices['encoder']}", rows))
    if options.output is not None:
        Path(options.output).write_text(json.dumps([row._asdict() for row in rows], indent=2) + "\n")


command = replace(
    pretrain.command,
    name="benchmark",
    run=run,
    options=Benchmark,
    dry_run=None,
    results=None,
    common=(
        "part", "rounds", "batch_sizes", "image_sizes", "threads", "precisions", "output", "objective", "data.root",
        "data.image_size", "encoder.patch_size", "recipe.batch_size", "recipe.precision", "recipe.backend", "workers",
        "fabric.accelerator",
    ),
)  # fmt: skip
