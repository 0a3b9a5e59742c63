"""Evaluate the accuracy of a classifier on each image of a source, and its confusion matrix.

Images are distributed over processes, and each process receives all predictions in the order of the source, so that the
metrics do not depend on the number of processes.

Shapes use b images of a batch, n images of the source, k classes.
"""

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, zip_longest
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ssvit.data.batch import Batch, EvalTransform
from ssvit.data.loader import TOLERATED, evaluation_batches
from ssvit.data.sources.base import Source, class_text, is_multi_label
from ssvit.evaluation.panels import classification_options, multi_label
from ssvit.evaluation.panels.base import Evaluation, Evaluator, with_metrics
from ssvit.evaluation.panels.class_counts import ClassCounts, as_csv, mean, percent
from ssvit.evaluation.panels.multi_label import MultiLabelPredictions
from ssvit.evaluation.processes import gather, rank_and_world
from ssvit.evaluation.statistics import NOTHING_YET, above_chance, chance
from ssvit.figures import plot
from ssvit.figures.base import Figure
from ssvit.figures.matrices import Confusion
from ssvit.figures.pictures import RED, Gallery, Picture
from ssvit.figures.plot import Bars, History, Level, Panel, Plot, curve
from ssvit.objectives.classify import Classify
from ssvit.objectives.classify_options import MULTI_LABEL, SIGMOID
from ssvit.options import OptionError, UserError, one_line

_SHOWN, _ACROSS = 24, 6  # mistakes in the figure, and in each of its rows
_NAMED, _BARS = 3, 40  # classes named in the text, and in the figure of precisions
_BLOCKS = 1000  # maximum number of rows of the confusion matrix, which merges neighbouring classes if there are more
_IMAGENET_IMAGES, _IMAGENET_CLASSES = 50_000, 1000
_WNID = re.compile(r"n\d{8}")  # name of an ImageNet class
_IMAGENET_NAME = re.compile(r"ILSVRC2012_val_(\d{8})\b")
_P = TypeVar("_P", "Predictions", MultiLabelPredictions)


