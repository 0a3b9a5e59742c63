"""Which images a table names, and what each is for. Standard library only.

A table is a CSV file in UTF-8, or a TSV file (.tsv), whose first line names the columns. A row names an image, and
perhaps its class and its split.
"""

import csv
import os
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from ssvit.data.folder import AUTO, KNOWN
from ssvit.options import OptionError, UserError, printable


class Columns(NamedTuple):
    """The names of the columns that are read."""

    path: str
    label: str | None
    split: str | None


class Row(NamedTuple):
    """A row, with its number in the file; an empty split where there is no column of splits."""

    line: int
    path: str
    label: str | None
    split: str


class Splits(NamedTuple):
    """The values of the column of splits by what their rows are for; train: None for all other rows."""

    train: str | None
    validation: str | None
    test: str | None

    def part(self, row: Row) -> str | None:
        """What a row is for: train, validation, test, or None for nothing."""
        if self.validation is not None and row.split == self.validation:
            return "validation"
        if self.test is not None and row.split == self.test:
            return "test"
        return "train" if self.train in (None, row.split) else None


def columns(table: object, *, path: str, label: str | None, split: str | None) -> Columns:
    """The columns of a table by their names; auto: `label` and `split` where there are such, None: none.

    OptionError if the table is no file that can be read, or lacks a column.
    """
    if not isinstance(table, str | os.PathLike) or not os.fspath(table):
        raise OptionError("table", table, "must name a CSV file")
    if os.path.isdir(table):
        raise OptionError("table", table, "must be a CSV file, and this is a folder")
    if not os.path.exists(table):
        raise OptionError("table", table, "no such file")
    first = next(_lines(os.fspath(table)), (1, []))[1]
    asked = _texts(path=path, label=label, split=split)
    found: dict[str, str | None] = {}
    for option, name in asked.items():
        if name == AUTO and option != "path":
            found[option] = option if option in first else None
        elif name in first or (name is None and option != "path"):
            found[option] = name
        else:
            there = printable(", ".join(first) or "none")
            raise OptionError(option, name, f"must be a column of {table}, which has {there}")
    return Columns(str(found["path"]), found["label"], found["split"])


def rows(table: str, of: Columns) -> Iterator[Row]:
    """The rows of a table in their order. UserError for a row that lacks a column, a path or a label."""
    lines = _lines(table)
    _, first = next(lines)
    path, label, split = (None if name is None else first.index(name) for name in of)
    assert path is not None  # every table has this column
    for line, cells in lines:
        if len(cells) != len(first):
            raise UserError(f"{table}, line {line}: has {len(cells)} columns, and the first line {len(first)}")
        if not cells[path]:
            raise UserError(f"{table}, line {line}: has no path")
        if label is not None and not cells[label]:
            raise UserError(f"{table}, line {line}: has no label: give each row one, or set data.label=null")
        yield Row(line, cells[path], None if label is None else cells[label], "" if split is None else cells[split])


def splits(table: str, of: Columns, *, train: str | None, validation: str | None, test: str | None) -> Splits:
    """Which split of a table is trained on, which is for choices, which for the reported figure.

    Each is named, or None, or auto: the first of the KNOWN names that a row has. Without a column of splits all rows
    are trained on. OptionError if no row has a split that is named, or two have one name; UserError for a row of a
    split that is neither known nor named.
    """
    asked = _texts(train=train, validation=validation, test=test)
    lines: dict[str, int] = {}  # of the first row of each split
    for row in rows(table, of):
        lines.setdefault(row.split, row.line)
    if not lines:
        raise OptionError("table", table, "names no image")
    there = ", ".join(map(printable, lines))
    found: dict[str, str | None] = {}
    for part, name in asked.items():
        if name == AUTO:
            found[part] = next((known for known in KNOWN[part] if known in lines), None)
        elif name is None or (of.split is not None and name in lines):
            found[part] = name
        else:
            right = f"a split in {table}: {there}" if of.split else "data.split must name the column of splits"
            raise OptionError(part, name, f"must be {AUTO}, null, or {right}" if of.split else right)
    chosen = Splits(**found)
    _check(table, chosen, asked, lines if of.split else {})
    return chosen


def _check(table: str, chosen: Splits, asked: Mapping[str, str | None], lines: Mapping[str, int]) -> None:
    for part, other in (("validation", "train"), ("test", "train"), ("test", "validation")):
        name = getattr(chosen, part)
        if name is not None and name == getattr(chosen, other):
            raise OptionError(part, asked[part], f"must be another split than data.{other}; null for none")
    known = [name for names in KNOWN.values() for name in names]
    for name, line in lines.items():
        if asked["train"] is not None and name not in (*known, *chosen):
            right = f"must be one of {', '.join(known)}, or the value of data.train, data.validation or data.test"
            raise UserError(f"{table}, line {line}: split={printable(name)}: {right}")
    if lines and chosen.train is None and (asked["train"] or not lines.keys() - {chosen.validation, chosen.test}):
        right = f"must name the split to train on: {table} has {', '.join(map(printable, lines))}"
        raise OptionError("train", asked["train"], right)


def _texts(**names: object) -> dict[str, str | None]:
    """Names as a table has them, as text: a user's 0 is a number."""
    return {option: None if name is None else str(name) for option, name in names.items()}


def _lines(table: str) -> Iterator[tuple[int, list[str]]]:
    """The cells of each line that is not empty, without spaces around them, and its number. UserError."""
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
