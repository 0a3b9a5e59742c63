"""Standardise features by mean and standard deviation.

Shapes use m, n images, d width.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Scaler(NamedTuple):
    """Map features by statistics (d,): (features - mean) * scale."""

    mean: Tensor
    scale: Tensor

    @classmethod
    def of_features(cls, features: Tensor, standardize: bool) -> "Scaler":
        """Compute the statistics of features (n, d).

        If `standardize` is false, features are left unchanged. The scale of features that vary by rounding errors only
        is 0.
        """
        if not standardize:
            return cls(features.new_zeros(features.shape[1]), features.new_ones(features.shape[1]))
        deviation, mean = torch.std_mean(features, dim=0, correction=0)
        varies = deviation > 8 * torch.finfo(features.dtype).eps * mean.abs()
        return cls(mean, torch.where(varies, 1 / deviation, 0))

    def scaled(self, features: Tensor) -> Tensor:
        """Return (features - mean) * scale: (..., d) -> (..., d)."""
        return (features - self.mean) * self.scale

    def __call__(self, features: Tensor) -> Tensor:
        """Return standardised rows with a final 1, which the bias multiplies: (..., d) -> (..., d + 1)."""
        return F.pad(self.scaled(features), (0, 1), value=1)


def standardized(queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Standardise queries (m, d) and keys (n, d) by the statistics of the keys."""
    scaler = Scaler.of_features(keys, standardize=True)
    return scaler.scaled(queries), scaler.scaled(keys)
