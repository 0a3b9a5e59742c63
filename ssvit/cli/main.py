"""ssvit COMMAND …: the commands that tools/ has in a checkout, from anywhere."""

import difflib
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ssvit.cli.commands import COMMANDS, find
from ssvit.cli.launch import in_one_line
from ssvit.config import composition
from ssvit.config.composed import Config
from ssvit.options import Failure
from ssvit.processes import is_main_process

_DRY_RUN = "--dry-run"
_SHOW_CONFIG = "--show-config"  # a dry run that also prints the composed configuration
_HELP = {"--help", "-h", "--help-all"}


def main(name: str | None = None) -> None:
    """Run a command. name: that of a file of tools/; None: the first argument names it."""
    arguments = sys.argv[1:]
    if name is not None:
        spelling = f"python {Path(sys.argv[0]).parent}{os.sep}", ".py"
    else:
        spelling = "ssvit ", ""
        name, *arguments = arguments or ["--help"]
    if name in ("--help", "-h"):
        print(usage())
    elif name == "--version":
        from importlib.metadata import version

        print(version("ssvit"))
    elif name in ("-sc", "--shell-completion"):
        from ssvit.cli import completion

        completion.complete("".join(arguments[:1]), list(COMMANDS), find)
    elif name not in COMMANDS:
        close = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {close[0]}?" if close else f"must be one of {', '.join(COMMANDS)}"
        print(f"ssvit: {name}: {hint}", file=sys.stderr)
        sys.exit(2)
    elif asked := _HELP.intersection(arguments):
        from ssvit.cli import help

        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # head may read a part of it
        given = [argument for argument in arguments if argument not in _HELP]
        with in_one_line():
            print(help.text(replace(find(name), spelling=spelling), given, everything="--help-all" in asked))
    elif flags := {_DRY_RUN, _SHOW_CONFIG}.intersection(arguments):
        tool = replace(find(name), spelling=spelling)
        arguments = [argument for argument in arguments if argument not in flags]
        # The jobs of a sweep are previewed here: nothing is submitted.
        arguments = [
            argument for argument in arguments if not argument.startswith(("hydra/launcher", "hydra.launcher"))
        ]
        if tool.dry_run is None:
            with in_one_line():
                raise Failure(f"{min(flags)}: is for the commands that train, pretrain and finetune", 2)
        replace(tool, run=_with_configuration(tool.dry_run) if _SHOW_CONFIG in flags else tool.dry_run).main(arguments)
    else:
        replace(find(name), spelling=spelling).main(arguments)


def _with_configuration(dry_run: Callable[[Config], Config]) -> Callable[[Config], None]:
    """A dry run that then prints the configuration that it returns, as YAML."""

    def run(config: Config) -> None:
        completed = dry_run(config)
        if is_main_process():
            print(composition.as_yaml(completed), end="")

    return run


def usage() -> str:
    """All commands and what they do."""
    lines = ["ssvit COMMAND group=file group.option=value …", ""]
    for name in COMMANDS:
        lines.append(f"  {name:<13} {find(name).purpose}")
    return "\n".join(
        [
            *lines,
            "",
            'ssvit COMMAND --help explains a command\'s options; eval "$(ssvit -sc install=bash)" completes them.',
        ]
    )
