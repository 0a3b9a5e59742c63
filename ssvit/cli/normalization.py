"""Measure the channels of the training images of a data set, for images other than photographs.

Usage: ssvit normalization data=PATH.
"""

import json
from pathlib import Path
from typing import Any

from ssvit import advice
from ssvit.config.command import Command
from ssvit.config.composed import Config
from ssvit.config.declaration import Count, Name, Options, Part
from ssvit.data.sources.base_options import SHORT_FORMS, DataSet, ImageFiles
from ssvit.data.sources.decode_options import RGB
from ssvit.engine.atomic_io import replace
from ssvit.engine.progress import progress
from ssvit.errors import OptionError, file_to_write, print_lines

MEASURED = "# Measured by ssvit normalization."  # first line of the file that the command writes


class Normalization(Options):
    """Measure mean, standard deviation and range of a data set's channels."""

    data: Part[DataSet | None] = None
    """The images: a data set, or the path of a folder."""
    output: Name | None = None
    """File for the measured options, which a run reads by data.normalization=FILE; null: they are only printed."""
    workers: Count = 4
    """Number of threads that read images."""

    def check_consistency(self) -> None:
        """Check that there is a data set, and the file to write."""
        if self.data is None:
            raise OptionError("data", None, "must name a data set, or the path of a folder")
        if self.output is not None:
            file_to_write("output", self.output, begins=[MEASURED])


def run(config: Config) -> dict[str, Any]:
    """Measure the channels, print the options and write them if `output` is set; return them by name."""
    options: Normalization = config.options
    chosen = options.data
    config.line.announce()

    from ssvit.data import normalization

    data = options.build_part("data")
    print_lines(*filter(None, [data.summary]))
    source = data.train
    pixels = chosen.pixels if isinstance(chosen, ImageFiles) else RGB
    measured, lines = normalization.measure(
        source, pixels, workers=options.workers, progress=progress("images", " images")
    )
    print_lines(*lines)
    print(" ".join(f"data.{name}={json.dumps(value, separators=(',', ':'))}" for name, value in measured.items()))
    if options.output is not None:
        text = "".join(f"{name}: {json.dumps(value)}\n" for name, value in measured.items())
        replace(Path(options.output), f"{MEASURED} {'; '.join(lines)}\n{text}".encode())
        images = config.line.retyped(r"data(\.|$)")
        advice.print_next(advice.written(config.line, "pretrain", [*images, f"data.normalization={options.output}"]))
    return measured


command = Command("normalization", run, expansions=SHORT_FORMS, options=Normalization)
