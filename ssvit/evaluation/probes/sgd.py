"""Train linear probes by SGD for a grid of learning rates together, as in DINOv2 (Oquab et al. 2023).

Shapes use n images, d width, k classes, r learning rates.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from ssvit.evaluation.features import Features
from ssvit.evaluation.probes import sgd_options
from ssvit.evaluation.probes.base import Result
from ssvit.evaluation.probes.linear import Linear, best, logits_of, result, score
from ssvit.evaluation.probes.standard import Standard
from ssvit.options import UserError
from ssvit.randomness import permutation


class Sgd(sgd_options.Sgd, Linear):
    """Train a linear layer for each learning rate by SGD on the same batches, initialised at zero."""

    name: ClassVar[str] = "sgd"

    @torch.no_grad()
    def __call__(self, train: Features, test: Features, *, choose: bool = False) -> Result:
        """Return the accuracy on the training, validation and test images, one column for each."""
        trained, held_out = self.split(train, test)
        y, rates = train.known_labels.to(train.values.device), tuple(map(float, self.learning_rates))
        standard = Standard.of(train.values[trained], self.standardize)
        rows = standard(train.values)
        order = batches(len(trained), batch_size=self.batch_size, epochs=self.epochs, seed=self.seed)
        layers = descend(
            rows,
            y,
            (trained[batch].to(rows.device) for batch in order),
            classes=len(train.classes),
            learning_rates=rates,
            steps=self.epochs * math.ceil(len(trained) / self.batch_size),
            momentum=self.momentum,
            weight_decay=self.weight_decay,
        )
        validated = score(logits_of(layers, rows[held_out]), y[held_out])
        chosen = best(validated)
        if validated.losses[chosen] == math.inf:
            raise UserError("no learning rate led to a finite loss: try smaller ones, or standardize=true")
        layer = layers[chosen, None]
        on_train = score(logits_of(layer, rows[trained]), y[trained])
        on_test = score(logits_of(layer, standard(test.values)), test.known_labels.to(layer.device))
        numbers = {"learning_rate": rates[chosen], "validation_grid": tuple(validated.accuracies)}
        return result(on_train, validated, on_test, chosen, held_out, numbers)


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
        x, y = rows[batch], labels[batch]
        logits = (layers @ x.T).unflatten(0, (-1, classes))
        if y.ndim == 2:
            error = logits.sigmoid() - y.T.to(x.dtype)
        else:
            error = logits.softmax(1)
            error[:, y, torch.arange(len(x), device=x.device)] -= 1
        velocity.mul_(momentum).add_(layers, alpha=weight_decay)
        velocity.addmm_(error.flatten(0, 1), x, alpha=1 / len(x))
        layers.addcmul_(velocity, rates, value=-(1 + math.cos(math.pi * step / steps)) / 2)
    return layers.unflatten(0, (-1, classes))
