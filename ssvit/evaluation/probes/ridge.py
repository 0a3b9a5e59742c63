"""Fit ridge regression to frozen features, with targets in {-1, 1}^k, in closed form for all penalties.

The probe is that of Dosovitskiy et al. 2021, section 4.1. The Gram matrix of the features is decomposed once, in
float64; each L2 penalty, and its exact leave-one-out predictions, then cost one small product. The penalty is chosen by
the leave-one-out predictions.

Shapes use n training images, m test images, b rows, d width, r = min(n, d), k classes, p penalties.
"""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ssvit.data.sources.base import is_multi_label
from ssvit.evaluation.features import Features, check
from ssvit.evaluation.precision import mean_average_precision
from ssvit.evaluation.probes import ridge_options
from ssvit.evaluation.probes.base import Probe, Result
from ssvit.evaluation.titles import labels
from ssvit.options import OptionError
from ssvit.randomness import permutation

_CHUNK = 256  # rows of a chunk of leave-one-out predictions, for all penalties
_BLOCK = 96  # rows of a block of the Gram matrix, of which only the upper triangle is computed
_LEAST_DEVIATION = 1e-5
_BIAS = 100.0  # a large constant, so that the intercept is hardly penalised


@dataclass(frozen=True)
class RidgeFit:
    """Store a fitted ridge regression.

    Attributes:
        seed: Seed of the sample of images; None if all images are used.
        images: Number of training images.
        l2: Chosen penalty.
        accuracy: Accuracy on the test images; mAP for multi-label images.
        left_out: Number of correct leave-one-out predictions; their mAP for multi-label images.
        error: Squared error of the leave-one-out predictions.
    """

    seed: int | None
    images: int
    l2: float
    accuracy: float
    left_out: float
    error: float


@dataclass(frozen=True)
class ShotsScore:
    """Store the fits of one number of shots.

    Attributes:
        shots: Training images of each class, or "all".
        mean: Mean accuracy over the fits.
        deviation: Sample standard deviation over seeds; None for a single fit.
        fits: The fits, one for each seed.
        per_image: Score of each test image, see `Result.per_image`.
    """

    shots: int | str
    mean: float
    deviation: float | None
    fits: tuple[RidgeFit, ...]
    per_image: Tensor | None = field(repr=False, compare=False)


