"""Few-shot accuracy of frozen features: least squares to {-1, 1}^k, solved exactly, for every penalty at once.

Dosovitskiy et al. 2021, section 4.1. The Gram matrix of the features, in float64, is decomposed once; each L2 penalty
then costs one small product. So do its exact leave-one-out predictions, which choose the penalty without a test label.

Letters: n training images, m test images, b images of a chunk, d width, r the smaller of n and d, k classes,
p penalties.
"""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ssvit.evaluation import few_shot_rules as rules
from ssvit.evaluation.features import check_labels
from ssvit.evaluation.few_shot_rules import ALL
from ssvit.options import OptionError, UserError, whole
from ssvit.randomness import permutation

_CHUNK = 256  # rows in float64 at a time, few enough to stay in a processor's cache
_BLOCK = 96  # rows of the Gram matrix at a time: what is below its diagonal is left out
_LEAST_DEVIATION = 1e-5
_BIAS = 100.0  # large, so that the penalty hardly touches the intercept


@dataclass(frozen=True)
class Fit:
    """One regression: its draw (None for all images), its images, its penalty, and its accuracy on the test set.

    left_out: how many of its images the fits to all others name rightly; error: the squared error of what these say.
    """

    seed: int | None
    images: int
    l2: float
    accuracy: float
    left_out: int
    error: float


@dataclass(frozen=True)
class Score:
    """The fits of as many shots: mean accuracy, and the sample standard deviation over seeds (None for one fit)."""

    shots: int | str
    mean: float
    deviation: float | None
    fits: tuple[Fit, ...]

    @property
    def left_out(self) -> tuple[int, float]:
        """How good it is by its training images alone: the more the better. See `Fit`."""
        return sum(fit.left_out for fit in self.fits), -sum(fit.error for fit in self.fits)


@dataclass(frozen=True)
class FewShot:
    """The scores of a protocol, a number of shots each."""

    protocol: str
    scores: tuple[Score, ...]


def few_shot(
    train: Tensor,
    train_labels: Tensor | None,
    test: Tensor,
    test_labels: Tensor | None,
    *,
    classes: int,
    protocol: str,
    shots: Sequence[int | str] | None = None,
    seeds: int | None = None,
    l2: Sequence[float] | None = None,
    names: Sequence[str] = (),
) -> FewShot:
    """Accuracy on the test set of least squares on a few images of each class, drawn anew for each seed.

    train (n, d) and test (m, d): features, finite; their labels in [0, classes). protocol: a name in
    `few_shot_rules.PROTOCOLS`; shots, seeds, l2: in place of its own. names: of the classes, for errors. The draw of
    fewer shots is a part of the draw of more. UserError if a class has too few images, or features or labels are amiss.
    """
    asked = rules.few_shot(protocol, shots=shots, seeds=seeds, l2=l2)
    whole("classes", classes, 2)
    train_labels = _checked("training", train, train_labels, classes)
    test_labels = _checked("test", test, test_labels, classes)
    if train.shape[1] != test.shape[1]:
        raise UserError(f"training features have width {train.shape[1]}, but test features {test.shape[1]}")
    check_shots(train_labels, classes, asked.shots, names)

    def fit(seed: int | None, support: Tensor, labels: Tensor) -> Fit:
        rows = Whitened.by_its_own(support)
        path = RidgePath(rows, Signs(labels, classes))
        chosen = choose(path, asked.l2)
        return Fit(seed, len(support), chosen.l2, accuracy(path, chosen.l2, rows.like(test), test_labels),
                   chosen.right, chosen.error)  # fmt: skip

    draws = [draw(train_labels, classes, seed) for seed in range(asked.seeds)]
    scores = []
    for count in asked.shots:
        if count == ALL:
            fits = (fit(None, train, train_labels),)
        else:
            supports = [torch.cat([images[:count] for images in of_class]) for of_class in draws]
            fits = tuple(fit(seed, train[support], train_labels[support]) for seed, support in enumerate(supports))
        accuracies = [one.accuracy for one in fits]
        deviation = statistics.stdev(accuracies) if len(fits) > 1 else None
        scores.append(Score(count, statistics.fmean(accuracies), deviation, fits))
    return FewShot(protocol, tuple(scores))


