"""Texts of what was found class by class: a share in words, and lines of CSV. Standard library only."""

import csv
import io
from collections.abc import Iterable, Sequence


def percent(share: float) -> str:
    """A share in [0, 1], as 12.3 %."""
    return f"{100 * share:.1f} %"


def shares(correct: int, images: int, guessed: int) -> tuple[str, str, str]:
    """Recall, precision and F1 of a class, each empty where there is nothing to have a share of."""
    of = ((correct, images), (correct, guessed), (2 * correct, images + guessed))
    recall, precision, f1 = (f"{part / whole:.4f}" if whole else "" for part, whole in of)
    return recall, precision, f1


def written(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """CSV; names of folders may hold bytes that are no text."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(head)
    table.writerows(rows)
    return text.getvalue().encode(errors="backslashreplace").decode()
