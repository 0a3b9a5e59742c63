"""Define what linear probes share: the validation split, the scaling of features, and the scores of a layer.

Hyper-parameters are chosen on a held-out part of the training images; the test images are used for the chosen layer
only. A layer is (k, d + 1), where the last column is the bias and rows of features end in a 1. All computations run on
the device and in the precision of the features.

Shapes use n images, d width, k classes, r layers.
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

CHUNK = 1024  # rows of a chunk, small enough for the intermediate results to stay in the CPU cache


class Linear(linear_options.Linear, Probe):
    """Choose a linear layer and a feature set by validation accuracy; ties are broken by the validation loss."""

    chosen_by: ClassVar[str] = "validation accuracy"  # mAP for multi-label images
    multi_label: ClassVar[bool] = True

    def check_classes(self, train_labels: Tensor, test_labels: Tensor, classes: Sequence[str]) -> None:
        """Check that a validation split exists and that each tested class has training images.

        The second check does not apply to multi-label images: the average precision of an untrained class is that of a
        random order.

        Args:
            train_labels: Labels of the training images, (n,) or (n, k) bool.
            test_labels: Labels of the test images, (m,) or (m, k) bool.
            classes: Class names.

        Raises:
            OptionError: If no image can be held out.
            UserError: If a class has test images and no training image.
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
        """Return the indices of the training and of the validation images.

        Raises:
            OptionError: If no image can be held out.
            UserError: If features or labels do not suffice.
        """
        check(train, test, "a linear probe")
        self.check_classes(train.known_labels, test.known_labels, train.classes)
        return hold_out_by_class(train.known_labels, fraction=self.held_out, seed=self.seed)


def hold_out_by_class(labels: Tensor, *, fraction: float, seed: int) -> tuple[Tensor, Tensor]:
    """Split images into training and validation images, stratified by class.

    The number of validation images of each class is rounded. At least one image of each class is used for training and,
    for classes of several images, at least one for validation.

    Args:
        labels: Class numbers, (n,), or multi-label targets, (n, k) bool, whose images are split without stratification.
        fraction: Fraction of each class to hold out, in (0, 0.9].
        seed: Seed of the split.

    Returns:
        Indices of the training and of the validation images, ascending.

    Raises:
        OptionError: If no class has two images.
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
    """Return whether predictions are correct and all logits finite: logits (r, k, b), labels (b,) -> (r, b)."""
    return (logits.argmax(1) == labels) & logits.isfinite().all(1)


class LinearScores(NamedTuple):
    """Store accuracy or mAP and mean loss of each layer, and correct predictions (r, n), None for multi-label."""

    accuracies: list[float]
    losses: list[float]
    correct: Tensor | None

    @property
    def per_image(self) -> Tensor | None:
        """Return the scores of the first layer in the format of `Result.per_image`."""
        return None if self.correct is None else self.correct[0].double().cpu()


def logits_of(layers: Tensor, rows: Tensor) -> Iterator[Tensor]:
    """Yield the logits (r, k, b) of layers (r, k, d + 1) for consecutive chunks of rows (n, d + 1)."""
    for x in rows.split(CHUNK):
        yield (layers.flatten(0, 1) @ x.T).unflatten(0, layers.shape[:2])


def score(logits: Iterable[Tensor], labels: Tensor) -> LinearScores:
    """Return accuracy and mean cross-entropy of each layer.

    A prediction with a non-finite logit counts as wrong and makes the loss of its layer infinite.

    Args:
        logits: Logits (r, k, b) of consecutive chunks of the images.
        labels: Class numbers, (n,), or multi-label targets, (n, k) bool, for which the scores are the mAP and the
            binary cross-entropy summed over the classes.
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
    """Return mAP and loss of logits (n, k) for multi-label targets (n, k) bool; the mAP is 0 if no class has images."""
    loss = F.binary_cross_entropy_with_logits(logits.double(), labels.double(), reduction="sum") / len(logits)
    finite = torch.where(logits.isfinite().all(1, keepdim=True), logits, -math.inf)
    precision = mean_average_precision(finite, labels)
    return (0.0 if math.isnan(precision) else precision), loss.nan_to_num(nan=math.inf, posinf=math.inf).item()


def best(scores: LinearScores) -> int:
    """Return the index of the layer of highest accuracy; ties are broken by lower loss, then lower index."""
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
    """Return the result of the chosen layer.

    Args:
        on_train: Scores of the chosen layer on the training images.
        validated: Scores of all layers on the validation images.
        on_test: Scores of the chosen layer on the test images.
        chosen: Index of the chosen layer.
        held_out: Indices of the validation images.
        numbers: Further numbers for `Result.numbers`.
        predictions: Predicted class of each test image, (m,); None if not reported.
    """
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