def draw(labels: Tensor, classes: int, seed: int) -> list[Tensor]:
    """All images of each class, as places in the training set, in a random order: the first so many are the shots."""
    of_class = labels.argsort(stable=True).split(torch.bincount(labels, minlength=classes).tolist())
    return [
        places[permutation(seed, f"few_shot/class_{number}", len(places)).to(places.device)]
        for number, places in enumerate(of_class)
    ]


def accuracy(path: "RidgePath", l2: float, features: "Rows", labels: Tensor) -> float:
    """The share of rows whose largest prediction, the first of equals, is that of their label."""
    weights = path.weights([l2])[0]
    right = sum(
        ((features[rows].double() @ weights).argmax(-1) == labels[rows]).sum() for rows in _chunks(features.shape[0])
    )
    return right.item() / len(labels)


class Chosen(NamedTuple):
    """A penalty, how many rows the fits to all others name rightly, and the squared error of what these say."""

    l2: float
    right: int
    error: float


def choose(path: "RidgePath", l2: Sequence[float]) -> Chosen:
    """The penalty whose fits to all images but one name most of those left out; of equals, the least squared error.

    Accuracy and not the squared error first, because accuracy is what is reported: with few shots the least error is
    often at penalties that are too strong. With one shot nothing of the class is left, and the error alone decides.
    """
    tallies = [
        ((said.argmax(-1) == targets.argmax(-1)).sum(1), (said - targets).square().sum((1, 2)))
        for targets, said in path.leave_one_out(l2)
    ]
    right, error = (sum(column) for column in zip(*tallies, strict=True))
    less, error, penalty = min(zip((-right).tolist(), error.tolist(), map(float, l2), strict=True))
    return Chosen(penalty, -less, error)


class Rows(Protocol):
    """A matrix read in slices of rows: a tensor is one, and so is what makes its rows when they are asked for."""

    @property
    def shape(self) -> tuple[int, int]: ...

    def __getitem__(self, rows: slice) -> Tensor: ...


class RidgePath:
    """Ridge regression for every penalty: W = (X'X + l2)^-1 X'Y = X'(XX' + l2)^-1 Y, by one eigendecomposition.

    X'X (primal) is decomposed where there are more rows than columns, else XX' (dual): the same W. Float64 throughout.
    features: X, (n, d); targets: Y, (n, k).
    """

    def __init__(self, features: Rows, targets: Rows) -> None:
        n, d = features.shape
        self.dual = n <= d
        self._features, self._targets = features, targets
        # W = left diag(1 / (values + l2)) right, and the penalty stands in the diagonal alone.
        if self.dual:
            x, y = features[:n].double(), targets[:n].double()
            values, self._vectors = torch.linalg.eigh(x @ x.T)
            self._left, self._right = x.T @ self._vectors, self._vectors.T @ y
        else:
            gram, moment = _moments(features, targets)
            values, self._vectors = torch.linalg.eigh(gram, UPLO="U")
            self._left, self._right = self._vectors, self._vectors.T @ moment
        self._values = values.clamp_min(0)  # what rounding made negative is nothing

    def weights(self, l2: Sequence[float]) -> Tensor:
        """W of each penalty: (p, d, k) float64."""
        return (self._left @ self._scaled(l2)).unflatten(1, (len(l2), -1)).movedim(1, 0)

    def predict(self, features: Rows, l2: Sequence[float]) -> Tensor:
        """XW of other rows, (m, d), for each penalty: (p, m, k) float64."""
        weights = self._left @ self._scaled(l2)
        parts = [features[rows].double() @ weights for rows in _chunks(features.shape[0])]
        return torch.cat(parts).unflatten(1, (len(l2), -1)).movedim(1, 0)

    def leave_one_out(self, l2: Sequence[float]) -> Iterator[tuple[Tensor, Tensor]]:
        """What is said of each row by the fit to all others: chunks of targets (b, k) and predictions (p, b, k).

        Exact: h, a row's place in the diagonal of the hat matrix, is the share of its own target in its fit; without it
        stands (fit - h y) / (1 - h).
        """
        shrinkage, scaled = self._shrinkage(l2), self._scaled(l2)
        for rows in _chunks(self._features.shape[0]):
            y = self._targets[rows].double()[:, None]
            if self.dual:
                # 1 - h and the residual, both over l2: nothing cancels where a penalty is small.
                basis = self._vectors[rows]
                residual, free = basis @ scaled, basis.square() @ shrinkage
                said = y - residual.unflatten(1, (len(l2), -1)) / free[:, :, None]
            else:
                basis = self._features[rows].double() @ self._vectors
                fit, own = (basis @ scaled).unflatten(1, (len(l2), -1)), (basis.square() @ shrinkage)[:, :, None]
                said = (fit - own * y) / (1 - own).clamp_min(torch.finfo(own.dtype).eps)
            yield y[:, 0], said.movedim(1, 0)

    def _shrinkage(self, l2: Sequence[float]) -> Tensor:
        """1 / (eigenvalue + penalty): (r, p)."""
        return 1 / (self._values[:, None] + self._values.new_tensor(l2))

    def _scaled(self, l2: Sequence[float]) -> Tensor:
        """The right-hand side of every penalty, side by side: (r, p k)."""
        return (self._shrinkage(l2)[:, :, None] * self._right[:, None]).flatten(1)


