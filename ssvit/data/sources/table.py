"""Read tables of images, their classes and their splits (standard library only).

A table is a CSV file in UTF-8, or a TSV file (.tsv), whose first line names the columns. A row names an image and,
optionally, its class or classes and its split. Multi-label classes are joined in one cell by a separator (cat|dog).
"""

import csv
import os
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from ssvit.data.sources.splits import AUTO, NAMES, Items, Splits, resolve, spellings
from ssvit.errors import OptionError, UserError, printable


class Columns(NamedTuple):
    """The names of the columns to read."""

    path: str
    label: str | None
    split: str | None
    mask: str | None = None
    separator: str | None = None  # between several classes in a cell


class Row(NamedTuple):
    """A row and its line number in the file; split and mask are "" without a column of them."""

    line: int
    path: str
    label: str | tuple[str, ...] | None  # a tuple of classes if there is a separator
    split: str
    mask: str = ""


def columns(table: str, options: Columns) -> Columns:
    """Resolve the options of the columns of a table.

    Args:
        table: Path of the table.
        options: Names of the columns; auto selects `label`, `split` and `mask` if they exist, None selects none.

    Returns:
        The names of the existing columns, without auto.

    Raises:
        OptionError: The table is not a readable file, or lacks a column.
    """
    if not os.path.isfile(table):
        raise OptionError("table", table, "must be a CSV file" if os.path.exists(table) else "no such file")
    header = next(_lines(table), (1, []))[1]

    def resolved(option: str, name: str | None) -> str | None:
        if name == AUTO:
            return option if option in header else None
        if name is not None and name not in header:
            existing = printable(", ".join(header) or "none")
            raise OptionError(option, name, f"must be a column of {table}, which has {existing}")
        return name

    path, label, split, mask = (resolved(*column) for column in zip(Columns._fields, options[:4], strict=False))
    if options.separator is not None and not (options.separator and label):
        reason = "separates the classes in the column that data.label names; null for one class each"
        raise OptionError("separator", options.separator, reason)
    return Columns(path or options.path, label, split, mask, options.separator)


def rows(table: str, columns: Columns) -> Iterator[Row]:
    """Yield the rows of a table in order.

    Raises:
        UserError: A row lacks a column, a path, a label or a mask.
    """
    lines = _lines(table)
    header = next(lines)[1]
    path, label, split, mask = (None if name is None else header.index(name) for name in columns[:4])
    assert path is not None
    for line, cells in lines:
        if len(cells) != len(header):
            raise UserError(f"{table}, line {line}: has {len(cells)} columns, and the first line {len(header)}")
        if not cells[path]:
            raise UserError(f"{table}, line {line}: has no path")
        cell = None if label is None else cells[label]
        classes: str | tuple[str, ...] | None = cell
        if cell is not None and columns.separator is not None:
            classes = tuple(filter(None, map(str.strip, cell.split(columns.separator))))
        elif cell == "":
            raise UserError(f"{table}, line {line}: has no label: label every row, or set data.label=null")
        if mask is not None and not cells[mask]:
            raise UserError(f"{table}, line {line}: has no mask")
        yield Row(line, cells[path], classes, *("" if at is None else cells[at] for at in (split, mask)))


def splits(table: str, columns: Columns, names: Mapping[str, str | None]) -> Splits:
    """Resolve the values of the split column by purpose.

    Without such a column, or with train=null, all remaining rows are for training.

    Args:
        table: Path of the table.
        columns: Names of its columns.
        names: Options train, validation and test, as for `ssvit.data.sources.splits.resolve`.

    Raises:
        UserError: The split of a row is neither a known name nor the value of an option.
    """
    lines: dict[str, int] = {}  # line of the first row of each split
    for row in rows(table, columns):
        lines.setdefault(row.split, row.line)
    if not lines:
        raise OptionError("table", table, "contains no path of an image")
    for name, line in lines.items():
        is_known = name.lower() in NAMES or name in names.values()
        if columns.split and names["train"] is not None and not is_known:
            expected = f"must be one of {', '.join(NAMES)}, or the value of data.train, data.validation or data.test"
            raise UserError(f"{table}, line {line}: split={printable(name)}: {expected}")

    def find(name: str) -> Items:
        return spellings(name, lines) if columns.split else ()

    def rest(held_out: Items) -> Items:
        if columns.split and names["train"] is not None:
            return ()
        return tuple(name for name in lines if name not in held_out)

    existing = ", ".join(map(printable, lines)) if columns.split else "none; data.split names the column of splits"
    return resolve(names, find, rest, expected=f"a split of {table}, which has {existing}")


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
        raise UserError(f"{table}: is not UTF-8 text") from None
    except csv.Error as error:
        raise UserError(f"{table}, line {reader.line_num}: is not a line of CSV: {error}") from None
