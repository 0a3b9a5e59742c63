"""The common part of the linear probes: the held-out images, the scaling of features, and the scores of a layer.

Both choose on a held-out part of the training images; the test images are for the chosen layer alone. A layer is
(k, d + 1), its last column the bias, for which rows of features end in a 1. All is computed on the features' device and
in their precision.

Letters: n images, d width, k classes, r layers.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ssvit.data.sources.base import is_multi_label
from ssvit.evaluation.features import Features, check
from ssvit.evaluation.precision import mean_average_precision
from ssvit.evaluation.probes import linear_options
from ssvit.evaluation.probes.base import Probe, Result
from ssvit.options import OptionError, UserError
from ssvit.randomness import permutation

CHUNK = 1024  # rows at a time, few enough that what comes of them stays in a processor's cache


class Linear(linear_options.Linear, Probe):
    """A linear layer, chosen by its accuracy on the held-out images, as feature sets are; of equals, by its loss."""

    chosen_by: ClassVar[str] = "validation accuracy"  # or mAP, where an image may have several classes
    multi_label: ClassVar[bool] = True

    def check_classes(self, train_labels: Tensor, test_labels: Tensor, classes: Sequence[str]) -> None:
        """OptionError or UserError if no image can be held out, or a class is tested that is not trained.

        A class that an image may have beside others counts, trained or not: its average precision is that of no order.
        """
        if is_multi_label(train_labels):
            hold_out_by_class(train_labels, fraction=self.held_out, seed=self.seed)
            return
        untrained = sorted(set(test_labels.unique().tolist()) - set(train_labels.unique().tolist()))
        if untrained:
            named = f"{untrained[0]} ({classes[untrained[0]]})"
            raise UserError(f"class {named} has test images and no training image, so it cannot be learned")
        hold_out_by_class(train_labels, fraction=self.held_out, seed=self.seed)

    def split(self, train: Features, test: Features) -> tuple[Tensor, Tensor]:
        """The places of the images to train on and of those held out. UserError unless features and labels suffice."""
        check(train, test, "a linear probe")
        self.check_classes(train.known_labels, test.known_labels, train.classes)
        return hold_out_by_class(train.known_labels, fraction=self.held_out, seed=self.seed)


def hold_out_by_class(labels: Tensor, *, fraction: float, seed: int) -> tuple[Tensor, Tensor]:
    """Split the images into (train, held out), each class alike: labels (n,) -> places of both, ascending.

    Of each class the fraction is rounded, but at least one image is trained on and, of several, one held out. Where an
    image may have several classes, (n, k), they count as one. OptionError if nothing can be held out.
    """
    labels = labels.cpu()
    if is_multi_label(labels):
        labels = torch.zeros(len(labels), dtype=torch.int64)
    order = permutation(seed, "linear probe, held out", len(labels))
    order = order[labels[order].argsort(stable=True)]
    counts = torch.bincount(labels)
    of_class = counts[labels[order]]
    rank = torch.arange(len(labels)) - (counts.cumsum(0) - counts)[labels[order]]
    is_held_out = rank < (fraction * of_class.double()).round().clamp_min(1).minimum(of_class - 1)
    if not is_held_out.any():
        right = "no class has two training images, so none can be held out to choose the best probe by"
        raise OptionError("held_out", fraction, right)
    return order[~is_held_out].sort().values, order[is_held_out].sort().values


def is_right(logits: Tensor, labels: Tensor) -> Tensor:
    """Whether the highest logit is the label's, and all are finite: logits (r, k, b), labels (b,) -> (r, b)."""
    return (logits.argmax(1) == labels) & logits.isfinite().all(1)


class LinearScores(NamedTuple):
    """The accuracy, or mAP, and the mean loss of each layer, and which images it predicts correctly: (r, n) or None."""

    accuracies: list[float]
    losses: list[float]
    correct: Tensor | None

    @property
    def per_image(self) -> Tensor | None:
        """Those of the first layer as `Result.per_image` has them."""
        return None if self.correct is None else self.correct[0].double().cpu()


def logits_of(layers: Tensor, rows: Tensor) -> Iterator[Tensor]:
    """Yield the logits (r, k, b) of layers (r, k, d + 1) for consecutive parts of rows (n, d + 1)."""
    for x in rows.split(CHUNK):
        yield (layers.flatten(0, 1) @ x.T).unflatten(0, layers.shape[:2])


def score(logits: Iterable[Tensor], labels: Tensor) -> LinearScores:
    """Score logits (r, k, b) of consecutive parts of images with labels (n,).

    A prediction that is not finite is wrong, and the loss of a layer that gives one is infinite. With labels (n, k)
    bool: the mAP, and the binary cross-entropy summed over the classes.
    """
    if is_multi_label(labels):
        pairs = [score_several(of_layer.T, labels) for of_layer in torch.cat(list(logits), 2)]
        return LinearScores([precision for precision, _ in pairs], [loss for _, loss in pairs], None)
    correct: list[Tensor] = []
    losses: list[Tensor] = []
    for part in logits:
        start = sum(hits.shape[1] for hits in correct)
        y = labels[start : start + part.shape[2]]
        correct.append(is_right(part, y))
        loss = F.cross_entropy(part, y.expand(len(part), -1), reduction="none")
        losses.append(loss.sum(1, dtype=torch.float64))
    hits = torch.cat(correct, 1)
    means = (torch.stack(losses).sum(0) / len(labels)).nan_to_num(nan=math.inf, posinf=math.inf)
    return LinearScores(hits.double().mean(1).tolist(), means.tolist(), hits)


def score_several(logits: Tensor, labels: Tensor) -> tuple[float, float]:
    """mAP and loss of logits (n, k) for labels (n, k) bool, as `score`; 0 for an mAP of no class."""
    loss = F.binary_cross_entropy_with_logits(logits.double(), labels.double(), reduction="sum") / len(logits)
    finite = torch.where(logits.isfinite().all(1, keepdim=True), logits, -math.inf)
    precision = mean_average_precision(finite, labels)
    return (0.0 if math.isnan(precision) else precision), loss.nan_to_num(nan=math.inf, posinf=math.inf).item()


def best(scores: LinearScores) -> int:
    """Return the place of the highest accuracy; of equals, of the least loss; of these, the first."""
    pairs = list(zip(scores.accuracies, scores.losses, strict=True))
    return max(range(len(pairs)), key=lambda place: (pairs[place][0], -pairs[place][1]))


def result(
    on_train: LinearScores,
    validated: LinearScores,
    on_test: LinearScores,
    chosen: int,
    held_out: Tensor,
    numbers: Mapping[str, object],
    predictions: Tensor | None = None,
) -> Result:
    """Return the result of the layer that was chosen among the validated ones, on which others are measured alone."""
    accuracies = (on_train.accuracies[0], validated.accuracies[chosen], on_test.accuracies[0])
    scores = dict(zip(("train", "validation", "test"), accuracies, strict=True))
    return Result(
        scores=scores,
        choice=(scores["validation"], -validated.losses[chosen]),
        choice_images=None if on_test.correct is None else len(held_out),
        numbers={**numbers, **scores},
        predictions=predictions,
        per_image=on_test.per_image,
    )
