"""Define errors that a user can correct, and checks of single values. No torch, pydantic or Hydra."""

import math
import os
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from numbers import Integral, Real
from pathlib import Path

from ssvit.values import text_of


class UserError(Exception):
    """A failure that the user can correct. Commands print its message as one line, without a traceback."""


MISSING = "???"  # value of a required option that was not typed, as in YAML


class OptionError(UserError, ValueError):
    """An option has an invalid value, or a required option is `MISSING`.

    Args:
        name: Name of the option.
        value: Its value.
        expectation: The expected value, as in "must be true or false".
    """

    def __init__(self, name: str, value: object, expectation: str) -> None:
        is_missing = isinstance(value, str) and value == MISSING
        line = f"{name}: {expectation}" if is_missing else f"{name}={typed(value)}: {expectation}"
        super().__init__(line.encode(errors="backslashreplace").decode())  # pydantic does not accept other file names
        self.name, self.value, self.expectation = name, value, expectation

    def __reduce__(self) -> tuple[type, tuple[str, object, str]]:
        """Pickle the arguments of the constructor; by default, only the message would reach another process."""
        return type(self), (self.name, self.value, self.expectation)


class RootOptionError(OptionError):
    """An option, named from the root of the configuration (such as recipe.ema), has an invalid value.

    `within` leaves its name unchanged.
    """


class Failure(UserError):
    """A failure with a one-line message and an exit status.

    Args:
        line: The message; white space is collapsed.
        status: Exit status of the process.
    """

    def __init__(self, line: str, status: int) -> None:
        super().__init__(" ".join(line.split()))
        self.status = status

    def __reduce__(self) -> tuple[type, tuple[str, int]]:
        """Pickle the arguments of the constructor, as for OptionError."""
        return type(self), (str(self), self.status)


_LONGEST = 200  # maximum number of characters of a value in a message


def typed(value: object) -> str:
    """Return a value as it can be typed, truncated if long: null, true, abc, '3', [1,2], {a: 1}."""
    try:
        text = text_of(value)
    except TypeError:  # not the value of an option
        text = str(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


@contextmanager
def within(group: str) -> Iterator[None]:
    """Prefix the options in errors raised within the block with the name of their group."""
    try:
        yield
    except RootOptionError:
        raise
    except OptionError as error:
        raise OptionError(f"{group}.{error.name}", error.value, error.expectation) from None


def printable(text: object) -> str:
    r"""Return text with control characters, which a file name may contain, escaped as \x1b."""
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in str(text))


def one_line(text: object) -> str:
    """Return text for a page or a figure: `printable`, with each run of white space replaced by one space."""
    return printable(" ".join(str(text).split()))


_MARKDOWN = re.compile(r"[\\`*\[\]<>&|~$#!]|(?<![^\W_])_|_(?![^\W_])")  # an underscore inside a word is literal


def markdown(text: object) -> str:
    """Return text as one line of Markdown in which all special characters are escaped."""
    return _MARKDOWN.sub(r"\\\g<0>", one_line(text))


def print_lines(*lines: object) -> None:
    """Print each text as one line, with control characters escaped by `printable`."""
    print(*map(printable, lines), sep="\n", end="\n" * bool(lines), flush=True)


def aligned(rows: Sequence[Sequence[str]], *, letters: int | None = None) -> list[str]:
    """Return the lines of a table for the terminal: the first column is aligned left, the others right.

    Args:
        rows: The headings and the other rows.
        letters: Number of characters to which headings are wrapped; None: they are not.
    """
    if letters is not None:
        heads = [textwrap.wrap(head, letters) for head in rows[0]]
        rows = [*zip_longest(*heads, fillvalue=""), *rows[1:]]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join([first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row, widths[1:], strict=True))])
        for first, *row in rows
    ]


def _is_whole(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 1


def whole(name: str, value: object) -> None:
    """Raise OptionError unless `value` is a positive integer."""
    if not _is_whole(value):
        raise OptionError(name, value, "must be a whole number, 1 or more")


def number(name: str, value: object, low: float, high: float = float("inf"), *, above: bool = False) -> None:
    """Raise OptionError unless a value is a finite number in an interval.

    Args:
        name: Name of the option.
        value: Its value.
        low: Minimum.
        high: Maximum, inclusive.
        above: Whether the minimum is excluded.
    """
    checked = float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    if not math.isfinite(checked) or checked > high or checked < low or (above and checked == low):
        least = f"above {low:g}" if above else f"{low:g} or more"
        most = "" if high == float("inf") else f" and at most {high:g}"
        raise OptionError(name, value, f"must be a number, {least}{most}")


def one_of(name: str, value: object, allowed: Iterable[object]) -> None:
    """Raise OptionError unless `value` is one of the allowed values."""
    allowed = tuple(allowed)
    if value not in allowed:
        raise OptionError(name, value, f"must be one of {', '.join(map(str, allowed))}")


def pair(name: str, value: object) -> tuple[int, int]:
    """Return (height, width) from an integer for both or a list of two.

    Args:
        name: Name of the option.
        value: Its value.

    Raises:
        OptionError: The value has another form.
    """
    values = tuple(value) if isinstance(value, list | tuple) else (value, value)
    if len(values) != 2 or not all(map(_is_whole, values)):
        raise OptionError(name, value, "must be a whole number of pixels, 1 or more, or [height, width]")
    height, width = values
    return height, width


def file_to_write(name: str, value: object, begins: Sequence[str] = ("",)) -> None:
    """Raise OptionError unless a value is the path of a file that can be written or replaced.

    Args:
        name: Name of the option.
        value: Its value.
        begins: Prefixes of the content of files that may be replaced; empty files may always be replaced.
    """
    path = Path(str(value))
    if path.exists() and not path.is_file():
        raise OptionError(name, value, f"must be a file, not {'a folder' if path.is_dir() else 'a device'}")
    folder = path.absolute().parent
    if not folder.is_dir():
        raise OptionError(name, value, "must be in a folder that exists")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise OptionError(name, value, "must be in a folder that is writable")
    if path.exists() and not _begins(path, begins):
        raise OptionError(name, value, "must be the name of a new file: this one was not written by ssvit")


def _begins(path: Path, ways: Sequence[str]) -> bool:
    """Return whether a file is empty or its content begins with one of some prefixes."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            start = file.read(max(map(len, ways)))
    except OSError:
        return False
    return not start or start.startswith(tuple(ways))


def folder_to_write(name: str, value: object) -> None:
    """Raise OptionError unless `value` is the path of a folder that is writable or can be created."""
    path = Path(str(value)).absolute()
    if path.exists() and not path.is_dir():
        raise OptionError(name, value, "must be a folder, not a file")
    existing = next(folder for folder in (path, *path.parents) if folder.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise OptionError(name, value, f"{existing} must be writable")
