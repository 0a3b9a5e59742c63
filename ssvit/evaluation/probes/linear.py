"""Define what linear probes share: the validation split, the choice of a classifier of the grid, and its scores.

Hyper-parameters are chosen on a held-out part of the training images; the test images are used for the chosen
classifier only. A linear layer is (k, d + 1), where the last column is the bias and rows of features end in a 1.

Shapes use n images, b of them in a chunk, d width, k classes, r classifiers.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ssvit.data.sources.base import is_multi_label
from ssvit.engine.randomness import permutation
from ssvit.errors import OptionError, UserError
from ssvit.evaluation.features import Features
from ssvit.evaluation.precision import mean_average_precision
from ssvit.evaluation.probes.base import Probe, Result
from ssvit.evaluation.probes.options import Linear as LinearOptions
from ssvit.evaluation.probes.scaler import Scaler

CHUNK = 1024  # images of a chunk, small enough for the intermediate results to stay in the CPU cache


@dataclass(frozen=True)
class LinearScores:
    """Store accuracy or mAP, and mean loss, of each classifier.

    Attributes:
        accuracies: Accuracies; mAPs for multi-label images.
        losses: Mean losses; infinite if a logit is not finite.
        correct: Correct predictions, (r, n) bool; None for multi-label images.
        predictions: Predicted classes, (r, n); None for multi-label images.
    """

    accuracies: list[float]
    losses: list[float]
    correct: Tensor | None = None
    predictions: Tensor | None = None


@dataclass(frozen=True)
class Classifiers:
    """Store the trained classifiers of a grid of settings.

    Attributes:
        settings: Hyper-parameters of each classifier.
        logits: Function of features (b, ...) and of indices of r classifiers that returns logits (r, k, b).
        numbers: Further numbers of the result.
        refit: Function that trains the classifier of an index again, on all training images; None to keep it.
    """

    settings: Sequence[Mapping[str, float]]
    logits: Callable[[Tensor, Sequence[int]], Tensor]
    numbers: Mapping[str, object]
    refit: Callable[[int], "Classifiers"] | None = None

    def score(self, features: Features, rows: Tensor, which: Sequence[int]) -> LinearScores:
        """Return the scores of the classifiers `which` on the images at `rows`.

        A prediction with a non-finite logit counts as wrong and makes the loss of its classifier infinite.
        """
        logits = torch.cat([self.logits(features.values[part], which) for part in rows.split(CHUNK)], 2)
        labels, is_finite = features.known_labels[rows], logits.isfinite().all(1)
        means = losses(logits, labels).mean(1, dtype=torch.float64).nan_to_num(nan=math.inf, posinf=math.inf).tolist()
        if is_multi_label(labels):
            finite = torch.where(is_finite[:, None], logits, -math.inf)
            precisions = [mean_average_precision(of_one.T, labels) for of_one in finite]
            return LinearScores([0.0 if math.isnan(precision) else precision for precision in precisions], means)
        predictions = logits.argmax(1)
        correct = (predictions == labels) & is_finite
        return LinearScores(correct.double().mean(1).tolist(), means, correct, predictions)


class Linear(Probe):
    """Choose a classifier and a feature set by validation accuracy; ties are broken by the validation loss."""

    options: LinearOptions
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
        if not is_multi_label(train_labels):
            untrained = sorted(set(test_labels.unique().tolist()) - set(train_labels.unique().tolist()))
            if untrained:
                name = f"{untrained[0]} ({classes[untrained[0]]})"
                raise UserError(f"class {name} has test images but no training images")
        hold_out_by_class(train_labels, fraction=self.options.held_out, seed=self.options.seed)

    def train(self, train: Features, rows: Tensor) -> Classifiers:
        """Train a classifier for each setting of the grid on the images at `rows`."""
        raise NotImplementedError

    @torch.no_grad()
    def __call__(self, train: Features, test: Features, *, choose: bool = False) -> Result:
        """Return the accuracy on the training, validation and test images, one column for each."""
        labels = train.known_labels
        trained, held_out = hold_out_by_class(labels, fraction=self.options.held_out, seed=self.options.seed)
        classifiers = self.train(train, trained)
        validated = classifiers.score(train, held_out, range(len(classifiers.settings)))
        measured = zip(validated.accuracies, validated.losses, strict=True)
        ranks = [(loss < math.inf, accuracy, -loss) for accuracy, loss in measured]
        chosen = ranks.index(max(ranks))
        if validated.losses[chosen] == math.inf:
            raise UserError("no classifier has a finite loss: try smaller learning rates, or standardize=true")
        final, number = classifiers, chosen
        if classifiers.refit is not None:
            trained, final, number = torch.arange(len(labels)), classifiers.refit(chosen), 0
        on_train = final.score(train, trained, [number])
        on_test = final.score(test, torch.arange(len(test.values)), [number])
        accuracies = (on_train.accuracies[0], validated.accuracies[chosen], on_test.accuracies[0])
        scores = dict(zip(("train", "validation", "test"), accuracies, strict=True))
        grid = {"grid": classifiers.settings, "validation_grid": validated.accuracies}
        return Result(
            scores=scores,
            choice=(scores["validation"], -validated.losses[chosen]),
            choice_images=None if on_test.correct is None else len(held_out),
            numbers={**final.settings[number], **grid, **final.numbers, **scores},
            predictions=None if on_test.predictions is None else on_test.predictions[0],
            per_image=None if on_test.correct is None else on_test.correct[0].double(),
        )


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
    if is_multi_label(labels):
        labels = torch.zeros(len(labels), dtype=torch.int64)
    order = permutation(seed, "linear probe, held out", len(labels))
    order = order[labels[order].argsort(stable=True)]
    counts = torch.bincount(labels)
    class_sizes = counts[labels[order]]
    rank = torch.arange(len(labels)) - (counts.cumsum(0) - counts)[labels[order]]
    is_held_out = rank < (fraction * class_sizes.double()).round().clamp_min(1).minimum(class_sizes - 1)
    if not is_held_out.any():
        raise OptionError("held_out", fraction, "no class has two training images, of which one could be held out")
    return order[~is_held_out].sort().values, order[is_held_out].sort().values


def logits_of(scaler: Scaler, layers: Tensor, values: Tensor, which: Sequence[int]) -> Tensor:
    """Return the logits of linear layers.

    Args:
        scaler: Standardisation of the features.
        layers: Layers, (r, k, d + 1).
        values: Features, (b, d).
        which: Indices of the layers to apply.

    Returns:
        Logits, (len(which), k, b).
    """
    chosen = layers[list(which)]
    return (chosen.flatten(0, 1) @ scaler(values).T).unflatten(0, chosen.shape[:2])


def losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the cross-entropy of each image for each classifier.

    Args:
        logits: Logits, (r, k, b).
        labels: Class numbers, (b,), class frequencies, (b, k) float, or multi-label targets, (b, k) bool, for which the
            binary cross-entropy is summed over the classes.

    Returns:
        Losses, (r, b).
    """
    if labels.ndim == 1:
        return F.cross_entropy(logits, labels.expand(len(logits), -1), reduction="none")
    targets = labels.T.to(logits.dtype).expand_as(logits)
    if labels.dtype == torch.bool:
        return F.binary_cross_entropy_with_logits(logits, targets, reduction="none").sum(1)
    return F.cross_entropy(logits, targets, reduction="none")
