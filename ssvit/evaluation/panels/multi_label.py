"""Evaluate a multi-label classifier, where a class is predicted at a probability of 0.5 or above.

Shapes use b images of a batch, n images of the source, k classes.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ssvit.data.batch import Batch
from ssvit.evaluation.panels.class_counts import ClassCounts, as_csv, mean, percent
from ssvit.evaluation.precision import average_precisions, share_of_class
from ssvit.options import one_line

_NAMED = 3  # classes named in the text


class MultiLabelPredictions(NamedTuple):
    """Store predictions of a model for images in the order of the source, on the CPU."""

    place: Tensor  # index in the source, (n,) int64
    truth: Tensor  # true classes, (n, k) bool
    logits: Tensor  # (n, k) float64

    @classmethod
    def of(cls, logits: Tensor, batch: Batch) -> "MultiLabelPredictions":
        """Return the predictions for logits (b, k) of a batch."""
        assert batch.labels is not None
        return cls(batch.slots.cpu(), batch.labels.cpu(), logits.double().cpu())

    @property
    def guess(self) -> Tensor:
        """Return whether each class is predicted, (n, k) bool."""
        return self.logits >= 0

    def worst(self, count: int) -> list[tuple[int, int, float]]:
        """Return row, class and probability of each image's most confident wrong prediction, highest first."""
        wrong = (self.guess != self.truth) * self.logits.abs().sigmoid()
        highest, number = wrong.max(1)
        rows = highest.argsort(descending=True, stable=True)[:count]
        return [(row, int(number[row]), highest[row].item()) for row in rows.tolist() if highest[row] > 0]

    def by_class(self, classes: Sequence[str]) -> list[tuple[ClassCounts, float]]:
        """Return the counts of each class and its average precision, which is NaN without images."""
        columns = (column.sum(0).tolist() for column in (self.truth, self.guess & self.truth, self.guess))
        counts = [ClassCounts(*row) for row in zip(classes, *columns, strict=True)]
        return list(zip(counts, average_precisions(self.logits, self.truth).tolist(), strict=True))

    def metrics(self, by_class: Sequence[tuple[ClassCounts, float]]) -> dict[str, float]:
        """Return metrics of the classifier and of the best predictions that ignore the images.

        Metrics: map (mean average precision of classes that have images), micro_f1, macro_f1 (of classes that have
        images or are predicted), loss (binary cross-entropy summed over the classes), and images (their number).
        Baselines: map_constant (random order), micro_f1_constant (the best set of classes for all images) and
        macro_f1_constant (all classes for all images).
        """
        counts = [one for one, _ in by_class]
        n, total = len(self.truth), sum(one.images + one.guessed for one in counts)
        images = torch.tensor([one.images for one in counts if one.images]).double().sort(descending=True).values
        predicted = torch.arange(1, len(images) + 1) * n
        loss = F.binary_cross_entropy_with_logits(self.logits, self.truth.double(), reduction="sum") / n
        best = 2 * images.cumsum(0) / (predicted + images.sum())
        return {
            "map": mean(precision for _, precision in by_class),
            "micro_f1": 2 * sum(one.correct for one in counts) / max(1, total),
            "macro_f1": mean(one.f1 for one in counts),
            "loss": loss.item(),
            "map_constant": share_of_class(self.truth),
            "micro_f1_constant": best.amax().item() if len(images) else torch.nan,
            "macro_f1_constant": (2 * images / (n + images)).mean().item(),
            "images": n,
        }


def lines(metrics: Mapping[str, float], by_class: Sequence[tuple[ClassCounts, float]]) -> list[str]:
    """Return lines on the metrics, their baselines, and the classes of the lowest average precision."""
    measured = [(one, precision) for one, precision in by_class if one.images]
    at_half = ", ".join(
        f"{name}-F1 {percent(metrics[f'{name}_f1'])} (the same classes for all images: "
        f"{percent(metrics[f'{name}_f1_constant'])})"
        for name in ("micro", "macro")
    )
    found = [
        f"mAP {percent(metrics['map'])} of {metrics['images']:,} images, each with any of {len(by_class)} classes "
        f"(a random order: {percent(metrics['map_constant'])})",
        *([] if metrics["map"] > metrics["map_constant"] else ["not above a random order, so this tells nothing yet"]),
        f"{at_half}; loss {metrics['loss']:.3f}",
    ]
    if absent := len(by_class) - len(measured):
        found.append(f"{absent} classes have no image here and do not count")
    lowest = sorted(measured, key=lambda pair: pair[1])[:_NAMED]
    named = (f"{one_line(one.name)} {percent(precision)} (of {one.images:,} images)" for one, precision in lowest)
    return [*found, f"lowest: {', '.join(named)}"]


def table(by_class: Sequence[tuple[ClassCounts, float]]) -> str:
    """Return a CSV table with one line for each class."""
    head = ("class", "images", "correct", "guessed", "average_precision", "recall", "precision", "f1")
    return as_csv(head, ((*one, precision, one.recall, one.precision, one.f1) for one, precision in by_class))