def _chunks(count: int) -> Iterator[slice]:
    return (slice(start, min(start + _CHUNK, count)) for start in range(0, count, _CHUNK))


def _moments(features: Rows, targets: Rows) -> tuple[Tensor, Tensor]:
    """X'X, of which only the blocks on and above the diagonal are filled, and X'Y."""
    (n, d), k = features.shape, targets.shape[1]
    gram, moment = (features[:1].new_zeros(d, columns, dtype=torch.float64) for columns in (d, k))
    for rows in _chunks(n):
        x, y = features[rows].double(), targets[rows].double()
        for start in range(0, d, _BLOCK):
            block = slice(start, start + _BLOCK)
            gram[block, start:].addmm_(x[:, block].T, x[:, start:])
        moment.addmm_(x.T, y)
    return gram, moment


@dataclass(frozen=True, eq=False)
class Whitened:
    """Features (n, d) as the authors prepare them: rows of (n, d + 1) in float64, the last column a constant.

    (features - mean) * scale, by the mean and the deviation of the support set; the constant carries the bias.
    """

    features: Tensor
    mean: Tensor
    scale: Tensor

    @classmethod
    def by_its_own(cls, support: Tensor) -> "Whitened":
        """The support set itself, so that it has mean 0 and deviation 1."""
        n = len(support)
        mean = sum(support[rows].sum(0, dtype=torch.float64) for rows in _chunks(n)) / n
        variance = sum((support[rows] - mean).square().sum(0) for rows in _chunks(n)) / n
        return cls(support, mean, 1 / (variance.sqrt() + _LEAST_DEVIATION))

    def like(self, features: Tensor) -> "Whitened":
        """Other images, prepared by the same mean and deviation."""
        return replace(self, features=features)

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return len(self.features), self.features.shape[1] + 1

    def __getitem__(self, rows: slice) -> Tensor:
        return F.pad((self.features[rows] - self.mean).mul_(self.scale), (0, 1), value=_BIAS)


@dataclass(frozen=True, eq=False)
class Signs:
    """Labels (n,) as rows of {-1, 1}^k."""

    labels: Tensor
    classes: int

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return len(self.labels), self.classes

    def __getitem__(self, rows: slice) -> Tensor:
        return 2 * F.one_hot(self.labels[rows], self.classes).double() - 1


def _checked(which: str, features: Tensor, labels: Tensor | None, classes: int) -> Tensor:
    """The labels, on the features' device. UserError unless both can be."""
    check_labels(which, features, labels, classes, measure="few-shot accuracy")
    for rows in _chunks(len(features)):
        bad = ~features[rows].isfinite().all(1)
        if bad.any():
            row = rows.start + bad.nonzero()[0].item()
            raise UserError(f"the features of {which} image {row} are not finite")
    return labels.to(features.device)


def check_shots(labels: Tensor, classes: int, shots: Sequence[int | str], names: Sequence[str] = ()) -> None:
    """OptionError unless every class has as many training images as the shots, and one at least."""
    images = torch.bincount(labels, minlength=classes)
    fewest = images.argmin().item()
    named = f"{fewest} ({names[fewest]})" if names else f"{fewest}"
    for count in shots:
        needed = 1 if count == ALL else count
        if images[fewest] < needed:
            has = f"class {named} has {images[fewest].item()} training images"
            raise OptionError("shots", count, f"{has}, and at least {needed} are needed")
