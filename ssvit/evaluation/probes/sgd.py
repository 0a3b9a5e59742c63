"""Train linear probes by SGD for a grid of learning rates together, as in DINOv2 (Oquab et al. 2023).

Shapes use n images, d width, k classes, r learning rates.
"""

import math
from collections.abc import Iterator
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from ssvit.engine.randomness import permutation
from ssvit.evaluation.features import Features
from ssvit.evaluation.probes.linear import Classifiers, Linear, logits_of, losses
from ssvit.evaluation.probes.options import Sgd as SgdOptions
from ssvit.evaluation.probes.scaler import Scaler


class Sgd(Linear):
    """Train a linear layer for each learning rate by SGD on the same batches, initialised at zero."""

    options: SgdOptions
    name: ClassVar[str] = "sgd"

    def train(self, train: Features, rows: Tensor) -> Classifiers:
        """Train a layer for each learning rate in one pass over the images at `rows`, with a cosine decay to 0.

        The layers form one matrix of r k outputs, so that the grid costs a few times as much as one layer.
        """
        options = self.options
        scaler, classes = Scaler.of_features(train.values[rows], options.standardize), len(train.classes)
        features, labels = scaler(train.values), train.known_labels
        layers = features.new_zeros(len(options.learning_rates) * classes, features.shape[1])
        velocity = torch.zeros_like(layers)
        rates = layers.new_tensor(options.learning_rates).repeat_interleave(classes)[:, None]
        steps = options.epochs * math.ceil(len(rows) / options.batch_size)
        order = batches(len(rows), batch_size=options.batch_size, epochs=options.epochs, seed=options.seed)
        for step, batch in enumerate(order):
            chosen = rows[batch]
            x = features[chosen]
            with torch.enable_grad():
                logits = (layers @ x.T).unflatten(0, (-1, classes)).requires_grad_()
                # Losses are summed over the layers, so that the gradient of each does not depend on the grid's size.
                (error,) = torch.autograd.grad(losses(logits, labels[chosen]).sum() / len(x), logits)
            velocity.mul_(options.momentum).add_(layers, alpha=options.weight_decay).addmm_(error.flatten(0, 1), x)
            layers.addcmul_(velocity, rates, value=-(1 + math.cos(math.pi * step / steps)) / 2)
        settings = [{"learning_rate": rate} for rate in options.learning_rates]
        return Classifiers(settings, partial(logits_of, scaler, layers.unflatten(0, (-1, classes))), {})


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
