"""Store the predictions of a classifier, and compute its metrics, a table of the classes, and lines for the console.

`Predictions` are of images with one class each, `MultiLabelPredictions` of images with any number of classes, where a
class is predicted at a probability of 0.5 or above.

Shapes use b images of a batch, n images of the source, k classes.
"""

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ssvit.data.batch import Batch
from ssvit.data.sources.base import class_text
from ssvit.errors import one_line
from ssvit.evaluation.calibration import Calibration
from ssvit.evaluation.precision import average_precisions, share_of_class
from ssvit.evaluation.statistics import NOT_ABOVE_CHANCE, above_chance, chance

_NAMED = 3  # classes named in the lines


class ClassCounts(NamedTuple):
    """Count the images of a class, those predicted correctly, and all images predicted as the class."""

    name: str
    images: int
    correct: int
    predicted: int
    average_precision: float = math.nan  # of multi-label images; NaN without images

    @property
    def recall(self) -> float:
        """Return the share of the class's images that are predicted correctly; NaN without images."""
        return self.correct / self.images if self.images else math.nan

    @property
    def precision(self) -> float:
        """Return the share of correct ones among all predictions of the class; NaN without predictions."""
        return self.correct / self.predicted if self.predicted else math.nan

    @property
    def f1(self) -> float:
        """Return the harmonic mean of recall and precision: 0 if one of them is undefined, NaN if both are."""
        return 2 * self.correct / (self.images + self.predicted) if self.images + self.predicted else math.nan


class Mistake(NamedTuple):
    """Describe a wrong prediction by its row, the true classes, the predicted class and its probability."""

    row: int
    truth: str
    prediction: str
    probability: float