class FewShot(ridge_options.FewShot, Probe):
    """Fit ridge regression to a few images of each class, sampled for each seed; samples are nested over the shots."""

    chosen_by: ClassVar[str] = "leave-one-out on the most shots"
    multi_label: ClassVar[bool] = True

    @property
    def name(self) -> str:
        """Return the name, such as few_shot5, with the protocol if it is not the paper's."""
        return f"few_shot{self.shots[-1]}" + (f"_{self.protocol}" if self.protocol != "paper" else "")

    def check_classes(self, train_labels: Tensor, test_labels: Tensor, classes: Sequence[str]) -> None:
        """Raise OptionError unless each class has at least as many training images as shots, and at least one."""
        several = is_multi_label(train_labels)
        images = train_labels.sum(0) if several else torch.bincount(train_labels, minlength=len(classes))
        fewest = int(images.argmin())
        for count in self.shots:
            needed = count if isinstance(count, int) else 1
            if images[fewest] < needed:
                has = f"class {fewest} ({classes[fewest]}) has {images[fewest].item()} training images"
                raise OptionError("shots", count, f"{has}, and at least {needed} are needed")

    def __call__(self, train: Features, test: Features, *, choose: bool = False) -> Result:
        """Return one column for each number of shots."""
        scores = self.fit(train, test)
        most = max(scores, key=lambda score: score.fits[0].images)
        several = is_multi_label(train.known_labels)
        count = len(most.fits) if several else sum(fit.images for fit in most.fits)
        return Result(
            scores={labels(score.shots): score.mean for score in scores},
            deviations={labels(score.shots): score.deviation for score in scores if score.deviation is not None},
            choice=(sum(fit.left_out for fit in most.fits) / count, -sum(fit.error for fit in most.fits)),
            choice_images=None if several else count,
            numbers=[{name: value for name, value in asdict(one).items() if name != "per_image"} for one in scores],
            per_image=scores[-1].per_image,
        )

    def fit(self, train: Features, test: Features) -> list[ShotsScore]:
        """Return the score of each number of shots.

        Raises:
            OptionError: If a class has too few training images.
            UserError: If features or labels do not suffice.
        """
        check(train, test, "few-shot accuracy")
        self.check_classes(train.known_labels, test.known_labels, train.classes)
        values, classes, several = train.values, len(train.classes), is_multi_label(train.known_labels)
        labels, truth = train.known_labels.to(values.device), test.known_labels.to(test.values.device)

        def fit(seed: int | None, support: Tensor, labels: Tensor) -> tuple[RidgeFit, Tensor | None]:
            path = RidgePath(whiten(support, support), signs(labels, classes))
            penalty, right, error = (choose_by_precision if several else choose_penalty)(path, self.l2)
            guesses = path.predict(whiten(support, test.values), [penalty])[0]
            if several:
                return RidgeFit(seed, len(support), penalty, mean_average_precision(guesses, truth), right, error), None
            is_right = (guesses.argmax(-1) == truth).double().cpu()
            return RidgeFit(seed, len(support), penalty, is_right.mean().item(), right, error), is_right

        samples = [sample(labels, classes, seed) for seed in range(self.seeds)]
        scores = []
        for count in self.shots:
            if isinstance(count, int):
                supports = [torch.cat([places[:count] for places in of_class]) for of_class in samples]
                if several:  # an image may be sampled for several of its classes
                    supports = [support.unique() for support in supports]
                found = [fit(seed, values[support], labels[support]) for seed, support in enumerate(supports)]
            else:  # all
                found = [fit(None, values, labels)]
            fits, rows = zip(*found, strict=True)
            per_image = None if several else torch.stack(rows).mean(0)
            accuracies = [one.accuracy for one in fits]
            deviation = statistics.stdev(accuracies) if len(fits) > 1 else None
            scores.append(ShotsScore(count, statistics.fmean(accuracies), deviation, fits, per_image))
        return scores


def sample(labels: Tensor, classes: int, seed: int) -> list[Tensor]:
    """Return the shuffled training indices of each class, whose first elements are the few-shot sample.

    Args:
        labels: Class numbers, (n,), or multi-label targets, (n, k) bool.
        classes: Number of classes.
        seed: Seed of the order.
    """
    of_class: Sequence[Tensor]
    if is_multi_label(labels):
        of_class = [column.nonzero()[:, 0] for column in labels.T]
    else:
        of_class = labels.argsort(stable=True).split(torch.bincount(labels, minlength=classes).tolist())
    return [
        places[permutation(seed, f"few_shot/class_{label}", len(places)).to(places.device)]
        for label, places in enumerate(of_class)
    ]


def whiten(support: Tensor, features: Tensor) -> Tensor:
    """Standardise features by the statistics of the support set and append a bias: (n, d) -> (n, d + 1) float64."""
    deviation, mean = torch.std_mean(support.double(), dim=0, correction=0)
    return F.pad((features.double() - mean).div_(deviation + _LEAST_DEVIATION), (0, 1), value=_BIAS)


def signs(labels: Tensor, classes: int) -> Tensor:
    """Return labels, (n,) or (n, k) bool, as targets in {-1, 1}: (n, k) float64."""
    return 2 * (labels if is_multi_label(labels) else F.one_hot(labels, classes)).double() - 1


def choose_by_precision(path: "RidgePath", l2: Sequence[float]) -> tuple[float, float, float]:
    """Choose the penalty by the mAP of the leave-one-out predictions, for multi-label images."""
    found = []
    for penalty in map(float, l2):
        targets, predictions = map(torch.cat, zip(*((y, p[0]) for y, p in path.leave_one_out([penalty])), strict=True))
        precision = mean_average_precision(predictions, targets > 0)
        found.append((-precision, (predictions - targets).square().sum().item(), penalty))
    minus_precision, error, penalty = min(found)
    return penalty, -minus_precision, error


