"""Measure the calibration of predicted probabilities (Guo et al. 2017)."""

from typing import NamedTuple

import torch
from torch import Tensor

BINS = 15  # as in Guo et al.


class Calibration(NamedTuple):
    """Store predictions in bins of equal width of their probability, in ascending order; each column is (bins,).

    A bin contains its upper edge, and the first bin contains 0. Means of bins without predictions are NaN.
    """

    counts: Tensor  # number of predictions, int64
    probabilities: Tensor  # mean predicted probability, float64
    frequencies: Tensor  # share of the predictions that came true, float64

    @classmethod
    def of(cls, probability: Tensor, true: Tensor) -> "Calibration":
        """Return the bins of predictions.

        Args:
            probability: Predicted probabilities, (n,) float64.
            true: Whether each prediction came true, (n,) bool.
        """
        edges = torch.linspace(0, 1, BINS + 1, dtype=torch.float64)[1:-1]
        number = torch.bucketize(probability, edges)
        count = torch.bincount(number, minlength=BINS)
        sums = (torch.bincount(number, values, minlength=BINS) for values in (probability, true.double()))
        return cls(count, *(total / count for total in sums))

    @property
    def error(self) -> float:
        """Return the expected calibration error: the mean over predictions of |frequency - probability| of their bin.

        It is NaN if a probability is.
        """
        filled = self.counts > 0
        gaps = (self.frequencies - self.probabilities).abs() * self.counts
        return (gaps[filled].sum() / self.counts.sum()).item()
