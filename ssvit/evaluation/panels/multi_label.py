"""A classifier's answers for images that may have several classes or none: each class is present at 0.5 or above.

Letters: b images of a batch, n of the source, k classes.
"""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ssvit.data.batch import Batch
from ssvit.evaluation.precision import average_precisions, share_of_class
from ssvit.evaluation.report.class_table import percent, shares, written
from ssvit.options import one_line

_NAMED = 3  # classes named in words


class Answers(NamedTuple):
    """The predictions of a model for images, in the order of the source, on the CPU."""

    place: Tensor  # which image of the source, (n,) int64
    truth: Tensor  # the classes that it has, (n, k) bool
    logits: Tensor  # (n, k) float64

    @classmethod
    def of(cls, logits: Tensor, batch: Batch) -> "Answers":
        """From logits (b, k) of a batch."""
        assert batch.labels is not None
        return cls(batch.slots.cpu(), batch.labels.cpu(), logits.double().cpu())

    @property
    def guess(self) -> Tensor:
        """Whether a class is predicted, (n, k)."""
        return self.logits >= 0

    def worst(self, count: int) -> list[tuple[int, int, float]]:
        """The wrong answers of the highest probability, of each image one: its row, the class, the probability."""
        wrong = (self.guess != self.truth) * self.logits.abs().sigmoid()
        highest, number = wrong.max(1)
        rows = highest.argsort(descending=True, stable=True)[:count]
        return [(row, int(number[row]), highest[row].item()) for row in rows.tolist() if highest[row] > 0]


class Tally(NamedTuple):
    """The predictions of one class."""

    name: str
    images: int
    correct: int
    guessed: int
    average_precision: float  # NaN without images

    @property
    def f1(self) -> float:
        """Of a class that has images or is guessed."""
        return 2 * self.correct / (self.images + self.guessed)


def tally(answers: Answers, classes: Sequence[str]) -> list[Tally]:
    """Class by class, in their order."""
    guess, truth = answers.guess, answers.truth
    counts = (column.sum(0).tolist() for column in (truth, guess & truth, guess))
    precisions = average_precisions(answers.logits, truth).tolist()
    return [Tally(*row) for row in zip(classes, *counts, precisions, strict=True)]


def metrics(answers: Answers, tallies: Sequence[Tally]) -> dict[str, float]:
    """map (the mean average precision of classes that have images), micro_f1, macro_f1 (of classes that have images or
    are guessed), loss (binary cross-entropy, summed over the classes), images; and what the best model has that ignores
    the images: map_constant (random order), micro_f1_constant (the best set of classes, for every image) and
    macro_f1_constant (all classes, for every image).
    """
    found = [one for one in tallies if one.images]
    n, counts = len(answers.truth), torch.tensor([one.images for one in found]).double().sort(descending=True).values
    asked = torch.arange(1, len(found) + 1) * n
    loss = F.binary_cross_entropy_with_logits(answers.logits, answers.truth.double(), reduction="sum") / n
    return {
        "map": fmean(one.average_precision for one in found) if found else torch.nan,
        "micro_f1": 2 * sum(one.correct for one in tallies) / max(1, sum(one.images + one.guessed for one in tallies)),
        "macro_f1": fmean([one.f1 for one in tallies if one.images + one.guessed] or [torch.nan]),
        "loss": loss.item(),
        "map_constant": share_of_class(answers.truth),
        "micro_f1_constant": (2 * counts.cumsum(0) / (asked + counts.sum())).amax().item() if found else torch.nan,
        "macro_f1_constant": (2 * counts / (n + counts)).mean().item(),
        "images": n,
    }


def lines(metrics: Mapping[str, float], tallies: Sequence[Tally]) -> list[str]:
    """The figures beside those of a model that ignores the images, and the classes of the lowest average precision."""
    found = [one for one in tallies if one.images]
    least = percent(metrics["map_constant"])
    several = f"{metrics['images']:,} images, each with any of {len(tallies)} classes"
    shares = {name: (metrics[name], metrics[f"{name}_constant"]) for name in ("micro_f1", "macro_f1")}
    at_half = ", ".join(
        f"{name.replace('_f1', '-F1')} {percent(share)} (the same classes for all images: {percent(constant)})"
        for name, (share, constant) in shares.items()
    )
    said = [
        f"mAP {percent(metrics['map'])} of {several} (a random order: {least})",
        *([] if metrics["map"] > metrics["map_constant"] else ["not above a random order, so this tells nothing yet"]),
        f"{at_half}; loss {metrics['loss']:.3f}",
    ]
    if "unreadable" in metrics:
        said.append(f"unreadable and left out: {metrics['unreadable']:,} images")
    if len(found) < len(tallies):
        said.append(f"{len(tallies) - len(found)} classes have no image here and do not count")
    lowest = sorted(found, key=lambda one: one.average_precision)[:_NAMED]
    named = (f"{one_line(one.name)} {percent(one.average_precision)} (of {one.images:,} images)" for one in lowest)
    return [*said, f"lowest: {', '.join(named)}"]


def table(tallies: Sequence[Tally]) -> str:
    """As CSV, a line for each class."""
    head = ("class", "images", "correct", "guessed", "average_precision", "recall", "precision", "f1")
    rows = []
    for one in tallies:
        average = f"{one.average_precision:.4f}" if one.images else ""
        own = shares(one.correct, one.images, one.guessed)
        rows.append((one.name, one.images, one.correct, one.guessed, average, *own))
    return written(head, rows)
