"""Compute statistics of accuracies: comparison with chance, trends, and significance of differences.

Paired functions take values for the same test images, such as 1 for a correct and 0 for a wrong prediction, so that the
difficulty of an image cancels in the difference. This module does not import torch, and imports scipy when used.

Shapes use e encoders, m test images, s seeds.
"""

import math
import statistics
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np

NOT_ABOVE_CHANCE = "not significantly above chance"
"""Verdict on an accuracy for which `above_chance` is false."""
LEVEL, POWER = 0.95, 0.8  # confidence level of intervals, and power of the detectable difference
_POINTS, _RISES = 5, 0.05  # minimum number of points of a curve, and significance level of its test
_ROUNDING = 1e-9  # of the mean of equal values
_RESAMPLES, _HELD = 2000, 50  # bootstrap resamples, and the batch in which they are computed


class Interval(NamedTuple):
    """Store a confidence interval from `low` to `high`."""

    low: float
    high: float

    @property
    def sign(self) -> int:
        """Return 1 if the interval is above zero, -1 if it is below, 0 if it contains zero."""
        return (self.low > 0) - (self.high < 0)

    @classmethod
    def around(cls, difference: float, error: float = 0.0) -> "Interval":
        """Return the interval of a difference with a half-width, which is 0 if the uncertainty is unknown."""
        return cls(difference - error, difference + error)


def verdict(difference: Interval, *, tested: bool = True) -> str:
    """Return one of three answers to whether a result is better than another, such as "significantly better than".

    Args:
        difference: Interval of the difference, positive if the first result is better.
        tested: Whether the interval accounts for the uncertainty of the difference.
    """
    same, significantly = ("not significantly different from", "significantly ") if tested else ("equal to", "")
    return (same, f"{significantly}better than", f"{significantly}worse than")[difference.sign]


def chance(labels: Iterable[int]) -> float:
    """Return the accuracy of the best model that ignores the image: the share of the most frequent class, or NaN."""
    counts = Counter(labels)
    return max(counts.values()) / counts.total() if counts else math.nan


def standard_error(accuracy: float, images: float) -> float:
    """Return the binomial standard error of an accuracy on a number of independent images."""
    return math.sqrt(accuracy * (1 - accuracy) / images)


def error_of_difference(first: tuple[float, float], second: tuple[float, float]) -> float:
    """Return the half-width of the 95 % interval of the difference of two accuracies on independent images.

    The interval contains that of Agresti and Caffo (2000), who add a correct and a wrong prediction to each side: the
    standard error alone would be 0 for accuracies of 0 and 1.

    Args:
        first: An accuracy and its number of images.
        second: The same of the other side.
    """
    adjusted = [((accuracy * images + 1) / (images + 2), images + 2) for accuracy, images in (first, second)]
    moved = abs((first[0] - second[0]) - (adjusted[0][0] - adjusted[1][0]))
    return 2 * math.hypot(*(standard_error(*side) for side in adjusted)) + moved


def of_accuracy(accuracy: float, images: int) -> Interval:
    """Return the 95 % interval of an accuracy on independent images (Wilson 1927)."""
    from scipy import stats

    interval = stats.binomtest(round(accuracy * images), images).proportion_ci(LEVEL, method="wilson")
    return Interval(float(interval.low), float(interval.high))


def above_chance(accuracy: float, chance: float | None, images: float | None) -> bool:
    """Return whether an accuracy exceeds chance by more than two standard errors of chance; True if one is unknown.

    With the continuity correction of half an image, the rate of false positives is at most 5 %.
    """
    if chance is None or images is None:
        return True
    return accuracy - 0.5 / images - chance > 2 * standard_error(chance, images)


def auroc(higher: Sequence[float], lower: Sequence[float]) -> float:
    """Return the probability that a score of the first group exceeds one of the second; a tie counts as one half."""
    from scipy.stats import mannwhitneyu

    return float(mannwhitneyu(higher, lower).statistic) / (len(higher) * len(lower))


