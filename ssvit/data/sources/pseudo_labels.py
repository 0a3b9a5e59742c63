"""Write a table for data=csv of labelled images and of unlabelled images with predicted classes (pseudo-labels).

Standard library only.
"""

import csv
import io
import os
from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from ssvit.data.sources import table
from ssvit.data.sources.splits import AUTO, KNOWN
from ssvit.options import OptionError, UserError

_COLUMNS = ("path", "label", "split", "probability")
HEADING = ",".join(_COLUMNS)
_TRAIN = KNOWN["train"][0]


class PseudoLabel(NamedTuple):
    """The most probable class of an image and its probability."""

    path: str
    label: str
    probability: float


def select(labels: Iterable[PseudoLabel], *, confidence: float, per_class: int | None) -> list[PseudoLabel]:
    """Select pseudo-labels by probability, keeping their order.

    Args:
        labels: The pseudo-labels.
        confidence: Minimum probability.
        per_class: Maximum number per class, the most probable ones; None for no limit.
    """
    confident = [pseudo_label for pseudo_label in labels if pseudo_label.probability >= confidence]
    by_class = defaultdict(list)
    for position, pseudo_label in enumerate(confident):
        by_class[pseudo_label.label].append((-pseudo_label.probability, position))
    kept = {position for members in by_class.values() for _, position in sorted(members)[:per_class]}
    return [pseudo_label for position, pseudo_label in enumerate(confident) if position in kept]


def table_of(labels: Iterable[PseudoLabel], labelled: str | None) -> bytes:
    """Return the table (CSV, UTF-8): the rows of a labelled table with their splits, then pseudo-labels for training.

    Paths are absolute, so the table may be moved.

    Args:
        labels: The pseudo-labels.
        labelled: Path of a table of labelled images, or None.

    Raises:
        OptionError: `labelled` is not a table with labels.
        UserError: A row is invalid, or a file name is not UTF-8.
    """
    text = io.StringIO(newline="")
    rows = csv.writer(text)
    rows.writerow(_COLUMNS)
    if labelled is not None:
        columns = check(labelled)
        root = os.path.dirname(os.path.abspath(labelled))
        for row in table.rows(labelled, columns):
            rows.writerow((os.path.join(root, row.path), row.label, row.split or _TRAIN, ""))
    for pseudo_label in labels:
        rows.writerow(
            (os.path.abspath(pseudo_label.path), pseudo_label.label, _TRAIN, f"{pseudo_label.probability:.4f}")
        )
    try:
        return text.getvalue().encode()
    except UnicodeEncodeError as error:
        name = error.object[: error.end].rpartition("\n")[2]
        raise UserError(f"{name}: is not UTF-8, as names in a table must be; output=NAME.json supports any") from None


def check(labelled: str) -> table.Columns:
    """Return the columns of a table of labelled images.

    Raises:
        OptionError: The table lacks paths or labels.
    """
    try:
        columns = table.columns(labelled, table.Columns("path", AUTO, AUTO))
    except OptionError as error:
        raise OptionError("labelled", labelled, error.expectation) from None
    if columns.label is None:
        raise OptionError("labelled", labelled, "must have a column `label`")
    return columns
