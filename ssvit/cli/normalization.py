"""Measure the channels of the training images of a data set, for images other than photographs.

Usage: ssvit normalization data=PATH.
"""

import json
import shlex
from pathlib import Path
from typing import Any

from ssvit.config.command import Command
from ssvit.config.composed import Config
from ssvit.data.normalization_options import MEASURED, Normalization
from ssvit.data.sources.base_options import SHORT_FORMS
from ssvit.data.sources.decode_options import RGB
from ssvit.data.sources.files_options import ImageFiles
from ssvit.engine.atomic_io import replace
from ssvit.engine.progress import progress
from ssvit.errors import print_lines


def run(config: Config) -> dict[str, Any]:
    """Measure the channels, print the options and write them if `output` is set; return them by name."""
    options: Normalization = config.options
    chosen = options.data
    config.line.announce()

    from ssvit.data import normalization

    source = config.build("data").train
    pixels = chosen.pixels if isinstance(chosen, ImageFiles) else RGB
    measured, lines = normalization.measure(
        source, pixels, workers=options.workers, progress=progress("images", " images")
    )
    print_lines(*lines)
    print(" ".join(f"data.{name}={json.dumps(value, separators=(',', ':'))}" for name, value in measured.items()))
    if options.output is not None:
        text = "".join(f"{name}: {json.dumps(value)}\n" for name, value in measured.items())
        replace(Path(options.output), f"{MEASURED} {'; '.join(lines)}\n{text}".encode())
        print(f"next: {config.line.command('pretrain')} data=… data.normalization={shlex.quote(options.output)}")
    return measured


command = Command("normalization", run, expansions=SHORT_FORMS, options=Normalization)
