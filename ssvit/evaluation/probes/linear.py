"""Linear probes of frozen features: how well can one linear layer name the class?

`SgdProbe` trains the whole grid of learning rates and feature sets, as DINOv2 does (Oquab et al. 2023), and `Logistic`
finds the exact optimum of a penalised logistic regression. Both choose on a held-out part of the training set;
accuracy on the test set is computed for what was chosen, and for nothing before.

A layer is held as (k, d + 1): its last column is the bias, and rows of features end in a constant 1 to meet it. All is
computed on the features' device and in their precision.

Letters: n training images, m test images, b images of a batch, d width, k classes, r learning rates.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ssvit.evaluation import linear_probe_rules as rules
from ssvit.options import OptionError, UserError, whole
from ssvit.randomness import permutation

_CHUNK = 1024  # rows at a time, few enough that what comes of them stays in a processor's cache
_GRADIENT = 1e-6  # L-BFGS has converged where no element of the gradient is larger,
_CHANGE = 1e-10  # or where the loss falls by less in one iteration

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Choice:
    """The learning rate that is best for a feature set on the held-out images, and its layer's accuracies."""

    features: str
    learning_rate: float
    train: float
    validation: float
    test: float


@dataclass(frozen=True)
class SgdResult:
    """What `SgdProbe` found: the best of all, and by feature set the validation accuracy of each learning rate.

    sweep: the best of each feature set, in their order; empty unless asked for.
    """

    best: Choice
    learning_rates: tuple[float, ...]
    grid: dict[str, tuple[float, ...]]
    sweep: tuple[Choice, ...]


@dataclass(frozen=True)
class LogisticResult:
    """What `Logistic` found: the chosen penalty, its accuracies, and the validation accuracy of each penalty.

    validation is of the fit without the held-out images; train and test are of the fit to all training images.
    converged: whether every fit was at its optimum before the iterations ran out. predictions: the class that each test
    image is taken for, (m,).
    """

    l2: float
    train: float
    validation: float
    test: float
    l2s: tuple[float, ...]
    grid: tuple[float, ...]
    converged: bool
    predictions: tuple[int, ...]


class SgdProbe(rules.Sgd):
    """A linear layer for each feature set and learning rate, trained by SGD on the same batches, from zero.

    learning_rates: at the start, as they are (not scaled by the batch size), then down to 0 along half a cosine.
    weight_decay: of weights and biases, as in torch.optim.SGD. held_out: the fraction of each class that is kept from
    training, to choose by. standardize: shift and scale each feature to mean 0 and deviation 1 over the images trained
    on, so that one grid suits features of any scale: an untrained encoder's, raw pixels, those before the last norm.
    OptionError names an option that cannot be.
    """

    @torch.no_grad()
    def __call__(
        self,
        train: Mapping[str, Tensor],
        train_labels: Tensor | None,
        test: Mapping[str, Tensor],
        test_labels: Tensor | None,
        *,
        classes: int,
        names: Sequence[str] = (),
        sweep: bool = False,
        progress: Progress | None = None,
    ) -> SgdResult:
        """Train and measure. train: named features (n, d), the widths may differ; test: the same names, (m, d).

        Feature sets share nothing but the batches, so they are trained one after another and asked of `train` when
        their turn comes: only one has to be in memory. classes: k; names: theirs, for errors. sweep: measure the best
        of each feature set on the test set too. progress(done, all) counts steps. UserError if labels or features are
        amiss, or a class is tested that is not trained.
        """
        train_labels, test_labels = _checked(train, train_labels, test, test_labels, classes, names)
        trained, kept = hold_out_by_class(train_labels, fraction=self.held_out, seed=self.seed)
        steps = self.epochs * math.ceil(len(trained) / self.batch_size)
        grid, found = {}, {}
        for turn, (name, features) in enumerate(train.items()):
            y = train_labels.to(features.device)
            standard = Standard.of(features[trained], self.standardize)
            rows = standard(features)
            order = batches(len(trained), batch_size=self.batch_size, epochs=self.epochs, seed=self.seed)
            layers = descend(
                rows,
                y,
                (trained[batch].to(rows.device) for batch in order),
                classes=classes,
                learning_rates=self.learning_rates,
                steps=steps,
                momentum=self.momentum,
                weight_decay=self.weight_decay,
                progress=progress and (lambda done, turn=turn: progress(turn * steps + done, len(train) * steps)),
            )
            accuracies, losses = score(layers, rows[kept], y[kept])
            best = _best(accuracies, losses)
            (reached,), _ = score(layers[best, None], rows[trained], y[trained])
            grid[name] = tuple(accuracies)
            found[name] = _Found(best, layers[best].clone(), standard, reached, accuracies[best], losses[best])
        chosen = max(found, key=lambda name: (found[name].validation, -found[name].loss))
        if found[chosen].loss == math.inf:
            raise UserError("no learning rate led to a finite loss: try smaller ones, or standardize=true")

        def measured(name: str) -> Choice:
            own = found[name]
            (tested,), _ = score(own.layer[None], own.standard(test[name]), test_labels.to(own.layer.device))
            return Choice(name, rates[own.place], own.train, own.validation, tested)

        rates = tuple(map(float, self.learning_rates))
        choices = {name: measured(name) for name in (found if sweep else [chosen])}
        return SgdResult(choices[chosen], rates, grid, tuple(choices.values()) if sweep else ())