def trend(steps: Sequence[int], values: Sequence[float]) -> tuple[int, int] | None:
    """Return whether the second half of a curve rises (1), falls (-1) or neither (0), and a step.

    A change is significant at the 5 % level of a Mann-Kendall test (Mann 1945), which is Kendall's test of the values
    against their order. The step is the last one of a rise, that of the highest value before a fall, or the start of a
    plateau, where the curve first comes within one standard deviation of the mean of its second half.

    Args:
        steps: Steps of the curve.
        values: Values of the curve.

    Returns:
        The trend and the step; None if the second half has fewer than five points.
    """
    half = values[len(values) // 2 :]
    if len(half) < _POINTS:
        return None
    from scipy import stats

    if stats.kendalltau(range(len(half)), half, alternative="greater").pvalue < _RISES:
        return 1, steps[-1]
    if stats.kendalltau(range(len(half)), half, alternative="less").pvalue < _RISES:
        return -1, steps[values.index(max(values))]
    mean, deviation = statistics.fmean(half), statistics.stdev(half) + _ROUNDING
    return 0, next(step for step, value in zip(steps, values, strict=True) if abs(value - mean) <= deviation)


def bootstrap(values: "np.ndarray", low: float, high: float) -> list[Interval]:
    """Return the percentile bootstrap interval of each row's mean over images: (e, m) -> e intervals.

    The resamples are the same for all rows and calls (Efron and Tibshirani 1993, chapter 13). If all values of a row
    are equal, its resamples do not vary. The interval then contains the means with the largest share of other values
    that is consistent with none among m images (Clopper and Pearson 1934).

    Args:
        values: Values in [low, high].
        low: The lowest possible value.
        high: The highest possible value.
    """
    import numpy as np
    from scipy import stats

    interval = stats.bootstrap(
        (values,), np.mean, n_resamples=_RESAMPLES, batch=_HELD, vectorized=True, axis=1, confidence_level=LEVEL,
        method="percentile", rng=np.random.default_rng(0),
    ).confidence_interval  # fmt: skip
    unseen = 1 - ((1 - LEVEL) / 2) ** (1 / values.shape[1])
    constant = np.ptp(values, axis=1) == 0
    lows = np.where(constant, values[:, 0] - unseen * (values[:, 0] - low), interval.low)
    highs = np.where(constant, values[:, 0] + unseen * (high - values[:, 0]), interval.high)
    return [Interval(*ends) for ends in zip(lows.tolist(), highs.tolist(), strict=True)]


def of_seeds(first: Sequence[float], second: Sequence[float] | None = None) -> Interval | None:
    """Return the confidence interval of a mean over seeds by Student's t, or of a difference of means by Welch's test.

    A side with a single seed is taken to vary as much as the other side.

    Args:
        first: Value for each seed.
        second: Value for each seed, subtracted from the first; None for the interval of the first mean.

    Returns:
        The interval; None if no side has several seeds.
    """
    import numpy as np
    from scipy import stats

    ours, theirs = np.asarray(first), np.asarray([0.0] if second is None else second)
    fewest, most = sorted((ours, theirs), key=len)
    if len(most) < 2:
        return None
    difference = float(ours.mean() - theirs.mean())
    if np.ptp(ours) == np.ptp(theirs) == 0:
        return Interval.around(difference)
    if len(fewest) == 1:
        scale = math.sqrt((second is not None) + 1 / len(most)) * float(most.std(ddof=1))
        return Interval.around(difference, scale * float(stats.t.ppf((1 + LEVEL) / 2, len(most) - 1)))
    with warnings.catch_warnings(action="ignore", category=RuntimeWarning):  # for equal values of one side
        interval = stats.ttest_ind(ours, theirs, equal_var=False).confidence_interval(LEVEL)
    return Interval(float(interval.low), float(interval.high))


def another_seed(values: Sequence[float], like: Sequence[float] = ()) -> Interval | None:
    """Return the 95 % prediction interval of the result of one more seed, from normally distributed results.

    Args:
        values: Results of at least one seed.
        like: Results whose spread is that of another seed, such as those of earlier seeds with the same options; none
            for the spread of `values`.

    Returns:
        The interval; None if fewer than two results have the spread.
    """
    spread = like or values
    if len(spread) < 2:
        return None
    from scipy import stats

    scale = statistics.stdev(spread) * math.sqrt(1 + 1 / len(values))
    error = float(stats.t.ppf((1 + LEVEL) / 2, len(spread) - 1)) * scale
    return Interval.around(statistics.fmean(values), error)


def detectable(differences: "np.ndarray") -> float:
    """Return the smallest mean difference that a test on as many images detects with power `POWER`: (m,).

    Source: Cohen 1988, section 2.4.
    """
    errors = statistics.NormalDist().inv_cdf((1 + LEVEL) / 2) + statistics.NormalDist().inv_cdf(POWER)
    return errors * float(differences.std(ddof=1)) / math.sqrt(len(differences)) if len(differences) > 1 else math.inf
