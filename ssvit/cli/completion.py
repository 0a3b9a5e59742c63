"""Completion in a shell: eval "$(ssvit -sc install=bash)", or zsh, or ssvit -sc install=fish | source.

Hydra's own, which knows one command without subcommands: the subcommand is completed here, the rest by Hydra.
"""

import os
from collections.abc import Callable, Sequence

from ssvit.cli.help import stand_in
from ssvit.cli.launch import Tool
from ssvit.config import composition


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
    if typed:  # Hydra takes the first word for the program
        os.environ["COMP_LINE"] = line[line.index(typed[0]) :]
    composition.complete(action, name, stand_in(find(name), []))