class _Found(NamedTuple):
    """The best learning rate of a feature set by its place, the layer, and what it reached without the test set."""

    place: int
    layer: Tensor
    standard: "Standard"
    train: float
    validation: float
    loss: float


class Logistic(rules.Lbfgs):
    """Multinomial logistic regression by L-BFGS on all images at once: mean cross-entropy + l2 / 2 |weights|^2.

    l2s: the penalties to choose from (scikit-learn's C is 1 / (n l2)); the bias bears none. Each fit starts from that
    of the next stronger penalty, and the chosen one is fitted again to all training images. held_out, standardize: as
    for `SgdProbe`. iterations: at most, a fit. OptionError names an option that cannot be.
    """

    @torch.no_grad()
    def __call__(
        self,
        train: Tensor,
        train_labels: Tensor | None,
        test: Tensor,
        test_labels: Tensor | None,
        *,
        classes: int,
        names: Sequence[str] = (),
        progress: Progress | None = None,
    ) -> LogisticResult:
        """Fit and measure: train (n, d), test (m, d), classes k; names: theirs, for errors.

        progress(done, all) counts fits. UserError as for `SgdProbe`.
        """
        train_labels, test_labels = _checked(
            {"features": train}, train_labels, {"features": test}, test_labels, classes, names
        )
        trained, kept = hold_out_by_class(train_labels, fraction=self.held_out, seed=self.seed)
        y = train_labels.to(train.device)
        l2s = sorted(map(float, self.l2s), reverse=True)

        standard = Standard.of(train[trained], self.standardize)
        rows = standard(train[trained])
        shared = {"moment": moment(rows), "classes": classes, "iterations": self.iterations}
        fits: list[Fit] = []
        for l2 in l2s:
            fits.append(fit(rows, y[trained], l2=l2, start=fits[-1].layer if fits else None, **shared))
            if progress:
                progress(len(fits), len(l2s) + 1)
        accuracies, losses = score(torch.stack([one.layer for one in fits]), standard(train[kept]), y[kept])
        best = _best(accuracies, losses)

        standard = Standard.of(train, self.standardize)
        rows = standard(train)
        last = fit(rows, y, l2=l2s[best], start=fits[best].layer, **shared)
        if progress:
            progress(len(l2s) + 1, len(l2s) + 1)
        (reached,), _ = score(last.layer[None], rows, y)
        rows = standard(test)
        (tested,), _ = score(last.layer[None], rows, test_labels.to(train.device))
        converged = all(one.converged for one in [*fits, last])
        predictions = torch.cat([(last.layer @ x.T).argmax(0) for x in rows.split(_CHUNK)])
        return LogisticResult(l2s[best], reached, accuracies[best], tested, tuple(l2s), tuple(accuracies), converged,
                              tuple(predictions.tolist()))  # fmt: skip


def check_labels(
    train_labels: Tensor | None, test_labels: Tensor | None, classes: int, names: Sequence[str] = ()
) -> None:
    """UserError unless images with these labels, (n,) and (m,), can be trained and tested on."""
    whole("classes", classes, 2)
    for which, least, labels in (("training", 2, train_labels), ("test", 1, test_labels)):
        if labels is None:
            raise UserError(f"the {which} images have no labels, which a linear probe needs")
        if len(labels) < least:
            raise UserError(f"a linear probe needs {least} {which} images or more, and there are {len(labels)}")
        wrong = labels[(labels < 0) | (labels >= classes)]
        if len(wrong):
            raise UserError(f"label {wrong[0].item()} of a {which} image is outside of [0, {classes}), its classes")
    untrained = sorted(set(test_labels.unique().tolist()) - set(train_labels.unique().tolist()))
    if untrained:
        named = f"{untrained[0]} ({names[untrained[0]]})" if names else f"{untrained[0]}"
        raise UserError(f"class {named} has test images and no training image, so it cannot be learned")


