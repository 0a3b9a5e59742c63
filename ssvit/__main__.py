"""Run the program `ssvit COMMAND …`, which imports only the modules that the command needs."""

import difflib
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from ssvit.cli import COMMANDS, find

if TYPE_CHECKING:
    from ssvit.config.composed import Config

_DRY_RUN = "--dry-run"
_SHOW_CONFIG = "--show-config"  # a dry run that also prints the composed configuration
_HELP = {"--help", "-h", "--help-all"}


def main(name: str | None = None) -> None:
    """Run a command.

    Args:
        name: Name of the command; None: the first argument.
    """
    arguments = sys.argv[1:]
    if name is None:
        name, *arguments = arguments or ["--help"]
    if name in ("--help", "-h"):
        print(usage())
    elif name == "--version":
        from importlib.metadata import version

        print(version("ssvit"))
    elif name in ("-sc", "--shell-completion"):
        from ssvit.config import completion

        completion.complete("".join(arguments[:1]), list(COMMANDS), find)
    elif name not in COMMANDS:
        close = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {close[0]}?" if close else f"must be one of {', '.join(COMMANDS)}"
        print(f"ssvit: {name}: {hint}", file=sys.stderr)
        sys.exit(2)
    else:
        _run(name, arguments)


def _run(name: str, arguments: list[str]) -> None:
    from ssvit.config.command import exit_on_failure
    from ssvit.options import Failure

    command = replace(find(name), prefix="ssvit ")
    flags = {_DRY_RUN, _SHOW_CONFIG, *_HELP}.intersection(arguments)
    arguments = [argument for argument in arguments if argument not in flags]
    if _HELP & flags:
        from ssvit.config import help

        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # for pipes to head
        with exit_on_failure():
            print(help.text(command, COMMANDS[name], arguments, everything="--help-all" in flags))
        return
    if flags:
        # A dry run previews the jobs of a sweep on this machine; nothing is submitted.
        launcher = ("hydra/launcher", "hydra.launcher")
        arguments = [argument for argument in arguments if not argument.startswith(launcher)]
        if command.dry_run is None:
            with exit_on_failure():
                raise Failure(f"{min(flags)}: must be a flag of pretrain or finetune, the commands that train", 2)
        preview = _with_configuration(command.dry_run) if _SHOW_CONFIG in flags else command.dry_run
        command = replace(command, run=preview, results=None)
    command.main(arguments)


def _with_configuration(dry_run: "Callable[[Config], Config]") -> "Callable[[Config], None]":
    """Return a dry run that also prints the completed configuration as YAML."""

    def run(config: "Config") -> None:
        from ssvit.config import composition
        from ssvit.processes import is_main_process

        completed = dry_run(config)
        if is_main_process():
            print(composition.as_yaml(completed), end="")

    return run


def usage() -> str:
    """Return the list of the commands and their purposes."""
    return "\n".join(
        [
            "ssvit COMMAND group=file group.option=value …",
            "",
            *(f"  {name:<13} {purpose}" for name, purpose in COMMANDS.items()),
            "",
            'ssvit COMMAND --help explains a command\'s options; eval "$(ssvit -sc install=bash)" completes them.',
        ]
    )


if __name__ == "__main__":
    sys.argv[0] = "ssvit"  # name of the program in messages
    main()
