"""Measure training steps and the loader, or inference, on this machine.

Usage: ssvit benchmark objective=mae encoder=s. With batch_sizes=[64,128,256] precisions=[bf16-mixed,32-true], every
batch size is measured in every precision. With part=inference image_sizes=[64,224], forward passes of the encoder are
measured.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

from ssvit.cli import pretrain
from ssvit.config.command_line import CommandLine
from ssvit.config.composed import Config
from ssvit.config.declaration import Count, Name, Tree
from ssvit.errors import OptionError, file_to_write
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
    """JSON file for the rates; with several image_sizes, NAME.png shows them, as Figure 12 of the paper does. None: no
    file."""

    def check_consistency(self) -> None:
        """Check the files to write."""
        super().check_consistency()
        if self.image_sizes and self.part == "training":
            raise OptionError("image_sizes", list(self.image_sizes), "must be [] for part=training: data.image_size=…")
        if self.output is None:
            return
        file_to_write("output", self.output, begins=["["])
        if self.figure is not None:
            if self.figure == Path(self.output):
                raise OptionError("output", self.output, "must not end in .png, which is the name of the figure")
            file_to_write("output", self.figure, begins=["\ufffdPNG"])

    @property
    def figure(self) -> Path | None:
        """Return the file of the figure; None: no figure."""
        drawn = self.output is not None and self.part == "inference" and len(self.image_sizes) > 1
        return Path(str(self.output)).with_suffix(".png") if drawn else None


def add_objective(line: CommandLine) -> None:
    """Add an objective that accepts a model of timm to a command line of part=inference, which does not use it."""
    if line.typed["part"] == "inference" and line.typed.get("encoder") == "timm" and "objective" not in line.typed:
        line.implied["objective"] = "simclr"


def cases(config: Config) -> list[Config]:
    """Return a validated configuration for each combination of batch size and precision."""
    options: Benchmark = config.options
    changed = [
        config.changed({"recipe.batch_size": batch_size, "recipe.precision": precision, "launch.devices": 1})
        for precision in options.precisions or [options.recipe.precision]
        for batch_size in options.batch_sizes or [options.recipe.batch_size]
    ]
    for case in changed:
        Tree(case.options).check()
    return changed


def run(config: Config) -> None:
    """Measure, print a table, and write the rates if `output` is set."""
    if config.options.part == "inference":
        inference(config)
        return
    checked = cases(config)

    from ssvit.training.benchmark import rate_table, step_and_loader

    options: Benchmark = config.options
    rates = {rate.name: rate for case in checked for rate in step_and_loader(case.options, rounds=options.rounds)}
    title = ", ".join(f"{name}={config.choices[name]}" for name in ("objective", "encoder", "data"))
    print(rate_table(title, list(rates.values())))
    if options.output is not None:
        Path(options.output).write_text(json.dumps([asdict(rate) for rate in rates.values()], indent=2) + "\n")


def inference(config: Config, functions: Callable[[Any, Any], Mapping[str, Any]] | None = None) -> None:
    """Measure forward passes at each image size, print a table, and write the rates if `output` is set.

    Args:
        config: The configuration.
        functions: Return the functions to measure of an encoder and a device, by name; None: the encoder's own paths.
    """
    options: Benchmark = config.options
    single = config.changed({"launch.devices": 1})
    sizes = [single.changed({"data.image_size": size}) for size in options.image_sizes] or [single]
    for case in sizes:
        Tree(case.options).check()

    from ssvit.kernels.latency import latencies, latency_table, paths
    from ssvit.training import launch

    device = launch.start(options.recipe, sizes[0].options.launch).device
    rows = [
        row
        for encoder in (case.options.encoder.build() for case in sizes)
        for row in latencies(
            (functions or paths)(encoder, device),
            (encoder.channels, *encoder.image_size),
            batch_sizes=options.batch_sizes or (1, 32),
            threads=options.threads,
            rounds=options.rounds,
            device=device,
        )
    ]
    print(latency_table(f"inference, encoder={config.choices['encoder']}", rows))
    if options.output is not None:
        Path(options.output).write_text(json.dumps([row._asdict() for row in rows], indent=2) + "\n")
    if options.figure is not None:
        options.figure.write_bytes(_figure(rows).png())


def _figure(rows: Sequence[Any]) -> Any:
    """Return the speed over the image size as a figure, with a panel for each number of threads and images."""
    from ssvit.figures.plot import Line, Panel, Plot

    colors = ("model", "unchanged", "replaced", "ink")
    paths = list(dict.fromkeys(row.path for row in rows))
    panels = []
    for threads, count in dict.fromkeys((row.threads, row.batch_size) for row in rows):
        chosen = [row for row in rows if (row.threads, row.batch_size) == (threads, count)]
        lines = []
        for number, path in enumerate(paths):
            of_path = [row for row in chosen if row.path == path]
            sizes, speeds = [row.image_size[0] for row in of_path], [row.images_per_second for row in of_path]
            lines.append(Line(sizes, speeds, path, colors[number % len(colors)], "-" if number < 4 else "--", "."))
        panels.append(
            Panel(
                "images per second",
                lines,
                xlabel="image size in pixels",
                title=f"batch size {count}, {threads} thread" + "s" * (threads > 1),
                xticks=sorted({row.image_size[0] for row in chosen}),
                log_y=True,
            )
        )
    down = len({row.threads for row in rows})
    return Plot(panels, (4.2 * len(panels) / down, 3.2 * down), down=down, legend="below")


command = replace(
    pretrain.command,
    name="benchmark",
    run=run,
    options=Benchmark,
    dry_run=None,
    results=None,
    expansions={"part": "ssvit.cli.benchmark.add_objective", **pretrain.command.expansions},
    common=(
        "part", "rounds", "batch_sizes", "image_sizes", "threads", "precisions", "output", "objective", "data.root",
        "data.image_size", "encoder.patch_size", "recipe.batch_size", "recipe.precision", "recipe.backend", "workers",
        "launch.accelerator",
    ),
)  # fmt: skip
