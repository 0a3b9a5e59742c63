"""Run the program `ssvit COMMAND …`, which imports only the modules that the command needs."""

import difflib
import signal
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from ssvit.cli import COMMANDS, find_command

if TYPE_CHECKING:
    from ssvit.config.command import Command
    from ssvit.config.composed import Config

_DRY_RUN = "--dry-run"
_SHOW_CONFIG = "--show-config"  # a dry run that also prints the composed configuration
_HELP = {"--help", "-h", "--help-all"}


def main(name: str | None = None) -> None:
    """Run a command.

    Args:
        name: Name of the command, as the scripts in tools/ pass it; None: the first argument.
    """
    arguments = sys.argv[1:]
    if name is None:
        name, *arguments = arguments or ["--help"]
    if name in ("--help", "-h"):
        print(usage())
    elif name == "--version":
        from importlib.metadata import version

        print(version("ssvit"))
    elif name not in COMMANDS:
        close = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {close[0]}?" if close else f"must be one of {', '.join(COMMANDS)}"
        print(f"ssvit: {name}: {hint}", file=sys.stderr)
        sys.exit(2)
    else:
        try:
            _run(name, arguments)
        except KeyboardInterrupt:  # while the modules of the command are imported
            print("ssvit: stopped by Ctrl-C", file=sys.stderr)
            sys.exit(130)


def _run(name: str, arguments: list[str]) -> None:
    from ssvit.config.command import exit_on_failure, exit_with

    command = replace(find_command(name), prefix="ssvit ")
    flags = {_DRY_RUN, _SHOW_CONFIG, *_HELP}.intersection(arguments)
    arguments = [argument for argument in arguments if argument not in flags]
    if _HELP & flags:
        from ssvit.config import help

        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # for pipes to head
        with exit_on_failure():
            print(help.text(command, COMMANDS[name], arguments, everything="--help-all" in flags))
    elif not flags:
        command.main(arguments)
    elif command.dry_run is None:
        exit_with(f"{min(flags)}: must be a flag of pretrain or finetune, the commands that train", 2)
    else:
        _preview(command, arguments, show_config=_SHOW_CONFIG in flags)


def _preview(command: "Command", arguments: list[str], *, show_config: bool) -> None:
    """Preview a run, or the jobs of a sweep on this machine; nothing is submitted."""
    import tempfile

    def preview(config: "Config") -> None:
        from ssvit.config import composition
        from ssvit.engine.processes import is_main_process

        assert command.dry_run is not None
        completed = command.dry_run(config)
        if show_config and is_main_process():
            print(composition.as_yaml(completed), end="")

    launcher = ("hydra/launcher", "hydra.launcher")
    arguments = [argument for argument in arguments if not argument.startswith(launcher)]
    with tempfile.TemporaryDirectory() as folder:  # of Hydra's multirun.yaml
        replace(command, run=preview, results=None).main([*arguments, f"hydra.sweep.dir={folder}"])


def usage() -> str:
    """Return the list of the commands and their purposes."""
    return "\n".join(
        [
            "ssvit COMMAND group=file group.option=value …",
            "",
            *(f"  {name:<13} {purpose}" for name, purpose in COMMANDS.items()),
            "",
            "ssvit COMMAND --help explains a command's options.",
        ]
    )


if __name__ == "__main__":
    sys.argv[0] = "ssvit"  # name of the program in messages
    main()