class Predictions(NamedTuple):
    """Store predictions for images in the order of the source; each column is (n,), on the CPU."""

    source_indices: Tensor  # index in the source, int64
    truth: Tensor  # true class, int64
    guess: Tensor  # most probable class, the first one in case of ties, int64
    among_five: Tensor  # whether the true class is among the five most probable, bool
    loss: Tensor  # cross-entropy, float64
    confidence: Tensor  # probability of the predicted class, float64
    brier: Tensor  # sum over the classes of (probability - one-hot label)², float64

    @classmethod
    def of_logits(cls, logits: Tensor, batch: Batch) -> "Predictions":
        """Compute the predictions of a batch.

        Args:
            logits: Logits, (b, k), which may be infinite.
            batch: Batch with labels.
        """
        logs = logits.double().log_softmax(-1)
        best = logits.argsort(dim=-1, descending=True, stable=True)[:, :5]
        assert batch.labels is not None
        truth = batch.labels[:, None]
        losses = -logs.gather(1, truth)[:, 0]
        confidence = logs.gather(1, best[:, :1])[:, 0].exp()
        brier = (logs.exp() - F.one_hot(batch.labels, logits.shape[1])).square().sum(1)
        columns = (batch.slots, batch.labels, best[:, 0], (best == truth).any(1), losses, confidence, brier)
        return cls(*(column.cpu() for column in columns))

    @property
    def correct(self) -> Tensor:
        """Return whether each prediction is correct, (n,) bool."""
        return self.guess == self.truth

    @property
    def calibration(self) -> Calibration:
        """Return the accuracy by the probability of the predicted class."""
        return Calibration.of(self.confidence, self.correct)

    def confusion(self, classes: int, blocks: int | None = None) -> Tensor:
        """Return the confusion matrix, (k, k): rows are true classes, columns predicted classes.

        Args:
            classes: Number of classes, k.
            blocks: If set, neighbouring classes are merged to this number of rows and columns.
        """
        side = blocks or classes
        row, column = (number * side // classes for number in (self.truth, self.guess))
        return torch.bincount(row * side + column, minlength=side * side).view(side, side)

    def mistakes(self, count: int, classes: Sequence[str]) -> list[Mistake]:
        """Return the wrong predictions of highest confidence, in descending order."""
        wrong = (~self.correct).nonzero()[:, 0]
        wrong = wrong[self.confidence[wrong].argsort(descending=True, stable=True)[:count]]
        return [
            Mistake(row, classes[int(self.truth[row])], classes[int(self.guess[row])], self.confidence[row].item())
            for row in wrong.tolist()
        ]

    def by_class(self, classes: Sequence[str]) -> list[ClassCounts]:
        """Return the counts of each class, in the order of classes."""
        columns = (self.truth, self.truth[self.correct], self.guess)
        counts = (torch.bincount(column, minlength=len(classes)).tolist() for column in columns)
        return [ClassCounts(*row) for row in zip(classes, *counts, strict=True)]

    def metrics(self, counts: Sequence[ClassCounts]) -> dict[str, float]:
        """Return the metrics of the classifier, from the counts of each class.

        accuracy; accuracy_top5 (for more than five classes); loss (cross-entropy); ece (expected calibration error);
        brier (Brier score, summed over the classes); accuracy_per_class (mean recall of classes that have images);
        macro_f1 (mean F1 of classes that have images or are predicted); accuracy_constant (chance); images (their
        number).
        """
        metrics = {"accuracy": self.correct.double().mean().item()}
        if len(counts) > 5:
            metrics["accuracy_top5"] = self.among_five.double().mean().item()
        return metrics | {
            "loss": self.loss.mean().item(),
            "ece": self.calibration.error,
            "brier": self.brier.mean().item(),
            "accuracy_per_class": mean(counted.recall for counted in counts),
            "macro_f1": mean(counted.f1 for counted in counts),
            "accuracy_constant": chance(self.truth.tolist()),
            "images": len(self.truth),
        }

    def table(self, counts: Sequence[ClassCounts]) -> str:
        """Return a CSV table with one line for each class, from the counts of each class."""
        head = ("class", "images", "correct", "predicted", "recall", "precision", "f1")
        return as_csv(head, ((*counted[:4], counted.recall, counted.precision, counted.f1) for counted in counts))

    def lines(self, metrics: Mapping[str, float], counts: Sequence[ClassCounts]) -> list[str]:
        """Return the accuracies next to chance, and the classes of the lowest recall.

        Args:
            metrics: The metrics of these predictions.
            counts: The counts of each class.
        """
        tops = [f"top-1 {percent(metrics['accuracy'])}"]
        if "accuracy_top5" in metrics:
            tops.append(f"top-5 {percent(metrics['accuracy_top5'])}")
        constant, images = metrics["accuracy_constant"], metrics["images"]
        lines = [f"{', '.join(tops)} of {images:,} images (chance {percent(constant)}, always the most frequent class)"]
        if not above_chance(metrics["accuracy"], constant, images):
            lines.append(NOT_ABOVE_CHANCE)
        means = f"mean recall {percent(metrics['accuracy_per_class'])}, macro-F1 {percent(metrics['macro_f1'])}"
        lines.append(f"{means}; {probabilities(metrics)}")
        named = []
        incomplete = [number for number, counted in enumerate(counts) if counted.correct < counted.images]
        for number in sorted(incomplete, key=lambda number: counts[number].recall)[:_NAMED]:
            times, other = torch.bincount(self.guess[(self.truth == number) & ~self.correct]).max(0)
            name, confused = (one_line(counts[index].name) for index in (number, int(other)))
            share, recall = percent(int(times) / counts[number].images), percent(counts[number].recall)
            named.append(f"{name}: {recall} ({share} predicted as {confused})")
        return [*lines, f"lowest recall: {', '.join(named)}" if named else "all predictions are correct"]


class MultiLabelPredictions(NamedTuple):
    """Store predictions of a multi-label classifier for images in the order of the source, on the CPU."""

    source_indices: Tensor  # index in the source, (n,) int64
    truth: Tensor  # true classes, (n, k) bool
    logits: Tensor  # (n, k) float64

    @classmethod
    def of_logits(cls, logits: Tensor, batch: Batch) -> "MultiLabelPredictions":
        """Return the predictions of a batch.

        Args:
            logits: Logits, (b, k).
            batch: Batch with labels.
        """
        assert batch.labels is not None
        return cls(batch.slots.cpu(), batch.labels.cpu(), logits.double().cpu())

    @property
    def guess(self) -> Tensor:
        """Return whether each class is predicted, (n, k) bool."""
        return self.logits >= 0

    @property
    def correct(self) -> Tensor:
        """Return whether all classes of each image are correct, (n,) bool."""
        return (self.guess == self.truth).all(1)

    @property
    def calibration(self) -> Calibration:
        """Return the share of images that have a class by its probability, over all classes of all images."""
        return Calibration.of(self.logits.sigmoid().flatten(), self.truth.flatten())

    def mistakes(self, count: int, classes: Sequence[str]) -> list[Mistake]:
        """Return each image's most confident wrong prediction, highest first; "no A" is the prediction of absence."""
        wrong = (self.guess != self.truth) * self.logits.abs().sigmoid()
        highest, number = wrong.max(1)
        rows = highest.argsort(descending=True, stable=True)[:count].tolist()
        return [
            Mistake(
                row,
                class_text(self.truth[row], classes) or "none",
                ("no " if self.truth[row, number[row]] else "") + classes[int(number[row])],
                highest[row].item(),
            )
            for row in rows
            if highest[row] > 0
        ]

    def by_class(self, classes: Sequence[str]) -> list[ClassCounts]:
        """Return the counts of each class, in the order of classes."""
        counts = (column.sum(0).tolist() for column in (self.truth, self.guess & self.truth, self.guess))
        averages = average_precisions(self.logits, self.truth).tolist()
        return [ClassCounts(*row) for row in zip(classes, *counts, averages, strict=True)]

    def metrics(self, counts: Sequence[ClassCounts]) -> dict[str, float]:
        """Return metrics of the classifier from the counts of each class, and the mAP of a random order as baseline.

        map (mean average precision of classes that have images), micro_f1, macro_f1 (of classes that have images or are
        predicted), loss (binary cross-entropy summed over the classes), ece (expected calibration error of the
        probabilities of all classes), brier (Brier score, summed over the classes), map_constant, and images (their
        number).
        """
        n = len(self.truth)
        total = sum(counted.images + counted.predicted for counted in counts)
        loss = F.binary_cross_entropy_with_logits(self.logits, self.truth.double(), reduction="sum") / n
        return {
            "map": mean(counted.average_precision for counted in counts),
            "micro_f1": 2 * sum(counted.correct for counted in counts) / max(1, total),
            "macro_f1": mean(counted.f1 for counted in counts),
            "loss": loss.item(),
            "ece": self.calibration.error,
            "brier": (self.logits.sigmoid() - self.truth.double()).square().sum(1).mean().item(),
            "map_constant": share_of_class(self.truth),
            "images": n,
        }

    def table(self, counts: Sequence[ClassCounts]) -> str:
        """Return a CSV table with one line for each class, from the counts of each class."""
        head = ("class", "images", "correct", "predicted", "average_precision", "recall", "precision", "f1")
        return as_csv(head, ((*counted, counted.recall, counted.precision, counted.f1) for counted in counts))

    def lines(self, metrics: Mapping[str, float], counts: Sequence[ClassCounts]) -> list[str]:
        """Return lines on the metrics, and the classes of the lowest average precision.

        Args:
            metrics: The metrics of these predictions.
            counts: The counts of each class.
        """
        lines = [
            f"mAP {percent(metrics['map'])} of {metrics['images']:,} images, each with any of {len(counts)} classes "
            f"(a random order: {percent(metrics['map_constant'])})",
            *([] if metrics["map"] > metrics["map_constant"] else ["not above a random order"]),
            f"micro-F1 {percent(metrics['micro_f1'])}, macro-F1 {percent(metrics['macro_f1'])}; "
            f"{probabilities(metrics)}",
        ]
        measured = [(row.average_precision, row.name) for row in counts if not math.isnan(row.average_precision)]
        if absent := len(counts) - len(measured):
            lines.append(f"{absent} classes without images are excluded")
        named = (f"{one_line(name)} {percent(average)}" for average, name in sorted(measured)[:_NAMED])
        return [*lines, f"lowest average precision: {', '.join(named)}"]


def mean(values: Iterable[float]) -> float:
    """Return the mean of the values, ignoring NaNs; NaN if there is no value."""
    defined = [value for value in values if not math.isnan(value)]
    return sum(defined) / len(defined) if defined else math.nan


def probabilities(metrics: Mapping[str, float]) -> str:
    """Format the metrics of predicted probabilities: loss, Brier score and calibration error."""
    return f"loss {metrics['loss']:.3f}, Brier score {metrics['brier']:.3f}, ECE {percent(metrics['ece'])}"


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
        cells = [("" if math.isnan(cell) else f"{cell:.4f}") if isinstance(cell, float) else cell for cell in row]
        table.writerow(cells)
    return text.getvalue().encode(errors="backslashreplace").decode()
