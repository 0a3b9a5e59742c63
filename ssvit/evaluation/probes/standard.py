"""Features standardised by the mean and deviation of each number.

Letters: m, n images, d numbers of a feature.
"""

from typing import NamedTuple

import torch
from torch import Tensor


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

    def scaled(self, features: Tensor) -> Tensor:
        """(features - mean) * scale, (n, d) -> (n, d)."""
        return (features - self.mean) * self.scale

    def __call__(self, features: Tensor) -> Tensor:
        """(n, d) -> (n, d + 1)."""
        rows = features.new_ones(len(features), features.shape[1] + 1)
        torch.sub(features, self.mean, out=rows[:, :-1]).mul_(self.scale)
        return rows


def standardized(queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Both (m, d) and (n, d) by the mean and deviation of the keys."""
    standard = Standard.of(keys, standardize=True)
    return standard.scaled(queries), standard.scaled(keys)
