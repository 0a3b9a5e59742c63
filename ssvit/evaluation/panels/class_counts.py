"""What a classifier predicts class by class, and the table of it. Standard library only."""

import csv
import io
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class ClassCounts(NamedTuple):
    """Images of a class, those of them that are predicted as it, and all that are predicted as it."""

    name: str
    images: int
    correct: int
    guessed: int

    @property
    def recall(self) -> float:
        """The share of the class's images predicted as it; NaN without images."""
        return self.correct / self.images if self.images else math.nan

    @property
    def precision(self) -> float:
        """The share of correct ones among the images predicted as the class; NaN without any."""
        return self.correct / self.guessed if self.guessed else math.nan

    @property
    def f1(self) -> float:
        """The harmonic mean of both, 0 where only one of them is defined; NaN where none is."""
        return 2 * self.correct / (self.images + self.guessed) if self.images + self.guessed else math.nan


def mean(values: Iterable[float]) -> float:
    """Return the mean of the values that are no NaN; NaN without any."""
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan


def percent(share: float) -> str:
    """0.123 -> 12.3 %."""
    return f"{100 * share:.1f} %"


def as_csv(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table; shares have four digits, a NaN is empty. Names of folders may hold bytes that are no text."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(head)
    for row in rows:
        shares = [("" if math.isnan(cell) else f"{cell:.4f}") if isinstance(cell, float) else cell for cell in row]
        table.writerow(shares)
    return text.getvalue().encode(errors="backslashreplace").decode()
