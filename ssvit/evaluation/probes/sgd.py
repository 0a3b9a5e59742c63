"""A linear layer on frozen features by SGD: a grid of learning rates at once, as DINOv2 does (Oquab et al. 2023).

Letters: n images, d width, k classes, r learning rates.
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
    """A linear layer for each learning rate, trained by SGD on the same batches, from zero: see `sgd_options.Sgd`."""

    name: ClassVar[str] = "sgd"

    @torch.no_grad()
    def __call__(self, train: Features, test: Features, *, choose: bool = False) -> Result:
        """Columns for the accuracy on the images trained on, on those held out of them, and on the test images."""
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
    """Places of `count` images in batches whose sizes differ by one at most: each image once an epoch, in its order."""
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
    """Train a layer for each learning rate, all in one pass: (r, k, d + 1).

    rows (n, d + 1), labels (n,), order: the rows of each of the `steps` batches. The layers are one matrix of r k
    outputs, so the grid costs a few times what one of them does. The gradient is softmax minus truth, or for labels
    (n, k) bool sigmoid minus truth.
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