class Predictions(NamedTuple):
    """Store predictions for images in the order of the source; each column is (n,), on the CPU."""

    place: Tensor  # index in the source, int64
    truth: Tensor  # true class, int64
    guess: Tensor  # most probable class, the first one in case of ties, int64
    among_five: Tensor  # whether the true class is among the five most probable, bool
    loss: Tensor  # cross-entropy of softmax or sigmoid, as in training, float64
    confidence: Tensor  # probability of the predicted class, float64

    @classmethod
    def of(cls, logits: Tensor, batch: Batch, loss: str) -> "Predictions":
        """Compute the predictions of a batch.

        Args:
            logits: Logits, (b, k), which may be infinite.
            batch: Batch with labels.
            loss: Loss of the classifier, see `Classify`.
        """
        logs = F.logsigmoid(logits.double()) if loss == SIGMOID else logits.double().log_softmax(-1)
        best = logits.argsort(dim=-1, descending=True, stable=True)[:, :5]
        assert batch.labels is not None
        truth = batch.labels[:, None]
        losses = -logs.gather(1, truth)[:, 0]
        if loss == SIGMOID:
            absent = F.logsigmoid(-logits.double())
            losses = losses - absent.sum(1) + absent.gather(1, truth)[:, 0]
        confidence = logs.gather(1, best[:, :1])[:, 0].exp()
        columns = (batch.slots, batch.labels, best[:, 0], (best == truth).any(1), losses, confidence)
        return cls(*(column.cpu() for column in columns))

    @property
    def correct(self) -> Tensor:
        """Return whether each prediction is correct, (n,) bool."""
        return self.guess == self.truth

    def confusion(self, classes: int, blocks: int | None = None) -> Tensor:
        """Return the confusion matrix, (k, k): rows are true classes, columns predicted classes.

        Args:
            classes: Number of classes, k.
            blocks: If set, neighbouring classes are merged to this number of rows and columns.
        """
        side = blocks or classes
        row, column = (number * side // classes for number in (self.truth, self.guess))
        return torch.bincount(row * side + column, minlength=side * side).view(side, side)

    def worst(self, count: int) -> Tensor:
        """Return the rows of the wrong predictions of highest confidence, in descending order."""
        wrong = (~self.correct).nonzero()[:, 0]
        return wrong[self.confidence[wrong].argsort(descending=True, stable=True)[:count]]

    def by_class(self, classes: Sequence[str]) -> list[ClassCounts]:
        """Return the counts of each class, in the order of classes."""
        columns = (self.truth, self.truth[self.correct], self.guess)
        counts = (torch.bincount(column, minlength=len(classes)).tolist() for column in columns)
        return [ClassCounts(*row) for row in zip(classes, *counts, strict=True)]

    def confused(self, classes: Sequence[str]) -> list[tuple[str, int]]:
        """Return for each class the wrong class predicted most often, and how often; ("", 0) if there is none."""
        k = len(classes)
        pairs, counts = (self.truth * k + self.guess)[~self.correct].unique(return_counts=True)
        confused = [("", 0)] * k
        for pair, times in zip(pairs.tolist(), counts.tolist(), strict=True):
            if times > confused[pair // k][1]:
                confused[pair // k] = classes[pair % k], times
        return confused


def read_real(path: str) -> list[set[int]]:
    """Read the ReaL labels of ImageNet's validation images (Beyer et al. 2020).

    Raises:
        UserError: If the file is not the file of the authors.
    """
    try:
        with open(path, encoding="utf-8") as file:
            entries = json.load(file)
    except OSError as error:
        raise UserError(f"real={path}: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise UserError(f"real={path}: is no JSON, or damaged") from None
    if not isinstance(entries, list) or len(entries) != _IMAGENET_IMAGES:
        found = f"a list of {len(entries)}" if isinstance(entries, list) else "no list"
        raise UserError(f"real={path}: must hold a list for each of {_IMAGENET_IMAGES} images, but is {found}")
    for number, entry in enumerate(entries, start=1):
        if not isinstance(entry, list) or not all(
            type(name) is int and 0 <= name < _IMAGENET_CLASSES for name in entry
        ):
            raise UserError(f"real={path}: the entry of image {number} is no list of class numbers from 0 to 999")
    return [set(entry) for entry in entries]


def allowed(source: Source, real: str) -> list[set[int]]:
    """Return the ReaL labels of each image of a source.

    Raises:
        UserError: If the images or classes are not those of ImageNet.
    """
    # The class numbers of ReaL are indices of the sorted wnids.
    wnids = sorted(filter(_WNID.fullmatch, source.classes))
    if len(wnids) != _IMAGENET_CLASSES or wnids != list(source.classes):
        raise UserError(f"real={real}: needs ImageNet's 1000 classes, named by wnid and in that order")
    numbers = []
    for name in map(source.name, range(len(source))):
        found = _IMAGENET_NAME.match(os.path.basename(name))
        if not found or not 1 <= int(found[1]) <= _IMAGENET_IMAGES:
            right = "the images' names must be ILSVRC2012_val_00000001 and so on"
            raise UserError(f"real={real}: {right}: {name} does not fit")
        numbers.append(int(found[1]))
    labels = read_real(real)
    return [labels[number - 1] for number in numbers]


class Classification(Evaluator):
    """Evaluate a classifier on each image of a source.

    Args:
        options: Options of the evaluation.
        source: Images with labels.
        transform: Transform of the evaluation.
        part: Name of the images in texts and figures, "test" or "validation".
    """

    def __init__(
        self,
        options: classification_options.Classification,
        *,
        source: Source,
        transform: EvalTransform,
        part: str = "test",
    ) -> None:
        self.options = options
        self.source, self.transform, self.part = source, transform, part
        self.images = len(source)
        if self.options.real is not None and source.labels is not None and is_multi_label(source.labels):
            raise OptionError("real", self.options.real, "must be null where an image may have several classes")
        self._allowed = None if self.options.real is None else allowed(source, self.options.real)

    def __call__(self, objective: Classify, history: History | None = None) -> Evaluation:
        """Return accuracy and further metrics of the classifier.

        Metrics: accuracy; accuracy_top5 (for more than five classes); loss (cross-entropy); accuracy_per_class (mean
        recall of classes that have images); macro_f1 (mean F1 of classes that have images or are predicted);
        accuracy_constant (chance); images (their number); accuracy_real (with ReaL labels); and unreadable, the number
        of excluded images, if any. Figures: `confusion`, `mistakes` (those of highest confidence) and `learning`.
        Tables: `classes.csv`, one line for each class. For multi-label images, metrics are those of
        `MultiLabelPredictions`, and `precisions` replaces `confusion`.

        Raises:
            UserError: If images have no labels, classes differ from those of the model, or too many files are
                unreadable.
        """
        if self.source.labels is not None and is_multi_label(self.source.labels):
            return self._of_several(objective, history)
        predictions, classes = self.predictions(objective), self.source.classes
        counts = predictions.by_class(classes)
        metrics = self._metrics(predictions, counts)
        if history is None:
            return Evaluation(metrics=metrics)
        confused = predictions.confused(classes)
        head = ("class", "images", "correct", "recall", "precision", "f1", "most_often_taken_for", "times")
        rows = (
            (one.name, one.images, one.correct, one.recall, one.precision, one.f1, *taken_for)
            for one, taken_for in zip(counts, confused, strict=True)
        )
        return Evaluation(
            metrics=metrics,
            lines=[*_lines(metrics, counts, confused), *self._unreadable_line(metrics)],
            figures=self._figures(predictions, with_metrics(history, metrics)),
            tables={"classes.csv": as_csv(head, rows)},
        )

    def predictions(self, objective: Classify) -> Predictions:
        """Return the predictions of all readable images, in each process.

        Raises:
            UserError: If images have no labels, classes differ from those of the model, or too many files are
                unreadable.
        """
        parts = self._gathered(objective, lambda logits, batch: Predictions.of(logits, batch, objective.options.loss))
        return Predictions(*map(torch.cat, zip(*parts, strict=True)))

    def _gathered(self, objective: Classify, of: Callable[[Tensor, Batch], _P]) -> list[_P]:
        """Apply `of` to the logits of each batch and return the results of all processes, in each process."""

        def predict() -> list[_P]:
            self._check(objective)
            rank, world = rank_and_world()
            loading = {"workers": self.options.workers, "timeout": self.options.timeout}
            device = next(objective.parameters()).device
            batches = self._batches(self.source, rank=rank, world=world, device=device, **loading)
            return [of(objective.logits(batch.images), batch) for batch in batches]

        parts = list(chain.from_iterable(gather(predict)))
        total = len(self.source)
        if (unreadable := total - sum(len(part.place) for part in parts)) > TOLERATED * total:
            raise UserError(f"{unreadable} of {total} image files cannot be read, more than {TOLERATED:.0%}")
        return parts

    def _of_several(self, objective: Classify, history: History | None) -> Evaluation:
        """Return the evaluation on multi-label images."""
        parts = self._gathered(objective, MultiLabelPredictions.of)
        predictions = MultiLabelPredictions(*map(torch.cat, zip(*parts, strict=True)))
        names, truth = self.source.classes, predictions.truth
        by_class = predictions.by_class(names)
        metrics = predictions.metrics(by_class) | self._unreadable(len(truth))
        if history is None:
            return Evaluation(metrics=metrics)
        worst = predictions.worst(_SHOWN)
        captions = [
            (class_text(truth[row], names) or "none", names[k] if not truth[row, k] else f"no {names[k]}", sure)
            for row, k, sure in worst
        ]
        wrong = int((predictions.guess != truth).any(1).sum())
        figures: dict[str, Figure] = {
            "precisions": self._precisions(by_class, metrics["map"]),
            "mistakes": self._mistakes(predictions.place[[row for row, *_ in worst]], captions, wrong, len(truth)),
            "learning": self._learning(with_metrics(history, metrics), {"map": "mAP", "micro_f1": "micro-F1 at 0.5"}),
        }
        return Evaluation(
            metrics=metrics,
            lines=[*multi_label.lines(metrics, by_class), *self._unreadable_line(metrics)],
            figures=figures,
            tables={"classes.csv": multi_label.table(by_class)},
        )

    def _check(self, objective: Classify) -> None:
        """Raise UserError unless the images have labels that suit the model."""
        if self.source.labels is None:
            raise UserError(f"the {self.part} images have no labels, so there is nothing to measure a classifier by")
        if is_multi_label(self.source.labels) != (objective.options.loss == MULTI_LABEL):
            several, one = f"the {self.part} images", "the images that the model was trained on"
            if objective.options.loss == MULTI_LABEL:
                several, one = one, several
            raise UserError(f"{several} may have several classes, {one} have one each")
        if not len(self.source):
            raise UserError(f"there are no {self.part} images to measure a classifier on")
        for number, (theirs, own) in enumerate(zip_longest(self.source.classes, objective.classes)):
            if theirs != own:
                theirs, own = ("absent" if name is None else repr(name) for name in (theirs, own))
                raise UserError(
                    f"the classes of the {self.part} images ({len(self.source.classes)}) are not the model's "
                    f"({len(objective.classes)}): class {number} is {theirs}, the model's is {own}"
                )

    def _batches(self, source: Source, **options: Any) -> Iterator[Batch]:
        return evaluation_batches(source, self.transform, batch_size=self.options.batch_size, **options)

    def _metrics(self, predictions: Predictions, counts: Sequence[ClassCounts]) -> dict[str, float]:
        correct = predictions.correct
        metrics = {"accuracy": correct.double().mean().item()}
        if len(counts) > 5:
            metrics["accuracy_top5"] = predictions.among_five.double().mean().item()
        metrics["loss"] = predictions.loss.mean().item()
        metrics["accuracy_per_class"] = mean(one.recall for one in counts)
        metrics["macro_f1"] = mean(one.f1 for one in counts)
        metrics["accuracy_constant"] = chance(predictions.truth.tolist())
        metrics["images"] = len(correct)
        if self._allowed is not None:
            pairs = zip(predictions.place.tolist(), predictions.guess.tolist(), strict=True)
            real = [guess in self._allowed[place] for place, guess in pairs if self._allowed[place]]
            if real:
                metrics["accuracy_real"] = sum(real) / len(real)
        return metrics | self._unreadable(len(correct))

    def _unreadable(self, images: int) -> dict[str, float]:
        unreadable = len(self.source) - images
        return {"unreadable": unreadable} if unreadable else {}

    def _unreadable_line(self, metrics: Mapping[str, float]) -> list[str]:
        return [f"unreadable and left out: {metrics['unreadable']:,} images"] if "unreadable" in metrics else []

    def _figures(self, predictions: Predictions, history: History) -> dict[str, Figure]:
        names, total = self.source.classes, len(predictions.place)
        worst, correct = predictions.worst(_SHOWN), int(predictions.correct.sum())
        columns = (column[worst].tolist() for column in (predictions.truth, predictions.guess, predictions.confidence))
        captions = [(names[truth], names[guess], sure) for truth, guess, sure in zip(*columns, strict=True)]
        counts = predictions.confusion(len(names), min(len(names), _BLOCKS))
        shares = torch.bincount(predictions.truth).double() / total
        top5 = shares.topk(min(5, len(shares))).values.sum().item()
        levels = [plot.chance(shares.max().item())]
        if any("accuracy_top5" in name for row in history for name in row):
            levels.append(Level(100 * top5, "top-5 chance (most frequent five)", ":", "{:.1f} %"))
        entropy = Level(torch.special.entr(shares).sum().item(), "entropy of the classes", "-.")
        title = f"accuracy {percent(correct / total)} on the {self.part} images"
        return {
            "confusion": Confusion(counts, names, title),
            "mistakes": self._mistakes(predictions.place[worst], captions, total - correct, total),
            "learning": self._learning(history, {"accuracy": "top-1", "accuracy_top5": "top-5"}, levels, entropy),
        }

    def _mistakes(self, places: Tensor, captions: Sequence[tuple[str, str, float]], wrong: int, images: int) -> Gallery:
        """Return a gallery of images with their class, the prediction and its probability.

        Args:
            places: Indices of the images in the source.
            captions: True class, prediction and probability of each image.
            wrong: Number of wrong predictions.
            images: Number of images.
        """
        batches = self._batches(self.source.take(places)) if len(places) else ()
        shown = (self.display(image) for batch in batches for image in batch.images)
        pictures = [
            Picture(image, (truth, f"→ {100 * sure:.0f} % {guess}"), RED)
            for image, (truth, guess, sure) in zip(shown, captions, strict=True)
        ]
        title = f"the most confident of {wrong:,} mistakes in {images:,} {self.part} images"
        if not pictures:
            title = f"no mistake: all {images:,} {self.part} images are named right"
        return Gallery([pictures[row : row + _ACROSS] for row in range(0, len(pictures), _ACROSS)], title)

    def _precisions(self, by_class: Sequence[tuple[ClassCounts, float]], mean: float) -> Bars:
        """Return a bar chart of the average precision of each class, highest first, next to a random order."""
        ranked = sorted((pair for pair in by_class if pair[0].images), key=lambda pair: -pair[1])
        shown = ranked if len(ranked) <= _BARS else [*ranked[: _BARS // 2], *ranked[-_BARS // 2 :]]
        n = len(self.source)
        bars = {one.name: (100 * precision, 100 * one.images / n) for one, precision in shown}
        some = (
            f"; {len(shown)} of {len(ranked)} classes, the highest and the lowest" if len(shown) < len(ranked) else ""
        )
        return Bars(bars, f"mAP {percent(mean)} on the {self.part} images{some}", "average precision", "a random order")

    def _learning(
        self, history: History, measures: Mapping[str, str], levels: Sequence[Level] = (), entropy: Level | None = None
    ) -> Plot:
        """Plot loss and measures over the steps, next to a model that ignores the image.

        Validation images have separate curves if test images, which are evaluated at the end only, exist too.
        """
        has_validation = any(name.startswith("validation/") for row in history for name in row)
        lines = {"loss": [curve(history, "train/loss", "training", "train")], "share": []}
        lines["share"].append(curve(history, "train/accuracy", "training", "train", 100))
        for prefix, name, marker in (
            ("validation/", "validation", "."),
            ("", self.part, "*" if has_validation else "."),
        ):
            lines["loss"].append(curve(history, f"{prefix}loss", name, marker=marker))
            for (measure, words), color in zip(measures.items(), ("model", "unchanged"), strict=True):
                label = f"{name}, {words}"
                lines["share"].append(curve(history, f"{prefix}{measure}", label, color, 100, marker=marker))
        if not levels:
            levels = [plot.level(history, "map_constant", "mAP of a random order", "-.", 100, "{:.1f} %")]
        loss = "loss (nats)" if entropy else "loss (nats, summed over the classes)"
        panels = Panel(loss, lines["loss"], [entropy] if entropy else []), Panel("%", lines["share"], levels)
        return Plot(panels, (10, 3.8))


def _lines(
    metrics: Mapping[str, float], counts: Sequence[ClassCounts], confused: Iterable[tuple[str, int]]
) -> list[str]:
    """Return the accuracies next to chance, and the classes of the lowest recall."""
    tops = [f"top-1 {percent(metrics['accuracy'])}"]
    if "accuracy_top5" in metrics:
        tops.append(f"top-5 {percent(metrics['accuracy_top5'])}")
    constant, count = metrics["accuracy_constant"], metrics["images"]
    lines = [f"{', '.join(tops)} of {count:,} images (chance {percent(constant)}, always the most frequent class)"]
    if not above_chance(metrics["accuracy"], constant, count):
        lines.append(f"not {NOTHING_YET}")
    means = [f"mean recall {percent(metrics['accuracy_per_class'])}, macro-F1 {percent(metrics['macro_f1'])}"]
    if "accuracy_real" in metrics:
        means.append(f"by ReaL labels {percent(metrics['accuracy_real'])}")
    lines.append(f"{', '.join(means)}; loss {metrics['loss']:.3f}")
    pairs = [(one, *taken_for) for one, taken_for in zip(counts, confused, strict=True) if one.correct < one.images]
    named = [
        f"{one_line(one.name)} {percent(one.recall)} (taken for {one_line(name)} {percent(times / one.images)})"
        for one, name, times in sorted(pairs, key=lambda pair: pair[0].recall)[:_NAMED]
    ]
    return [*lines, f"lowest: {', '.join(named)}" if named else "no image is named wrong"]