def choose_penalty(path: "RidgePath", l2: Sequence[float]) -> tuple[float, int, float]:
    """Choose the penalty with the most correct leave-one-out predictions; ties are broken by the squared error.

    Accuracy takes precedence because it is the reported metric: with few shots, the lowest error often has too large a
    penalty. With one shot no image of the class remains for training, and the error decides.

    Args:
        path: Ridge regression on the training images.
        l2: Penalties to choose from.

    Returns:
        The penalty, the number of correct leave-one-out predictions, and their squared error.
    """
    tallies = [
        ((predictions.argmax(-1) == targets.argmax(-1)).sum(1), (predictions - targets).square().sum((1, 2)))
        for targets, predictions in path.leave_one_out(l2)
    ]
    right, error = (sum(column) for column in zip(*tallies, strict=True))
    minus_right, error, penalty = min(zip((-right).tolist(), error.tolist(), map(float, l2), strict=True))
    return penalty, -minus_right, error


class RidgePath:
    """Solve ridge regression for several penalties by one eigendecomposition.

    The solution is W = (X'X + l2)^-1 X'Y = X'(XX' + l2)^-1 Y. XX' (the dual form) is decomposed if n <= d.

    Args:
        features: X, (n, d) float64.
        targets: Y, (n, k) float64.
    """

    def __init__(self, features: Tensor, targets: Tensor) -> None:
        n, d = features.shape
        self.dual = n <= d
        self._features, self._targets = features, targets
        # W = left diag(1 / (values + l2)) right, where only the diagonal depends on the penalty.
        if self.dual:
            values, self._vectors = torch.linalg.eigh(features @ features.T)
            self._left, self._right = features.T @ self._vectors, self._vectors.T @ targets
        else:
            gram = features.new_zeros(d, d)
            for start in range(0, d, _BLOCK):
                gram[start : start + _BLOCK, start:] = features[:, start : start + _BLOCK].T @ features[:, start:]
            values, self._vectors = torch.linalg.eigh(gram, UPLO="U")
            self._left, self._right = self._vectors, self._vectors.T @ (features.T @ targets)
        self._values = values.clamp_min(0)  # rounding may make them negative

    def weights(self, l2: Sequence[float]) -> Tensor:
        """Return W for each penalty: (p, d, k)."""
        return (self._left @ self._scaled(l2)).unflatten(1, (len(l2), -1)).movedim(1, 0)

    def predict(self, features: Tensor, l2: Sequence[float]) -> Tensor:
        """Return the predictions for further rows (m, d) for each penalty: (p, m, k)."""
        return (features @ (self._left @ self._scaled(l2))).unflatten(1, (len(l2), -1)).movedim(1, 0)

    def leave_one_out(self, l2: Sequence[float]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield exact leave-one-out predictions as chunks of targets (b, k) and predictions (p, b, k).

        The prediction is (fit - h y) / (1 - h), where h is the row's diagonal element of the hat matrix.
        """
        shrinkage, scaled = self._shrinkage(l2), self._scaled(l2)
        basis = self._vectors if self.dual else self._features
        for rows, targets in zip(basis.split(_CHUNK), self._targets.split(_CHUNK), strict=True):
            y = targets[:, None]
            if self.dual:
                # Both 1 - h and the residual are divided by l2, which avoids cancellation for small penalties.
                residual, free = rows @ scaled, rows.square() @ shrinkage
                predictions = y - residual.unflatten(1, (len(l2), -1)) / free[:, :, None]
            else:
                rotated = rows @ self._vectors
                fit, h = (rotated @ scaled).unflatten(1, (len(l2), -1)), (rotated.square() @ shrinkage)[:, :, None]
                predictions = (fit - h * y) / (1 - h).clamp_min(torch.finfo(h.dtype).eps)
            yield targets, predictions.movedim(1, 0)

    def _shrinkage(self, l2: Sequence[float]) -> Tensor:
        """Return 1 / (eigenvalue + penalty): (r, p)."""
        return 1 / (self._values[:, None] + self._values.new_tensor(l2))

    def _scaled(self, l2: Sequence[float]) -> Tensor:
        """Return the right-hand sides of all penalties, concatenated: (r, p k)."""
        return (self._shrinkage(l2)[:, :, None] * self._right[:, None]).flatten(1)
