"""The accuracy of a classifier on each image of a source, and its confusion of classes.

Processes share the images, and all get all answers, in the order of the source: the metrics depend on neither.

Letters: b images of a batch, n of the source, k classes.
"""

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, zip_longest
from statistics import fmean
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor

from ssvit.data.batch import Batch, EvalTransform
from ssvit.data.loader import TOLERATED, evaluation_batches
from ssvit.data.sources.base import Source, class_text, is_multi_label
from ssvit.data.sources.robustness import are_imagenets
from ssvit.evaluation.panels import classification_options, multi_label
from ssvit.evaluation.panels.base import Evaluation, Evaluator, History, with_metrics
from ssvit.evaluation.processes import gather, rank_and_world
from ssvit.evaluation.report.class_table import percent, shares, written
from ssvit.evaluation.significance import NOTHING_YET, above_chance, chance
from ssvit.figures import classes as figures
from ssvit.objectives.classify import Classify
from ssvit.objectives.classify_options import MULTI_LABEL, SIGMOID
from ssvit.options import OptionError, UserError, one_line

_SHOWN = 24  # mistakes in the picture
_NAMED = 3  # classes named in words
_BLOCKS = 1000  # of classes in the confusion matrix, if there are more classes
_IMAGENET_IMAGES, _IMAGENET_CLASSES = 50_000, 1000
_IMAGENET_NAME = re.compile(r"ILSVRC2012_val_(\d{8})\b")
A = TypeVar("A", "Answers", multi_label.Answers)