def hold_out_by_class(labels: Tensor, *, fraction: float, seed: int) -> tuple[Tensor, Tensor]:
    """Part the images into (train, held out), each class alike: labels (n,) -> places of both, ascending.

    Of each class the fraction is rounded, but at least one image goes to either part, and an only one to train.
    OptionError if nothing can be held out.
    """
    labels = labels.cpu()
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


def batches(count: int, *, batch_size: int, epochs: int, seed: int) -> Iterator[Tensor]:
    """Places of images in [0, count), a batch at a time: every image once an epoch, in its order for the seed.

    The batches of an epoch differ in size by one at most, so that no small last one weighs as much as a full one.
    """
    for epoch in range(epochs):
        order = permutation(seed, f"linear probe, order of epoch {epoch}", count)
        yield from order.tensor_split(math.ceil(count / batch_size))


class Standard(NamedTuple):
    """How features become rows: (features - mean) * scale and a last 1."""

    mean: Tensor
    scale: Tensor

    @classmethod
    def of(cls, features: Tensor, standardize: bool) -> "Standard":
        """By the features' own mean and deviation (d,), or as they are. What varies by rounding alone gets 0."""
        if not standardize:
            return cls(features.new_zeros(features.shape[1]), features.new_ones(features.shape[1]))
        deviation, mean = torch.std_mean(features, dim=0, correction=0)
        varies = deviation > 8 * torch.finfo(features.dtype).eps * mean.abs()
        return cls(mean, torch.where(varies, 1 / deviation, 0))

    def __call__(self, features: Tensor) -> Tensor:
        """(n, d) -> (n, d + 1)."""
        rows = features.new_ones(len(features), features.shape[1] + 1)
        torch.sub(features, self.mean, out=rows[:, :-1]).mul_(self.scale)
        return rows


def descend(
    rows: Tensor,
    labels: Tensor,
    order: Iterable[Tensor],
    *,
    classes: int,
    learning_rates: Sequence[float],
    steps: int,
    momentum: float = 0.9,
    weight_decay: float = 0.0,
    progress: Callable[[int], None] | None = None,
) -> Tensor:
    """Train a layer for each learning rate, all in one pass: (r, k, d + 1).

    rows (n, d + 1), labels (n,), order: the rows of each of the `steps` batches; progress(done) follows each. The
    layers are one matrix of r k outputs, so the grid costs a few times what one of them does, not r times. The gradient
    of the mean cross-entropy is written out: softmax minus truth.
    """
    layers = rows.new_zeros(len(learning_rates) * classes, rows.shape[1])
    velocity = torch.zeros_like(layers)
    rates = layers.new_tensor(learning_rates).repeat_interleave(classes)[:, None]
    for step, batch in enumerate(order):
        x, y = rows[batch], labels[batch]
        error = (layers @ x.T).unflatten(0, (-1, classes)).softmax(1)
        error[:, y, torch.arange(len(x), device=x.device)] -= 1
        velocity.mul_(momentum).add_(layers, alpha=weight_decay)
        velocity.addmm_(error.flatten(0, 1), x, alpha=1 / len(x))
        layers.addcmul_(velocity, rates, value=-(1 + math.cos(math.pi * step / steps)) / 2)
        if progress:
            progress(step + 1)
    return layers.unflatten(0, (-1, classes))


class Fit(NamedTuple):
    """A layer (k, d + 1), and whether it is the optimum, reached before the iterations ran out."""

    layer: Tensor
    converged: bool


def moment(rows: Tensor) -> Tensor:
    """The mean of x x' over rows (n, d + 1): (d + 1, d + 1) float64."""
    gram = rows.new_zeros(rows.shape[1], rows.shape[1], dtype=torch.float64)
    for x in rows.split(_CHUNK):
        x = x.double()
        gram.addmm_(x.T, x)
    return gram / len(rows)


def fit(
    rows: Tensor,
    labels: Tensor,
    *,
    moment: Tensor,
    classes: int,
    l2: float,
    start: Tensor | None = None,
    iterations: int = 500,
) -> Fit:
    """The layer that minimises the mean cross-entropy + l2 / 2 |weights|^2; the bias is not among the weights.

    rows (n, d + 1), labels (n,), start: a layer near the optimum. L-BFGS works in variables in which the curvature is
    about the identity: an encoder's features are so correlated that it would else need thousands of iterations in place
    of tens. Any change of variables leads to the same optimum, so the moment need only be near the rows' own.
    """
    start = rows.new_zeros(classes, rows.shape[1]) if start is None else start
    # The second derivative by one class's weights is the mean of p (1 - p) x x'; this is the product of the means.
    curvature = moment * _doubt(start, rows)
    # The first sum keeps it positive definite in float64 where the features are large and the penalty is small.
    curvature.diagonal().add_(1e-12 * curvature.trace())
    curvature.diagonal()[:-1].add_(l2)
    root = torch.linalg.cholesky(curvature)
    inverse = torch.linalg.solve_triangular(root, torch.eye(len(root)).to(root), upper=False).to(rows.dtype)
    variables = start @ root.to(rows.dtype)

    def closure() -> float:
        objective, gradient = _objective(variables @ inverse, rows, labels, l2)
        variables.grad = gradient @ inverse.T
        return objective

    optimizer = torch.optim.LBFGS(
        [variables],
        max_iter=iterations,
        max_eval=2 * iterations,
        tolerance_grad=_GRADIENT,
        tolerance_change=_CHANGE,
        history_size=10,
        line_search_fn="strong_wolfe",
    )
    optimizer.step(closure)
    state = optimizer.state[variables]
    layer = variables @ inverse
    is_within = state["n_iter"] < iterations and state["func_evals"] < 2 * iterations
    return Fit(layer, is_within and bool(layer.isfinite().all()))


