"""Read tables of images, their classes and their splits (standard library only).

A table is a CSV file in UTF-8, or a TSV file (.tsv), whose first line names the columns. A row names an image and,
optionally, its class or classes and its split. Multi-label classes are either joined in one cell by a separator
(cat|dog) or have one column of 0 and 1 each.
"""

import csv
import os
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from ssvit.data.sources.splits import AUTO, NAMES, Items, Splits, resolve
from ssvit.options import OptionError, UserError, printable

_MARKS = {"0": False, "0.0": False, "False": False, "1": True, "1.0": True, "True": True}  # as written by pandas too


class Columns(NamedTuple):
    """The names of the columns to read."""

    path: str
    label: str | tuple[str, ...] | None  # several: columns of 0 and 1, one for each class
    split: str | None
    separator: str | None = None  # between several classes in a cell

    @property
    def is_multi_label(self) -> bool:
        """Return whether an image may have several classes, or none."""
        return self.separator is not None or isinstance(self.label, tuple)


class Row(NamedTuple):
    """A row and its line number in the file; the split is "" without a column of splits."""

    line: int
    path: str
    label: str | tuple[str, ...] | None  # a tuple of classes if the table is multi-label
    split: str


def columns(table: str, given: Columns) -> Columns:
    """Resolve the options of the columns of a table.

    Args:
        table: Path of the table.
        given: Names of the columns; auto selects `label` and `split` if they exist, None selects none.

    Returns:
        The names of the existing columns, without auto.

    Raises:
        OptionError: The table is not a readable file, or lacks a column.
    """
    if not os.path.isfile(table):
        raise OptionError("table", table, "must be a CSV file" if os.path.exists(table) else "no such file")
    first = next(_lines(table), (1, []))[1]

    def found(option: str, name: str | None) -> str | None:
        if name is None or (name == AUTO and option not in first):
            return None
        if name == AUTO:
            return option
        if str(name) not in first:
            there = printable(", ".join(first) or "none")
            raise OptionError(option, name, f"must be a column of {table}, which has {there}")
        return str(name)

    path, split = found("path", given.path), found("split", given.split)
    label: str | tuple[str, ...] | None
    if isinstance(given.label, list | tuple):
        label = tuple(str(found("label", str(name))) for name in given.label)
        if len(set(label)) < max(2, len(label)):
            right = "must be one column, or a list of two or more different ones of 0 and 1"
            raise OptionError("label", list(label), right)
    else:
        label = found("label", given.label)
    if given.separator is not None and not (given.separator and isinstance(label, str)):
        right = "stands between the classes in the one column that data.label names; null for one class each"
        raise OptionError("separator", given.separator, right)
    return Columns(str(path), label, split, None if given.separator is None else str(given.separator))


def rows(table: str, of: Columns) -> Iterator[Row]:
    """Yield the rows of a table in order.

    Raises:
        UserError: A row lacks a column, a path or a label.
    """
    lines = _lines(table)
    _, first = next(lines)
    path, split = first.index(of.path), None if of.split is None else first.index(of.split)
    label = first.index(of.label) if isinstance(of.label, str) else None
    marks = [(name, first.index(name)) for name in of.label] if isinstance(of.label, tuple) else []
    for line, cells in lines:
        if len(cells) != len(first):
            raise UserError(f"{table}, line {line}: has {len(cells)} columns, and the first line {len(first)}")
        if not cells[path]:
            raise UserError(f"{table}, line {line}: has no path")
        found: str | tuple[str, ...] | None = None
        if marks:
            found = tuple(name for name, place in marks if _is_marked(table, line, name, cells[place]))
        elif label is not None and of.separator is not None:
            found = tuple(filter(None, map(str.strip, cells[label].split(of.separator))))
        elif label is not None:
            found = cells[label]
            if not found:
                raise UserError(f"{table}, line {line}: has no label: give each row one, or set data.label=null")
        yield Row(line, cells[path], found, "" if split is None else cells[split])


def _is_marked(table: str, line: int, name: str, cell: str) -> bool:
    if cell not in _MARKS:
        raise UserError(f"{table}, line {line}: {printable(name)}={printable(cell)}: must be 0 or 1")
    return _MARKS[cell]


def splits(table: str, of: Columns, names: Mapping[str, str | None]) -> Splits:
    """Resolve the values of the split column by purpose.

    Without such a column, or with train=null, all remaining rows are for training.

    Args:
        table: Path of the table.
        of: Names of its columns.
        names: Options train, validation and test, as for `ssvit.data.sources.splits.resolve`.

    Raises:
        UserError: The split of a row is neither a known name nor the value of an option.
    """
    names = {part: None if name is None else str(name) for part, name in names.items()}  # YAML reads 0 as a number
    lines: dict[str, int] = {}  # line of the first row of each split
    for row in rows(table, of):
        lines.setdefault(row.split, row.line)
    if not lines:
        raise OptionError("table", table, "names no image")
    allowed = {*NAMES, *names.values()}
    for name, line in lines.items():
        if of.split and names["train"] is not None and name not in allowed:
            right = f"must be one of {', '.join(NAMES)}, or the value of data.train, data.validation or data.test"
            raise UserError(f"{table}, line {line}: split={printable(name)}: {right}")

    def find(name: str) -> Items:
        return (name,) if of.split and name in lines else ()

    def rest(held_out: Items) -> Items:
        return tuple(name for name in lines if name not in held_out) if not of.split or names["train"] is None else ()

    there = ", ".join(map(printable, lines)) if of.split else "none; data.split names the column of splits"
    return resolve(names, find, rest, expected=f"a split of {table}, which has {there}")


def _lines(table: str) -> Iterator[tuple[int, list[str]]]:
    """Yield line number and stripped cells of each line that is not empty; raise UserError for invalid files."""
    try:
        with open(table, encoding="utf-8-sig", newline="") as file:
            delimiter = "\t" if table.lower().endswith(".tsv") else ","
            reader = csv.reader(file, delimiter=delimiter, skipinitialspace=True, strict=True)
            for cells in reader:
                if cells:
                    yield reader.line_num, [cell.strip() for cell in cells]
    except OSError as error:
        raise UserError(f"{table}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"{table}: is no text in UTF-8") from None
    except csv.Error as error:
        raise UserError(f"{table}, line {reader.line_num}: is no line of CSV: {error}") from None