class Answers(NamedTuple):
    """The predictions of a model for images, in the order of the source; each (n,), on the CPU."""

    place: Tensor  # which image of the source, int64
    truth: Tensor  # its class, int64
    guess: Tensor  # the most probable class, the first of equals, int64
    among_five: Tensor  # whether the truth is among the five most probable, bool
    loss: Tensor  # cross-entropy of softmax or sigmoid, as it was trained, float64
    confidence: Tensor  # the probability of the guess, float64

    @classmethod
    def of(cls, logits: Tensor, batch: Batch, loss: str) -> "Answers":
        """From logits (b, k) of a batch; loss: that of `Classify`. Logits that are not finite are ordered too."""
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
    def right(self) -> Tensor:
        """Whether the guess is the truth: (n,)."""
        return self.guess == self.truth

    def confusion(self, classes: int, blocks: int | None = None) -> Tensor:
        """Images of a class (row) that were predicted as a class (column): (k, k), or summed in blocks of classes."""
        side = blocks or classes
        row, column = (number * side // classes for number in (self.truth, self.guess))
        return torch.bincount(row * side + column, minlength=side * side).view(side, side)

    def worst(self, count: int) -> Tensor:
        """Rows of the mistakes that the model was most confident of, those first; of equals in the order of places."""
        wrong = (~self.right).nonzero()[:, 0]
        return wrong[self.confidence[wrong].argsort(descending=True, stable=True)[:count]]


class Tally(NamedTuple):
    """The predictions for one class's images."""

    name: str
    images: int
    correct: int
    guessed: int  # images of any class taken for this one, its own among them
    taken_for: str  # the class that they are most often taken for wrongly, "" for none
    times: int

    @property
    def recall(self) -> float:
        """Share of the class's images taken for it; of a class with images alone."""
        return self.correct / self.images

    @property
    def f1(self) -> float:
        """The harmonic mean of recall and precision, 0 where only one of them is defined; of no other class."""
        return 2 * self.correct / (self.images + self.guessed)


def tally(answers: Answers, classes: Sequence[str]) -> list[Tally]:
    """Class by class, in their order."""
    k, right = len(classes), answers.right
    pairs, counts = (answers.truth * k + answers.guess)[~right].unique(return_counts=True)
    taken: dict[int, tuple[str, int]] = {}
    for times, pair in sorted(zip((-counts).tolist(), pairs.tolist(), strict=True)):
        taken.setdefault(pair // k, (classes[pair % k], -times))
    columns = (answers.truth, answers.truth[right], answers.guess)
    images, correct, guessed = (torch.bincount(column, minlength=k).tolist() for column in columns)
    rows = zip(classes, images, correct, guessed, strict=True)
    return [Tally(*row, *taken.get(label, ("", 0))) for label, row in enumerate(rows)]


def read_real(path: str) -> list[set[int]]:
    """The ReaL labels of ImageNet's validation images (Beyer et al. 2020). UserError unless it is the authors' file."""
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
    """The ReaL labels of each image of a source. UserError if the images or the classes are not ImageNet's."""
    # ReaL's class numbers count the wnids in order.
    if not are_imagenets(source.classes):
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
    """Accuracy of a classifier on every image of a source; part: test or validation, in words and figures."""

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
        """accuracy, accuracy_top5 (of more than five classes), loss (cross-entropy), accuracy_per_class (the mean
        recall of classes that have images), macro_f1 (the mean F1 of classes that have images or are guessed),
        accuracy_constant (chance), images (how many), accuracy_real, and unreadable, if any: how many images are left
        out because they cannot be read.

        Figures: `confusion`, `mistakes` (the most confident ones), `learning`. Tables: `classes.csv`, a line for each
        class. UserError if images have no labels or other classes than the model, or if too many cannot be read.

        Of images that may have several classes: `multi_label.metrics`, and `precisions` in place of `confusion`.
        """
        if self.source.labels is not None and is_multi_label(self.source.labels):
            return self._of_several(objective, history)
        answers = self.answers(objective)
        tallies = tally(answers, self.source.classes)
        metrics = self._metrics(answers, tallies)
        if history is None:
            return Evaluation(metrics=metrics)
        return Evaluation(
            metrics=metrics,
            lines=_lines(metrics, tallies),
            figures=self._figures(answers, with_metrics(history, metrics)),
            tables={"classes.csv": _table(tallies)},
        )

    def answers(self, objective: Classify) -> Answers:
        """What the model says of every image that can be read, in every process. UserError as above."""
        parts = self._answers(objective, lambda logits, batch: Answers.of(logits, batch, objective.options.loss))
        return Answers(*map(torch.cat, zip(*parts, strict=True)))

    def _answers(self, objective: Classify, of: Callable[[Tensor, Batch], A]) -> list[A]:
        """What `of` makes of the logits of each batch, in every process."""

        def answer() -> list[A]:
            self._check(objective)
            rank, world = rank_and_world()
            loading = {"workers": self.options.workers, "timeout": self.options.timeout}
            device = next(objective.parameters()).device
            batches = self._batches(self.source, rank=rank, world=world, device=device, **loading)
            return [of(objective.logits(batch.images), batch) for batch in batches]

        parts = list(chain.from_iterable(gather(answer)))
        total = len(self.source)
        if (unreadable := total - sum(len(part.place) for part in parts)) > TOLERATED * total:
            raise UserError(f"{unreadable} of {total} image files cannot be read, more than {TOLERATED:.0%}")
        return parts

    def _of_several(self, objective: Classify, history: History | None) -> Evaluation:
        """The evaluation on images that may have several classes."""
        parts = self._answers(objective, multi_label.Answers.of)
        answers = multi_label.Answers(*map(torch.cat, zip(*parts, strict=True)))
        tallies = multi_label.tally(answers, self.source.classes)
        metrics = multi_label.metrics(answers, tallies)
        if unreadable := len(self.source) - len(answers.place):
            metrics["unreadable"] = unreadable
        if history is None:
            return Evaluation(metrics=metrics)
        names, truth, part = self.source.classes, answers.truth, self.part
        worst = answers.worst(_SHOWN)
        wrong = self._batches(self.source.take(answers.place[[row for row, *_ in worst]])) if worst else ()
        images = (self.display(image) for batch in wrong for image in batch.images)
        mistakes = [
            (image, class_text(truth[row], names) or "none", names[k] if not truth[row, k] else f"no {names[k]}", sure)
            for image, (row, k, sure) in zip(images, worst, strict=True)
        ]
        counts = {"wrong": int((answers.guess != truth).any(1).sum()), "images": len(truth)}
        precisions = {one.name: (one.average_precision, one.images / len(truth)) for one in tallies if one.images}
        history = with_metrics(history, metrics)
        return Evaluation(
            metrics=metrics,
            lines=multi_label.lines(metrics, tallies),
            figures={
                "precisions": figures.precisions(precisions, mean=metrics["map"], part=part),
                "mistakes": figures.mistakes(mistakes, **counts, part=part),
                "learning": figures.learning_several(history, part, chance=metrics["map_constant"]),
            },
            tables={"classes.csv": multi_label.table(tallies)},
        )

    def _check(self, objective: Classify) -> None:
        """UserError unless the images can be asked of that model."""
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

    def _metrics(self, answers: Answers, tallies: Sequence[Tally]) -> dict[str, float]:
        k, right = len(self.source.classes), answers.right
        metrics = {"accuracy": right.double().mean().item()}
        if k > 5:
            metrics["accuracy_top5"] = answers.among_five.double().mean().item()
        metrics["loss"] = answers.loss.mean().item()
        metrics["accuracy_per_class"] = fmean(one.recall for one in tallies if one.images)
        metrics["macro_f1"] = fmean(one.f1 for one in tallies if one.images or one.guessed)
        metrics["accuracy_constant"] = chance(answers.truth.tolist())
        metrics["images"] = len(right)
        if self._allowed is not None:
            pairs = zip(answers.place.tolist(), answers.guess.tolist(), strict=True)
            is_right = [guess in self._allowed[place] for place, guess in pairs if self._allowed[place]]
            if is_right:
                metrics["accuracy_real"] = sum(is_right) / len(is_right)
        if unreadable := len(self.source) - len(right):
            metrics["unreadable"] = unreadable
        return metrics

    def _figures(self, answers: Answers, history: History) -> dict[str, Figure]:
        names, part, total = self.source.classes, self.part, len(answers.place)
        worst = answers.worst(_SHOWN)
        wrong = self._batches(self.source.take(answers.place[worst])) if len(worst) else ()
        images = (self.display(image) for batch in wrong for image in batch.images)
        columns = (column[worst].tolist() for column in (answers.truth, answers.guess, answers.confidence))
        mistakes = [
            (image, names[truth], names[guess], confidence)
            for image, truth, guess, confidence in zip(images, *columns, strict=True)
        ]
        counts = answers.confusion(len(names), min(len(names), _BLOCKS))
        right = int(answers.right.sum())
        shares = torch.bincount(answers.truth).double() / total
        ignoring = {
            "chance": shares.max().item(),
            "chance_top5": shares.topk(min(5, len(shares))).values.sum().item(),
            "entropy": torch.special.entr(shares).sum().item(),
        }
        return {
            "confusion": figures.confusion(counts, names, accuracy=right / total, part=part),
            "mistakes": figures.mistakes(mistakes, wrong=total - right, images=total, part=part),
            "learning": figures.learning(history, part, **ignoring),
        }


def _lines(metrics: Mapping[str, float], tallies: Sequence[Tally]) -> list[str]:
    """The accuracies beside chance, and the classes of the lowest recall."""
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
    if "unreadable" in metrics:
        lines.append(f"unreadable and left out: {metrics['unreadable']:,} images")
    lowest = sorted((one for one in tallies if one.correct < one.images), key=lambda one: one.recall)[:_NAMED]
    named = [
        f"{one_line(one.name)} {percent(one.recall)} "
        f"(taken for {one_line(one.taken_for)} {percent(one.times / one.images)})"
        for one in lowest
    ]
    return [*lines, f"lowest: {', '.join(named)}" if named else "no image is named wrong"]


def _table(tallies: Sequence[Tally]) -> str:
    """As CSV, a line for each class."""
    head = ("class", "images", "correct", "recall", "precision", "f1", "most_often_taken_for", "times")
    rows = [
        (one.name, one.images, one.correct, *shares(one.correct, one.images, one.guessed), one.taken_for, one.times)
        for one in tallies
    ]
    return written(head, rows)