def _doubt(layer: Tensor, rows: Tensor) -> float:
    """The mean of p (1 - p) over rows and classes; no less than a hundredth of what it is where all are as likely, so
    that a start that is wrongly sure still moves.
    """
    k = len(layer)
    doubt = sum((1 - (layer @ x.T).softmax(0).square().sum(0)).sum(dtype=torch.float64) for x in rows.split(_CHUNK))
    return max(doubt.item() / len(rows) / k, 0.01 * (k - 1) / k**2)


def _objective(layer: Tensor, rows: Tensor, labels: Tensor, l2: float) -> tuple[float, Tensor]:
    """What is minimised, and its gradient (k, d + 1)."""
    gradient = torch.zeros_like(layer)
    loss = layer.new_zeros((), dtype=torch.float64)
    for x, y in zip(rows.split(_CHUNK), labels.split(_CHUNK), strict=True):
        likelihood = (layer @ x.T).log_softmax(0)
        loss -= likelihood.gather(0, y[None]).sum(dtype=torch.float64)
        error = likelihood.exp_()
        error[y, torch.arange(len(x), device=x.device)] -= 1
        gradient.addmm_(error, x, alpha=1 / len(rows))
    weights = layer[:, :-1]
    gradient[:, :-1].add_(weights, alpha=l2)
    return (loss / len(rows) + l2 / 2 * weights.double().square().sum()).item(), gradient


def score(layers: Tensor, rows: Tensor, labels: Tensor) -> tuple[list[float], list[float]]:
    """Accuracy and mean cross-entropy of each layer: layers (r, k, d + 1), rows (n, d + 1), labels (n,) -> r of each.

    An answer that is not finite is wrong, and the loss of a layer that gives one is infinite.
    """
    right = labels.new_zeros(len(layers))
    loss = rows.new_zeros(len(layers), dtype=torch.float64)
    for x, y in zip(rows.split(_CHUNK), labels.split(_CHUNK), strict=True):
        logits = (layers.flatten(0, 1) @ x.T).unflatten(0, layers.shape[:2])
        right += ((logits.argmax(1) == y) & logits.isfinite().all(1)).sum(1)
        loss += F.cross_entropy(logits, y.expand(len(layers), -1), reduction="none").sum(1, dtype=torch.float64)
    losses = (loss / len(rows)).nan_to_num(nan=math.inf, posinf=math.inf)
    return (right.double() / len(rows)).tolist(), losses.tolist()


def _best(accuracies: Sequence[float], losses: Sequence[float]) -> int:
    """The place of the highest accuracy; of equals, of the least loss; of these, the first."""
    return max(range(len(losses)), key=lambda place: (accuracies[place], -losses[place]))


def _checked(
    train: Mapping[str, Tensor],
    train_labels: Tensor | None,
    test: Mapping[str, Tensor],
    test_labels: Tensor | None,
    classes: int,
    names: Sequence[str],
) -> tuple[Tensor, Tensor]:
    """The labels. UserError unless they and the features can be."""
    whole("classes", classes, 2)
    if train.keys() != test.keys() or not train:
        raise ValueError(f"feature sets to train on {list(train)}, to test on {list(test)}")
    check_labels(train_labels, test_labels, classes, names)
    for which, features, labels in (("training", train, train_labels), ("test", test, test_labels)):
        for name, values in features.items():
            if len(values) != len(labels):
                raise UserError(f"{name}: {len(labels)} labels for the features of {len(values)} {which} images")
            if values.shape[1] != (width := train[name].shape[1]):
                raise UserError(f"{name}: training features have width {width}, but test features {values.shape[1]}")
            if not all(bound.isfinite() for bound in torch.aminmax(values)):
                raise UserError(f"{name}: some features of {which} images are not finite")
    return train_labels.cpu(), test_labels.cpu()
