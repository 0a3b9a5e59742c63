"""Count a classifier's predictions by class and format the table, with the standard library only."""

import csv
import io
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class ClassCounts(NamedTuple):
    """Count the images of a class, those predicted correctly, and all images predicted as the class."""

    name: str
    images: int
    correct: int
    guessed: int

    @property
    def recall(self) -> float:
        """Return the share of the class's images that are predicted correctly; NaN without images."""
        return self.correct / self.images if self.images else math.nan

    @property
    def precision(self) -> float:
        """Return the share of correct predictions among those of the class; NaN without predictions."""
        return self.correct / self.guessed if self.guessed else math.nan

    @property
    def f1(self) -> float:
        """Return the harmonic mean of recall and precision: 0 if one of them is undefined, NaN if both are."""
        return 2 * self.correct / (self.images + self.guessed) if self.images + self.guessed else math.nan


def mean(values: Iterable[float]) -> float:
    """Return the mean of the values, ignoring NaNs; NaN if there is no value."""
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan


def percent(share: float) -> str:
    """Format a share as a percentage: 0.123 -> 12.3 %."""
    return f"{100 * share:.1f} %"


def as_csv(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Format a table as CSV, with four decimals for floats and empty cells for NaNs.

    Class names are names of folders and may contain bytes that are not valid text, which are escaped.
    """
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(head)
    for row in rows:
        shares = [("" if math.isnan(cell) else f"{cell:.4f}") if isinstance(cell, float) else cell for cell in row]
        table.writerow(shares)
    return text.getvalue().encode(errors="backslashreplace").decode()
