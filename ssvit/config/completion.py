"""Complete commands and options in a shell.

Usage: eval "$(ssvit -sc install=bash)", also for zsh, or ssvit -sc install=fish | source. The scripts for the shells
are Hydra's. They complete the groups and options of the composed command, so that options need no line in a YAML file.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from glob import glob

from ssvit.config import composition
from ssvit.config.command import Command
from ssvit.config.command_line import Plain
from ssvit.options import UserError, typed


def complete(action: str, commands: Sequence[str], find: Callable[[str], Command]) -> None:
    """Print the completions of COMP_LINE (query=SHELL), or a script for a shell (install=SHELL, uninstall=SHELL).

    Args:
        action: Argument of -sc.
        commands: Names of all commands.
        find: Imports a command by name.
    """
    if not action.startswith("query"):
        composition.completion_script(action)
        return
    line = os.environ.get("COMP_LINE", "")
    words = line.split()[1:]
    word = words.pop() if words and not line.endswith(" ") else ""
    matches: Iterable[str] = (name for name in commands if name.startswith(word))
    if words:
        matches = _options(find(words[0]), words[1:], word) if words[0] in commands else ()
    print("\n".join(sorted(set(matches))))


def _options(command: Command, words: Sequence[str], word: str) -> Iterator[str]:
    """Yield the groups and options of a command that start with a word, or the values of the option in the word."""
    try:
        config = command.described(words)
    except UserError:  # an earlier word is invalid
        return
    name, equals, begin = word.partition("=")
    if not equals:
        groups = [*(f"{group}=" for group in config.choices), *command.aliases]
        yield from (group for group in groups if group.startswith(word) and group.endswith("="))
        yield from (option for option in _names(config.written, word) if option.startswith(word))
    elif begin.startswith((".", "/", "~")):
        yield from (f"{name}={file}" for file in glob(f"{os.path.expanduser(begin)}*"))
    elif files := config.line.names(command.aliases.get(f"{name}=", name).partition("@")[0].rstrip("=")):
        yield from (f"{name}={file}" for file in files if file.startswith(begin))
    elif typed(value := config.value(name)).startswith(begin) and value is not None:
        yield f"{name}={typed(value)}"


def _names(node: Plain, word: str, path: str = "") -> Iterator[str]:
    """Yield the options in the group that a word names; names of groups end in a dot."""
    for key, value in node.items():
        name = f"{path}{key}"
        if isinstance(value, dict) and word.startswith(f"{name}."):
            yield from _names(value, word, f"{name}.")
        elif not key.startswith("_"):
            yield f"{name}." if isinstance(value, dict) else f"{name}="
