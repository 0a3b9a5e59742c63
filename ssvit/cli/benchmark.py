"""Measure training steps and the loader on this machine.

Usage: ssvit benchmark objective=mae encoder=s. With batch_sizes=[64,128,256] precisions=[bf16-mixed,32-true], every
batch size is measured in every precision.
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
    """The steps and batches of a pre-training run, measured in one process."""

    rounds: Count = 7
    """Number of rounds. Results are medians over the rounds."""
    batch_sizes: Sequence[Count] = ()
    """Batch sizes to measure; []: only recipe.batch_size."""
    precisions: Sequence[Literal["auto", "bf16-mixed", "32-true", "64-true"]] = ()
    """Precisions to measure; []: only recipe.precision."""
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
    checked = cases(config)

    from ssvit.training.benchmark import step_and_loader, table

    options: Benchmark = config.options
    rates = {rate.name: rate for case in checked for rate in step_and_loader(case, rounds=options.rounds)}
    title = ", ".join(f"{name}={config.choices[name]}" for name in ("objective", "encoder", "data"))
    print(table(title, list(rates.values())))
    if options.output is not None:
        Path(options.output).write_text(json.dumps([asdict(rate) for rate in rates.values()], indent=2) + "\n")


command = replace(
    pretrain.command,
    name="benchmark",
    run=run,
    options=Benchmark,
    dry_run=None,
    results=None,
    common=(
        "rounds", "batch_sizes", "precisions", "output", "objective", "data.root", "data.image_size",
        "encoder.patch_size", "recipe.batch_size", "recipe.precision", "recipe.backend", "workers",
        "fabric.accelerator",
    ),
)  # fmt: skip
