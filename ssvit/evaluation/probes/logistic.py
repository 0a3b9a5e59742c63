"""Fit penalised logistic regression to frozen features until convergence.

Shapes use n images, d width, k classes.
"""

from functools import partial
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ssvit.data.sources.base import is_multi_label
from ssvit.evaluation.features import Features
from ssvit.evaluation.probes import logistic_options
from ssvit.evaluation.probes.base import Result
from ssvit.evaluation.probes.linear import CHUNK, Linear, best, logits_of, result, score
from ssvit.evaluation.probes.standard import Standard

_GRADIENT = 1e-6  # L-BFGS has converged where no element of the gradient is larger,
_CHANGE = 1e-10  # or where the loss falls by less in one iteration


class Logistic(logistic_options.Logistic, Linear):
    """Fit multinomial logistic regression by full-batch L-BFGS: mean cross-entropy + l2 / 2 |weights|^2.

    Each fit starts from that of the next larger penalty. The chosen penalty is refitted on all training images.
    """

    name: ClassVar[str] = "logistic"

    @torch.no_grad()
    def __call__(self, train: Features, test: Features, *, choose: bool = False) -> Result:
        """Return the training, validation and test accuracy, one column for each.

        Training and test accuracy are those of the fit to all training images, validation accuracy that of the fit
        without the validation images.
        """
        trained, held_out = self.split(train, test)
        values, y = train.values, train.known_labels.to(train.values.device)
        l2s = sorted(map(float, self.l2s), reverse=True)

        standard = Standard.of(values[trained], self.standardize)
        rows = standard(values[trained])
        solve = partial(fit, moment=moment(rows), classes=len(train.classes), iterations=self.iterations)
        fits: list[LogisticFit] = []
        for l2 in l2s:
            fits.append(solve(rows, y[trained], l2=l2, start=fits[-1].layer if fits else None))
        layers = torch.stack([one.layer for one in fits])
        validated = score(logits_of(layers, standard(values[held_out])), y[held_out])
        chosen = best(validated)

        standard = Standard.of(values, self.standardize)
        rows, tested = standard(values), standard(test.values)
        last = solve(rows, y, l2=l2s[chosen], start=fits[chosen].layer)
        on_train = score(logits_of(last.layer[None], rows), y)
        on_test = score(logits_of(last.layer[None], tested), test.known_labels.to(rows.device))
        converged = all(one.converged for one in [*fits, last])
        numbers = {"l2": l2s[chosen], "l2s": l2s, "grid": validated.accuracies, "converged": converged}
        predictions = None
        if not is_multi_label(y):
            predictions = torch.cat([logits[0].argmax(0) for logits in logits_of(last.layer[None], tested)])
        return result(on_train, validated, on_test, chosen, held_out, numbers, predictions)


class LogisticFit(NamedTuple):
    """Store a layer (k, d + 1), and whether L-BFGS converged within the iteration limit."""

    layer: Tensor
    converged: bool


def moment(rows: Tensor) -> Tensor:
    """Return the mean of x x' over rows (n, d + 1): (d + 1, d + 1) float64."""
    gram = rows.new_zeros(rows.shape[1], rows.shape[1], dtype=torch.float64)
    for x in rows.split(CHUNK):
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
) -> LogisticFit:
    """Fit a layer that minimises the mean cross-entropy + l2 / 2 |weights|^2; the bias is not penalised.

    L-BFGS runs in preconditioned variables, in which the Hessian is close to the identity: the correlated features of
    an encoder would otherwise need thousands of iterations instead of tens. The moment is used for preconditioning
    only, so an approximation suffices.

    Args:
        rows: Features ending in a 1, (n, d + 1).
        labels: Class numbers, (n,), soft labels, (n, k) float, or multi-label targets, (n, k) bool, for which the
            binary cross-entropy is summed over the classes.
        moment: Second moment of the rows, see `moment`.
        classes: Number of classes, k.
        l2: Penalty.
        start: Initial layer, (k, d + 1); None for zeros.
        iterations: Maximum number of iterations.
    """
    start = rows.new_zeros(classes, rows.shape[1]) if start is None else start
    # The Hessian of one class's weights is the mean of p (1 - p) x x', approximated here by the product of the means.
    curvature = moment * _variance(start, rows, labels.dtype == torch.bool)
    # The first term keeps the matrix positive definite in float64 for large features and a small penalty.
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
    return LogisticFit(layer, is_within and bool(layer.isfinite().all()))


def _variance(layer: Tensor, rows: Tensor, binary: bool) -> float:
    """Return the mean of p (1 - p) over rows and classes, at least 1 % of its value for uniform p.

    The lower bound keeps a confident but wrong initial layer from stalling.
    """
    k = len(layer)
    if binary:
        shares = ((layer @ x.T).sigmoid() for x in rows.split(CHUNK))
        return max(sum((p * (1 - p)).sum(dtype=torch.float64).item() for p in shares) / len(rows) / k, 0.01 / 4)
    sums = ((1 - (layer @ x.T).softmax(0).square().sum(0)).sum(dtype=torch.float64) for x in rows.split(CHUNK))
    return max(sum(sums).item() / len(rows) / k, 0.01 * (k - 1) / k**2)


def _objective(layer: Tensor, rows: Tensor, labels: Tensor, l2: float) -> tuple[float, Tensor]:
    """Return the objective and its gradient (k, d + 1)."""
    gradient = torch.zeros_like(layer)
    loss = layer.new_zeros((), dtype=torch.float64)
    for x, y in zip(rows.split(CHUNK), labels.split(CHUNK), strict=True):
        if y.dtype == torch.bool:
            logits, truth = layer @ x.T, y.T.to(x.dtype)
            loss += F.binary_cross_entropy_with_logits(logits, truth, reduction="none").sum(dtype=torch.float64)
            gradient.addmm_(logits.sigmoid_().sub_(truth), x, alpha=1 / len(rows))
            continue
        likelihood = (layer @ x.T).log_softmax(0)
        if y.ndim == 2:
            loss -= (likelihood * y.T).sum(dtype=torch.float64)
            error = likelihood.exp_().sub_(y.T)
        else:
            loss -= likelihood.gather(0, y[None]).sum(dtype=torch.float64)
            error = likelihood.exp_()
            error[y, torch.arange(len(x), device=x.device)] -= 1
        gradient.addmm_(error, x, alpha=1 / len(rows))
    weights = layer[:, :-1]
    gradient[:, :-1].add_(weights, alpha=l2)
    return (loss / len(rows) + l2 / 2 * weights.double().square().sum()).item(), gradient
