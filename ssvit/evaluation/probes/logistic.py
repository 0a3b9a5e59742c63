"""Fit penalised logistic regression to frozen features until convergence.

Shapes use n images, d width, k classes.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ssvit.evaluation.features import Features
from ssvit.evaluation.probes.linear import CHUNK, Classifiers, Linear, logits_of, losses
from ssvit.evaluation.probes.options import Logistic as LogisticOptions
from ssvit.evaluation.probes.scaler import Scaler

# L-BFGS has converged where no element of the gradient is larger than the tolerance, or where the loss falls by less
# than _CHANGE in one iteration.
_TOLERANCE, _CHANGE = 1e-6, 1e-10
_ROUGH = 1e-4  # tolerance of the fits that choose the penalty: the accuracy differs by less than 0.1 points


class Logistic(Linear):
    """Fit multinomial logistic regression by full-batch L-BFGS: mean cross-entropy + l2 / 2 |weights|^2.

    Each fit starts from the solution of the next larger penalty. The chosen one is refitted on all training images.
    """

    options: LogisticOptions
    name: ClassVar[str] = "logistic"

    def train(self, train: Features, rows: Tensor) -> Classifiers:
        """Fit a layer for each penalty, the largest first, to the images at `rows`."""
        l2s = sorted(self.options.l2s, reverse=True)
        curvature: Curvature | None = None

        def fitted(
            rows: Tensor, penalties: Sequence[float], tolerance: float, start: Tensor | None = None
        ) -> tuple[Tensor, Classifiers]:
            nonlocal curvature
            scaler = Scaler.of_features(train.values[rows], self.options.standardize)
            features, labels = scaler(train.values[rows]), train.known_labels[rows]
            curvature = curvature or Curvature.of(features)
            if start is None:
                start = features.new_zeros(len(train.classes), features.shape[1])
            layers, converged = fit(features, labels, penalties, start, self.options.iterations, tolerance, curvature)
            numbers = {"converged": converged}
            return layers, Classifiers([{"l2": l2} for l2 in penalties], partial(logits_of, scaler, layers), numbers)

        layers, classifiers = fitted(rows, l2s, _ROUGH)

        def refit(number: int) -> Classifiers:
            return fitted(torch.arange(len(train.values)), [l2s[number]], _TOLERANCE, layers[number])[1]

        return replace(classifiers, refit=refit)


class Curvature(NamedTuple):
    """Precondition fits by the eigenvalues (d,) and eigenvectors (d, d) of the covariance of features of mean (d,).

    Variables are layers of decorrelated features of mean 0. Divided by the square root of the eigenvalues, their
    Hessian is close to the identity. The correlated features of an encoder would otherwise need thousands of
    iterations instead of tens.
    """

    values: Tensor
    vectors: Tensor
    mean: Tensor

    @classmethod
    def of(cls, rows: Tensor) -> "Curvature":
        """Decompose the covariance of features ending in a 1, (n, d + 1)."""
        features = rows[:, :-1]
        mean = features.mean(0)
        covariance = mean.new_zeros(len(mean), len(mean))
        for x in features.split(CHUNK):
            x = x - mean
            covariance.addmm_(x.T, x, alpha=1 / len(rows))
        # In float32, the decomposition may fail to converge for fewer images than features.
        values, vectors = (part.to(mean.dtype) for part in torch.linalg.eigh(covariance.double()))
        return cls(values.clamp_min(0), vectors, mean)

    def variables(self, layer: Tensor) -> Tensor:
        """Return the variables (k, d + 1) of a layer (k, d + 1)."""
        weights, bias = layer[:, :-1], layer[:, -1:]
        return torch.cat([weights @ self.vectors, bias + weights @ self.mean[:, None]], 1)

    def layer(self, variables: Tensor) -> Tensor:
        """Return the layer (k, d + 1) of variables (k, d + 1)."""
        weights = variables[:, :-1] @ self.vectors.T
        return torch.cat([weights, variables[:, -1:] - weights @ self.mean[:, None]], 1)


def fit(
    rows: Tensor,
    labels: Tensor,
    l2s: Sequence[float],
    start: Tensor,
    iterations: int = 500,
    tolerance: float = _TOLERANCE,
    curvature: Curvature | None = None,
) -> tuple[Tensor, bool]:
    """Fit a layer for each penalty that minimises the mean cross-entropy + l2 / 2 |weights|^2 without the bias.

    Args:
        rows: Features ending in a 1, (n, d + 1).
        labels: Class numbers, (n,), soft labels, (n, k) float, or multi-label targets, (n, k) bool, for which the
            binary cross-entropy is summed over the classes.
        l2s: Penalties. Each fit but the first starts from the solution of the one before.
        start: Initial layer of the first fit, (k, d + 1).
        iterations: Maximum number of iterations of each fit.
        tolerance: Largest element of the gradient, in preconditioned variables, at which a fit ends.
        curvature: The curvature of similar rows, which affects the number of iterations only; None: of these rows.

    Returns:
        The layers, (r, k, d + 1), and whether all fits converged within the iteration limit.
    """
    curvature = curvature or Curvature.of(rows)
    layers, converged = [start], []
    for l2 in l2s:
        layer, is_converged = _fit(rows, labels, curvature, l2, layers[-1], iterations, tolerance)
        layers.append(layer)
        converged.append(is_converged)
    return torch.stack(layers[1:]), all(converged)


def _fit(
    rows: Tensor,
    labels: Tensor,
    curvature: Curvature,
    l2: float,
    start: Tensor,
    iterations: int,
    tolerance: float,
) -> tuple[Tensor, bool]:
    """Fit a layer by L-BFGS in preconditioned variables."""
    # The Hessian of one class's weights is the mean of p (1 - p) x x', approximated here for p = 1 / k.
    share = 0.5 if labels.dtype == torch.bool else 1 / len(start)
    values = curvature.values
    # The last term keeps the scale finite for a small penalty.
    diagonal = share * (1 - share) * values + l2 + torch.finfo(values.dtype).eps * values.max()
    scale = F.pad(diagonal, (0, 1), value=share * (1 - share)).rsqrt()
    variables = curvature.variables(start) / scale

    def closure() -> float:
        with torch.enable_grad():
            inputs = variables.detach().requires_grad_()
            layer = curvature.layer(inputs * scale)
        objective, gradient = _objective(layer, rows, labels, l2)
        (variables.grad,) = torch.autograd.grad(layer, inputs, gradient)
        return objective

    optimizer = torch.optim.LBFGS(
        [variables],
        max_iter=iterations,
        max_eval=2 * iterations,
        tolerance_grad=tolerance,
        tolerance_change=_CHANGE,
        history_size=10,
        line_search_fn="strong_wolfe",
    )
    optimizer.step(closure)
    state = optimizer.state[variables]
    layer = curvature.layer(variables * scale)
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
