"""Completion in a shell: eval "$(ssvit -sc install=bash)", or zsh, or ssvit -sc install=fish | source.

Hydra's own, which knows one command without subcommands: the subcommand is completed here, the rest by Hydra.
"""

import os
import sys
from collections.abc import Callable, Sequence

import hydra

from ssvit.cli.help import offered
from ssvit.cli.launch import CONFIGS, Tool


def complete(action: str, commands: Sequence[str], find: Callable[[str], Tool]) -> None:
    """Do what -sc asks for: install=SHELL and uninstall=SHELL print a script, query=SHELL the words that fit.

    find: the tool of a command.
    """
    line = os.environ.get("COMP_LINE", "")
    typed = line.split()[1:]
    if action.startswith("query") and (not typed or (len(typed) == 1 and not line.endswith(" "))):
        print(" ".join(name for name in commands if name.startswith("".join(typed))))
        return
    name = typed[0] if typed else commands[0]
    if name not in commands:
        return
    tool = find(name)
    offered(tool, {})
    if typed:  # Hydra takes the first word for the program
        os.environ["COMP_LINE"] = line[line.index(typed[0]) :]
    sys.argv[1:] = ["-sc", action]
    hydra.main(version_base="1.3", config_path=str(CONFIGS), config_name=tool.name)(lambda config: None)()
