"""Fit penalised logistic regression to frozen features until convergence.

Shapes use n images, d width, k classes.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from ssvit.evaluation.features import Features
from ssvit.evaluation.probes import logistic_options
from ssvit.evaluation.probes.linear import CHUNK, Classifiers, Linear, logits_of, losses
from ssvit.evaluation.probes.scaler import Scaler

_GRADIENT = 1e-6  # L-BFGS has converged where no element of the gradient is larger,
_CHANGE = 1e-10  # or where the loss falls by less in one iteration


class Logistic(logistic_options.Logistic, Linear):
    """Fit multinomial logistic regression by full-batch L-BFGS: mean cross-entropy + l2 / 2 |weights|^2.

    Each fit starts from the solution of the next larger penalty. The chosen one is refitted on all training images.
    """

    name: ClassVar[str] = "logistic"

    def train(self, train: Features, rows: Tensor) -> Classifiers:
        """Fit a layer for each penalty, the largest first, to the images at `rows`."""
        l2s = sorted(self.l2s, reverse=True)
        scaler = Scaler.of_features(train.values[rows], self.standardize)
        features, labels = scaler(train.values[rows]), train.known_labels[rows]
        start = features.new_zeros(len(train.classes), features.shape[1])
        layers, converged = fit(features, labels, l2s, start, self.iterations)
        settings = [{"l2": l2} for l2 in l2s]
        return Classifiers(settings, partial(logits_of, scaler, layers), {"converged": converged})

    def of_setting(self, setting: Mapping[str, float]) -> "Logistic":
        """Return the probe of the chosen penalty, see `Linear.of_setting`."""
        return self.changed(l2s=[setting["l2"]])


def fit(
    rows: Tensor, labels: Tensor, l2s: Sequence[float], start: Tensor, iterations: int = 500
) -> tuple[Tensor, bool]:
    """Fit a layer for each penalty that minimises the mean cross-entropy + l2 / 2 |weights|^2 without the bias.

    Args:
        rows: Features ending in a 1, (n, d + 1).
        labels: Class numbers, (n,), soft labels, (n, k) float, or multi-label targets, (n, k) bool, for which the
            binary cross-entropy is summed over the classes.
        l2s: Penalties. Each fit but the first starts from the solution of the one before.
        start: Initial layer of the first fit, (k, d + 1).
        iterations: Maximum number of iterations of each fit.

    Returns:
        The layers, (r, k, d + 1), and whether all fits converged within the iteration limit.
    """
    gram = rows.new_zeros(rows.shape[1], rows.shape[1], dtype=torch.float64)
    for x in rows.split(CHUNK):
        x = x.double()
        gram.addmm_(x.T, x)
    moment = gram / len(rows)
    layers, converged = [start], []
    for l2 in l2s:
        layer, is_converged = _fit(rows, labels, moment, l2, layers[-1], iterations)
        layers.append(layer)
        converged.append(is_converged)
    return torch.stack(layers[1:]), all(converged)


def _fit(
    rows: Tensor, labels: Tensor, moment: Tensor, l2: float, start: Tensor, iterations: int
) -> tuple[Tensor, bool]:
    """Fit a layer by L-BFGS in preconditioned variables, in which the Hessian is close to the identity.

    The correlated features of an encoder would otherwise need thousands of iterations instead of tens. The second
    moment of the rows, (d + 1, d + 1) float64, is used for preconditioning only.
    """
    # The Hessian of one class's weights is the mean of p (1 - p) x x', approximated here for p = 1 / k.
    share = 0.5 if labels.dtype == torch.bool else 1 / len(start)
    curvature = moment * share * (1 - share)
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
    return layer, is_within and bool(layer.isfinite().all())


def _objective(layer: Tensor, rows: Tensor, labels: Tensor, l2: float) -> tuple[float, Tensor]:
    """Return the objective and its gradient (k, d + 1)."""
    layer = layer.detach().requires_grad_()
    objective = 0.0
    with torch.enable_grad():
        for x, y in zip(rows.split(CHUNK), labels.split(CHUNK), strict=True):
            loss = losses((layer @ x.T)[None], y).sum(dtype=torch.float64) / len(rows)
            loss.backward()
            objective += loss.item()
        penalty = l2 / 2 * layer[:, :-1].double().square().sum()
        penalty.backward()
    assert layer.grad is not None
    return objective + penalty.item(), layer.grad
