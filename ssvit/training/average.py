"""A moving average of the weights (Polyak), kept beside a model and put in its place where it is wanted.

It holds what this process holds of each parameter, so it is spread over processes as the model is.
"""

import contextlib
from collections.abc import Iterator

import torch
from torch import nn


class Average:
    """average = momentum * average + (1 - momentum) * weights after each step; it starts as the weights are."""

    def __init__(self, model: nn.Module, momentum: float) -> None:
        self.momentum = momentum
        self._weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._average = [weight.detach().clone() for weight in self._weights]

    @torch.no_grad()
    def follow(self) -> None:
        """Take one step after the weights."""
        torch._foreach_lerp_(self._average, [weight.detach() for weight in self._weights], 1 - self.momentum)

    @torch.no_grad()
    def take(self) -> None:
        """Make the weights as they are now the average."""
        torch._foreach_copy_(self._average, [weight.detach() for weight in self._weights])

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """While the block runs, the model has the averaged weights; then it has its own back, bit for bit."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for weight, average in zip(self._weights, self._average, strict=True):
            own = weight.detach().clone()
            weight.detach().copy_(average)
            average.copy_(own)
