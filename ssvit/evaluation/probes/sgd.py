"""Train linear probes by SGD for a grid of learning rates together, as in DINOv2 (Oquab et al. 2023).

Shapes use n images, d width, k classes, r learning rates.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from ssvit.evaluation.features import Features
from ssvit.evaluation.probes import sgd_options
from ssvit.evaluation.probes.linear import Classifiers, Linear, logits_of, losses
from ssvit.evaluation.probes.scaler import Scaler
from ssvit.randomness import permutation


class Sgd(sgd_options.Sgd, Linear):
    """Train a linear layer for each learning rate by SGD on the same batches, initialised at zero."""

    name: ClassVar[str] = "sgd"

    def train(self, train: Features, rows: Tensor) -> Classifiers:
        """Train a layer for each learning rate on the images at `rows`."""
        scaler = Scaler.of_features(train.values[rows], self.standardize)
        order = batches(len(rows), batch_size=self.batch_size, epochs=self.epochs, seed=self.seed)
        layers = descend(
            scaler(train.values),
            train.known_labels,
            map(rows.__getitem__, order),
            classes=len(train.classes),
            learning_rates=self.learning_rates,
            steps=self.epochs * math.ceil(len(rows) / self.batch_size),
            momentum=self.momentum,
            weight_decay=self.weight_decay,
        )
        settings = [{"learning_rate": rate} for rate in self.learning_rates]
        return Classifiers(settings, partial(logits_of, scaler, layers), {})


def batches(count: int, *, batch_size: int, epochs: int, seed: int) -> Iterator[Tensor]:
    """Yield batches of indices in a random order for each epoch; batch sizes differ by at most one.

    Args:
        count: Number of images.
        batch_size: Maximum batch size.
        epochs: Number of epochs.
        seed: Seed of the orders.
    """
    for epoch in range(epochs):
        order = permutation(seed, f"linear probe, order of epoch {epoch}", count)
        yield from order.tensor_split(math.ceil(count / batch_size))


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
) -> Tensor:
    """Train a layer for each learning rate in one pass by SGD with momentum and a cosine decay to 0.

    The layers form one matrix of r k outputs, so that the grid costs a few times as much as one layer.

    Args:
        rows: Features ending in a 1, (n, d + 1).
        labels: Class numbers, (n,), or multi-label targets, (n, k) bool.
        order: Row indices of each batch.
        classes: Number of classes.
        learning_rates: Initial learning rates.
        steps: Number of batches.
        momentum: Momentum in [0, 1).
        weight_decay: Weight decay of weights and biases.

    Returns:
        The layers, (r, k, d + 1).
    """
    layers = rows.new_zeros(len(learning_rates) * classes, rows.shape[1])
    velocity = torch.zeros_like(layers)
    rates = layers.new_tensor(learning_rates).repeat_interleave(classes)[:, None]
    for step, batch in enumerate(order):
        x = rows[batch]
        with torch.enable_grad():
            logits = (layers @ x.T).unflatten(0, (-1, classes)).requires_grad_()
            # Losses are summed over the layers, so that the gradient of each does not depend on the size of the grid.
            (error,) = torch.autograd.grad(losses(logits, labels[batch]).sum() / len(x), logits)
        velocity.mul_(momentum).add_(layers, alpha=weight_decay).addmm_(error.flatten(0, 1), x)
        layers.addcmul_(velocity, rates, value=-(1 + math.cos(math.pi * step / steps)) / 2)
    return layers.unflatten(0, (-1, classes))
