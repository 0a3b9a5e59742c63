"""Fit ridge regression to frozen features, with targets in {-1, 1}^k, in closed form for all penalties.

The probe follows Dosovitskiy et al. 2021, section 4.1. The Gram matrix of the features is decomposed once, in
float64; each L2 penalty, and its exact leave-one-out predictions, then cost one small product. The penalty is chosen by
the leave-one-out predictions.

Shapes use n training images, m test images, d width, r = min(n, d), k classes.
"""

import statistics
from collections.abc import Iterator, Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ssvit.data.sources.base import is_multi_label
from ssvit.engine.randomness import permutation
from ssvit.errors import OptionError
from ssvit.evaluation.features import Features
from ssvit.evaluation.precision import mean_average_precision
from ssvit.evaluation.probes.base import Probe, Result
from ssvit.evaluation.probes.options import Ridge as RidgeOptions
from ssvit.evaluation.titles import labels as title_of

_BLOCK = 96  # rows of a block of the Gram matrix; only blocks of its upper triangle are computed
_COLUMNS = 512  # maximum number of predictions of an image, for several penalties, in one product
_MIN_DEVIATION = 1e-5
_BIAS = 100.0  # a large constant, so that the intercept is hardly penalised


class Ridge(Probe):
    """Fit ridge regression to all images or to a few of each class; the samples are nested over the shots."""

    options: RidgeOptions
    chosen_by: ClassVar[str] = "leave-one-out accuracy on the images of the last column"
    multi_label: ClassVar[bool] = True

    @property
    def name(self) -> str:
        """Return the name, ridge for all images and such as few_shot5 for five images of each class."""
        return "ridge" if self.options.shots[-1] == "all" else f"few_shot{self.options.shots[-1]}"

    @property
    def is_balanced(self) -> bool:
        """Return whether the last column is of few images of each class."""
        return self.options.shots[-1] != "all"

    def check_classes(self, train_labels: Tensor, test_labels: Tensor, classes: Sequence[str]) -> None:
        """Raise OptionError unless each class of the test images has a training image."""
        images, tested = (_counts(labels, len(classes)) for labels in (train_labels, test_labels))
        if len(untrained := ((images == 0) & (tested > 0)).nonzero()):
            number = int(untrained[0])
            reason = f"class {number} ({classes[number]}) has 0 training images; at least 1 is required"
            raise OptionError("shots", self.options.shots[0], reason)

    def remark(self, train_labels: Tensor, classes: Sequence[str]) -> str:
        """Report classes with fewer training images than shots, all of which are then used."""
        shots = max((shots for shots in self.options.shots if shots != "all"), default=0)
        images = _counts(train_labels, len(classes))
        if not (rare := int((images < shots).sum())):
            return ""
        fewer = f"{rare} of {len(classes)} classes have fewer training images, all of which are used"
        return f"shots={shots}: {fewer} ({classes[int(images.argmin())]} has {images.min()})"

    def __call__(self, train: Features, test: Features, *, choose: bool = False) -> Result:
        """Fit a classifier for each number of shots and return one column for each."""
        labels, classes = train.known_labels, train.classes
        samples = [sample(labels, len(classes), seed) for seed in range(self.options.seeds)]
        scores, deviations, numbers = {}, {}, []
        for shots in self.options.shots:
            if shots == "all":
                supports = [torch.arange(len(labels))]
            else:
                # A multi-label image may be sampled for several of its classes.
                supports = [torch.cat([rows[:shots] for rows in of_classes]).unique() for of_classes in samples]
            fits, correct = zip(*(fit(train, test, support, self.options.l2) for support in supports), strict=True)
            accuracies = [fitted["accuracy"] for fitted in fits]
            mean, title = statistics.fmean(accuracies), title_of(shots)
            scores[title] = mean
            if len(fits) > 1:
                deviations[title] = statistics.stdev(accuracies)
            numbers.append({"shots": shots, "mean": mean, "fits": list(fits)})
        images = len(fits) if is_multi_label(labels) else sum(fitted["images"] for fitted in fits)
        return Result(
            scores=scores,
            deviations=deviations,
            choice=(sum(fitted["left_out"] for fitted in fits) / images, -sum(fitted["error"] for fitted in fits)),
            choice_images=None if is_multi_label(labels) else images,
            numbers=numbers,
            per_image=None if correct[0] is None else torch.stack(correct).mean(0),
        )


def _counts(labels: Tensor, classes: int) -> Tensor:
    """Return the number of images of each class, (k,)."""
    return labels.sum(0) if is_multi_label(labels) else torch.bincount(labels, minlength=classes)


def sample(labels: Tensor, classes: int, seed: int) -> list[Tensor]:
    """Return the shuffled training indices of each class, whose first elements are the few-shot sample.

    Args:
        labels: Class numbers, (n,), or multi-label targets, (n, k) bool.
        classes: Number of classes.
        seed: Seed of the order.
    """
    of_classes: Sequence[Tensor]
    if is_multi_label(labels):
        of_classes = [column.nonzero()[:, 0] for column in labels.T]
    else:
        of_classes = labels.argsort(stable=True).split(_counts(labels, classes).tolist())
    return [rows[permutation(seed, f"few_shot/class_{label}", len(rows))] for label, rows in enumerate(of_classes)]


