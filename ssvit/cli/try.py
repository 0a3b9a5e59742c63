# ruff: noqa: N999 (modules of commands have the command's name, and are imported by it)
"""Describe your images, measure existing weights and a short pre-training on them, and name the best.

Usage: ssvit try PATH. The same command continues after the last measurement.
"""

import contextlib
import io
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from ssvit.checkpoints.checkpoint import FINETUNE
from ssvit.cli import find_command, finetune
from ssvit.config.command import Command
from ssvit.config.command_line import CommandLine
from ssvit.config.composed import Config
from ssvit.config.declaration import Tree
from ssvit.data import arguments
from ssvit.data.sources.base_options import SHORT_FORMS
from ssvit.errors import Failure
from ssvit.studies.options import Try


def run(config: Config) -> Path:
    """Run all stages, and return the folder of their results."""
    options: Try = config.options
    line = config.line
    line.announce()

    def compose(name: str, changes: Mapping[str, object]) -> Config:
        typed = {option: value for option, value in line.typed.items() if option.partition(".")[0] == "data"}
        preset = {"preset": "auto"} if name == "pretrain" else {}
        command = find_command(name)
        composed = command.compose(command.line(line.flags, {**typed, **preset, **changes}))
        composed = finetune.with_schedule(composed) if name == "finetune" else composed
        Tree(composed.options).check()
        return composed

    from ssvit.studies.first_look import FirstLook
    from ssvit.training.session import Session

    def finetuning(changes: Mapping[str, object]) -> float:
        """Return the seconds of fine-tuning with some options."""
        config = compose("finetune", changes)
        with contextlib.redirect_stdout(io.StringIO()):  # the sentences on the images have been printed
            session = Session(config.options, options.folder, stage=FINETUNE)
        session.recipes = partial(finetune.recipes, config, session)
        return session.estimate(config.options).total

    try:
        FirstLook(options, options.folder, line, compose, finetuning).run()
    except KeyboardInterrupt:
        kept = f"{options.folder} keeps what was measured, and the same command continues"
        raise Failure(f"stopped by Ctrl-C; {kept}", 130) from None
    return options.folder


def select_images(line: CommandLine) -> None:
    """Set the option data to the path after the name of the command."""
    if len(line.arguments) > 1 or (line.arguments and "data" in line.typed):
        raise Failure(f"{' '.join(line.arguments)}: must be one folder of images", 2)
    if line.arguments:
        path = line.arguments.pop()
        if not Path(path).exists():
            raise Failure(f"{path}: no such file or folder", 2)
        line.typed["data"] = path
        arguments.expand(line)


command = Command(
    "try",
    run,
    expansions=SHORT_FORMS,
    before=select_images,
    stand_in=select_images,
    positional="data",
    options=Try,
)
