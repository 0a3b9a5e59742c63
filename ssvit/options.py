"""The errors that a user can correct, and checks of single values. Standard library only."""

import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from numbers import Integral, Real
from pathlib import Path


class UserError(Exception):
    """A failure that the user can correct: the commands print its message as one line, without a traceback."""


MISSING = "???"  # the value of an option without a default that is not typed, as in YAML


class OptionError(UserError, ValueError):
    """An option has a value that it cannot have, or is `MISSING`."""

    def __init__(self, name: str, value: object, right: str) -> None:
        super().__init__(f"{name}: {right}" if value == MISSING else f"{name}={typed(value)}: {right}")
        self.name, self.value, self.right = name, value, right

    def __reduce__(self) -> tuple[type, tuple[str, object, str]]:
        """For pickle, by which a process sends it to another one: exceptions are made again from their message."""
        return type(self), (self.name, self.value, self.right)


class RootOptionError(OptionError):
    """An option has a value that it cannot have, and is named from the root of the configuration, as recipe.ema.

    `within` leaves its name unchanged.
    """


class Failure(UserError):
    """A failure in one line, with the status that the process ends with."""

    def __init__(self, line: str, status: int) -> None:
        super().__init__(" ".join(line.split()))
        self.status = status


_LONGEST = 200  # characters of a value in a message


def typed(value: object) -> str:
    """A value as a user types it, cut short where it is long: null, true, abc, [1,2], {a:1}."""
    if isinstance(value, list | tuple):
        text = f"[{','.join(map(typed, value))}]"
    elif isinstance(value, dict):
        text = f"{{{','.join(f'{name}:{typed(of)}' for name, of in value.items())}}}"
    else:
        text = json.dumps(value) if value is None or isinstance(value, bool) else str(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


@contextmanager
def within(group: str) -> Iterator[None]:
    """Name the options of errors raised in the block from the root of the configuration, as the user typed them."""
    try:
        yield
    except RootOptionError:
        raise
    except OptionError as error:
        raise OptionError(f"{group}.{error.name}", error.value, error.right) from None


def printable(text: object) -> str:
    r"""Text that a terminal shows as it is: control characters, which a file's name may hold, as \x1b and the like."""
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in str(text))


def one_line(text: object) -> str:
    """Text as a page or a figure shows it: `printable`, with white space, line ends included, as single spaces."""
    return printable(" ".join(str(text).split()))


_MARKDOWN = re.compile(r"[\\`*\[\]<>&|~$#!]|(?<![^\W_])_|_(?![^\W_])")  # an underscore within a word has no meaning


def markdown(text: object) -> str:
    """Text as one line of Markdown that shows it: no character has a meaning."""
    return _MARKDOWN.sub(r"\\\g<0>", one_line(text))


def print_lines(*lines: object) -> None:
    """Print each text as one line, see `printable`."""
    print(*map(printable, lines), sep="\n", end="\n" * bool(lines), flush=True)


def _is_whole(value: object, at_least: int) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= at_least


def whole(name: str, value: object, at_least: int = 1) -> None:
    """`value` must be an integer of `at_least` or more."""
    if not _is_whole(value, at_least):
        raise OptionError(name, value, f"must be a whole number, {at_least} or more")


def number(name: str, value: object, low: float, high: float = float("inf"), *, above: bool = False) -> None:
    """`value` must be a finite number from `low` to `high`, or above `low` where `above` is set."""
    given = float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    if not math.isfinite(given) or given > high or given < low or (above and given == low):
        least = f"above {low:g}" if above else f"{low:g} or more"
        most = "" if high == float("inf") else f" and at most {high:g}"
        raise OptionError(name, value, f"must be a number, {least}{most}")


def one_of(name: str, value: object, allowed: Iterable[object]) -> None:
    """`value` must stand in `allowed`."""
    allowed = tuple(allowed)
    if value not in allowed:
        raise OptionError(name, value, f"must be one of {', '.join(map(str, allowed))}")


def flag(name: str, value: object) -> None:
    """`value` must be true or false."""
    if not isinstance(value, bool):
        raise OptionError(name, value, "must be true or false")


def pair(name: str, value: object, at_least: int = 1) -> tuple[int, int]:
    """Read a height and width: one whole number for both, or a list of two. Returns (height, width)."""
    values = tuple(value) if isinstance(value, list | tuple) else (value, value)
    if len(values) != 2 or not all(_is_whole(side, at_least) for side in values):
        raise OptionError(name, value, f"must be a whole number of pixels, {at_least} or more, or [height, width]")
    height, width = values
    return height, width


def file_to_write(name: str, value: object, begins: Sequence[str] = ("",)) -> None:
    """`value` must be the path of a file that can be written, or replaced.

    begins: how the files begin that may be replaced, besides empty ones; by default all may.
    """
    path = Path(str(value))
    if path.exists() and not path.is_file():
        raise OptionError(name, value, f"must be a file, and this is {'a folder' if path.is_dir() else 'none'}")
    folder = path.absolute().parent
    if not folder.is_dir():
        raise OptionError(name, value, "there is no such folder to write it into")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise OptionError(name, value, "its folder cannot be written into")
    if path.exists() and not _begins(path, begins):
        raise OptionError(name, value, "is there, and is no file that this command has written; give another name")


def _begins(path: Path, ways: Sequence[str]) -> bool:
    """Whether a file begins in one of these ways, or is empty."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            start = file.read(max(map(len, ways)))
    except OSError:
        return False
    return not start or start.startswith(tuple(ways))


def folder_to_write(name: str, value: object) -> None:
    """`value` must be the path of a folder that can be written into, or made."""
    path = Path(str(value)).absolute()
    if path.exists() and not path.is_dir():
        raise OptionError(name, value, "must be a folder, and this is a file")
    there = next(folder for folder in (path, *path.parents) if folder.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise OptionError(name, value, f"{there} cannot be written into")