def fit(
    train: Features, test: Features, support: Tensor, l2: Sequence[float]
) -> tuple[dict[str, float], Tensor | None]:
    """Fit ridge regression to some training images, and predict the test images.

    Args:
        train: Features of the training images.
        test: Features of the test images.
        support: Indices of the images that are used for training.
        l2: Penalties to choose from.

    Returns:
        Number of training images, chosen penalty (l2), number of correct leave-one-out predictions or their mAP
        (left_out), squared error of these (error), and accuracy or mAP on the test images, by name; and which
        predictions are correct, (m,) float64, None for multi-label images.
    """
    values, truth = train.values[support], test.known_labels
    targets = signs(train.known_labels[support], len(train.classes))
    path = RidgePath(whiten(values, values), targets)
    several = is_multi_label(truth)
    left_out, error, penalty = choose_penalty(path, l2, multi_label=several)
    predictions = path.predict(whiten(values, test.values), penalty)
    correct = None if several else (predictions.argmax(1) == truth).double()
    accuracy = mean_average_precision(predictions, truth) if correct is None else correct.mean().item()
    numbers = {"images": len(support), "l2": penalty, "left_out": left_out, "error": error, "accuracy": accuracy}
    return numbers, correct


def whiten(support: Tensor, features: Tensor) -> Tensor:
    """Standardise features by the statistics of the support set and append a bias: (n, d) -> (n, d + 1) float64."""
    deviation, mean = torch.std_mean(support.double(), dim=0, correction=0)
    return F.pad((features.double() - mean).div_(deviation + _MIN_DEVIATION), (0, 1), value=_BIAS)


def signs(labels: Tensor, classes: int) -> Tensor:
    """Return labels, (n,) or (n, k) bool, as targets in {-1, 1}: (n, k) float64."""
    return 2 * (labels if is_multi_label(labels) else F.one_hot(labels, classes)).double() - 1


def choose_penalty(path: "RidgePath", l2: Sequence[float], *, multi_label: bool) -> tuple[float, float, float]:
    """Choose the penalty with the best leave-one-out predictions; ties are broken by the squared error.

    Accuracy takes precedence because it is the reported metric: with few shots, the lowest error often has too large a
    penalty. With one shot no image of the class remains for training, and the error decides.

    Args:
        path: Ridge regression on the training images.
        l2: Penalties to choose from.
        multi_label: Whether the mAP of the predictions decides instead of the number of correct ones.

    Returns:
        Number of correct leave-one-out predictions or their mAP, their squared error, and the penalty.
    """
    results = []
    for penalty, predictions in zip(map(float, l2), path.leave_one_out(l2), strict=True):
        if multi_label:
            score = mean_average_precision(predictions, path.targets > 0)
        else:
            score = int((predictions.argmax(1) == path.targets.argmax(1)).sum())
        results.append((score, (predictions - path.targets).square().sum().item(), penalty))
    return min(results, key=lambda result: (-result[0], *result[1:]))


class RidgePath:
    """Solve ridge regression for several penalties by one eigendecomposition.

    The solution is W = (X'X + l2)^-1 X'Y = X'(XX' + l2)^-1 Y. XX' (the dual form) is decomposed if n <= d.

    Args:
        features: X, (n, d) float64.
        targets: Y, (n, k) float64.
    """

    def __init__(self, features: Tensor, targets: Tensor) -> None:
        n, d = features.shape
        self.dual, self.targets = n <= d, targets
        # W = left diag(1 / (eigenvalues + l2)) right, where only the diagonal depends on the penalty.
        if self.dual:
            values, self._basis = torch.linalg.eigh(features @ features.T)
            self._left = features.T @ self._basis
        else:
            gram = features.new_zeros(d, d)
            for start in range(0, d, _BLOCK):
                gram[start : start + _BLOCK, start:] = features[:, start : start + _BLOCK].T @ features[:, start:]
            values, self._left = torch.linalg.eigh(gram, UPLO="U")
            self._basis = features @ self._left
        self._right = self._basis.T @ targets
        self._values = values.clamp_min(0)  # rounding may make them negative

    def predict(self, features: Tensor, l2: float) -> Tensor:
        """Return the predictions for other rows: (m, d) -> (m, k)."""
        return features @ (self._left @ (self._right / (self._values + l2)[:, None]))

    def leave_one_out(self, l2: Sequence[float]) -> Iterator[Tensor]:
        """Yield exact leave-one-out predictions, (n, k), for each penalty.

        A prediction is (fit - h y) / (1 - h), where h is the row's diagonal element of the hat matrix.
        """
        several = max(1, _COLUMNS // self.targets.shape[1])
        squares = self._basis.square()
        for penalties in torch.tensor(l2, dtype=squares.dtype).split(several):
            inverses = 1 / (self._values[:, None] + penalties)  # (r, penalties)
            fits = self._basis @ (inverses[:, :, None] * self._right[:, None]).flatten(1)
            for fit, h in zip(fits.split(self.targets.shape[1], 1), (squares @ inverses).split(1, 1), strict=True):
                if self.dual:
                    # The residual and 1 - h, both divided by l2, which avoids cancellation for small penalties.
                    yield self.targets - fit / h
                else:
                    yield (fit - h * self.targets) / (1 - h).clamp_min(torch.finfo(h.dtype).eps)
