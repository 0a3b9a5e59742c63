"""Statistics of accuracies: above chance, still rising, significantly different. No torch; scipy is imported when used.

Paired functions take values of the same test images, such as 1 for a correct prediction and 0 for a wrong one: what is
hard about an image cancels in the difference of two encoders.

Letters: e encoders, m test images, s seeds.
"""

import math
import statistics
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np

NOTHING_YET = "above chance by two standard errors, so this tells nothing yet"
"""What is written where nothing is above chance, after "not" or "neither is"."""
LEVEL, POWER = 0.95, 0.8  # of intervals, and of the smallest difference that counts as detectable
_POINTS, _RISES = 5, 0.05  # fewest points of a curve, and the level of its test
_RESAMPLES, _HELD = 2000, 50  # of the bootstrap, and of these at a time


class Interval(NamedTuple):
    """From `low` to `high`."""

    low: float
    high: float

    @property
    def sign(self) -> int:
        """1 if all of it is above zero, -1 if all of it is below, 0 if it contains zero."""
        return (self.low > 0) - (self.high < 0)


def chance(labels: Iterable[int]) -> float:
    """Return the accuracy of the best model that ignores the image: the share of the most frequent class, or NaN."""
    counts = Counter(labels)
    return max(counts.values()) / counts.total() if counts else math.nan


def standard_error(accuracy: float, images: float) -> float:
    """Return that of an accuracy measured on so many independent images (binomial)."""
    return math.sqrt(accuracy * (1 - accuracy) / images)


def above_chance(accuracy: float, chance: float, images: float) -> bool:
    """Return whether an accuracy on so many images is above chance by more than two standard errors of chance.

    With the continuity correction of half an image, a model that ignores the image passes in at most 4 % of cases.
    """
    return accuracy - 0.5 / images - chance > 2 * standard_error(chance, images)


def chance_of_rise(values: Sequence[float]) -> float:
    """Return the probability that as many pairs of values, or more, would rise in a random order (Mann 1945).

    Exact; of two equal values the later one counts as lower.
    """
    fallen = sum(later <= earlier for earlier, later in combinations(values, 2))
    orders = [1]  # of 1, 2, … values: how many orders have 0, 1, 2, … pairs that fall
    for count in range(2, len(values) + 1):
        orders = [sum(orders[max(0, pairs - count + 1) : pairs + 1]) for pairs in range(len(orders) + count - 1)]
    return sum(orders[: fallen + 1]) / math.factorial(len(values))


def last_rise(steps: Sequence[int], values: Sequence[float]) -> int | None:
    """Return the step since which a curve has not risen; its last one if it still rises in its second half (5 % level).

    That is where it first came within a standard deviation of the mean of that half. None if the half has fewer than
    five points.
    """
    half = values[len(values) // 2 :]
    if len(half) < _POINTS:
        return None
    if chance_of_rise(half) < _RISES:
        return steps[-1]
    reached = statistics.fmean(half) - statistics.stdev(half)
    return next(step for step, value in zip(steps, values, strict=True) if value >= reached)


def bootstrap(values: "np.ndarray") -> list[Interval]:
    """Return the interval of each row's mean over resampled images, the same for all rows: (e, m) -> e intervals.

    The percentile interval (Efron, Tibshirani 1993, chapter 13). The same values give the same interval.
    """
    import numpy as np
    from scipy import stats

    interval = stats.bootstrap(
        (values,), np.mean, n_resamples=_RESAMPLES, batch=_HELD, vectorized=True, axis=1, confidence_level=LEVEL,
        method="percentile", rng=np.random.default_rng(0),
    ).confidence_interval  # fmt: skip
    return [Interval(float(low), float(high)) for low, high in zip(interval.low, interval.high, strict=True)]


def mcnemar(first: "np.ndarray", second: "np.ndarray") -> float | None:
    """Return the exact p of McNemar's test that two classifiers (m,) are equally accurate.

    None unless all values are 0 or 1. Recommended for classifiers that are trained once (Dietterich 1998).
    """
    from scipy import stats

    if any(value not in (0, 1) for values in (first, second) for value in values.tolist()):
        return None
    better, worse = int((first > second).sum()), int((first < second).sum())
    return float(stats.binomtest(better, better + worse).pvalue) if better + worse else 1.0


def of_seeds(first: Sequence[float], second: Sequence[float]) -> Interval | None:
    """Return the interval of the difference of means over seeds, by Student's t with Welch's degrees of freedom.

    A side of one seed counts as exact; None if both have one.
    """
    import numpy as np
    from scipy import stats

    if max(len(first), len(second)) < 2:
        return None
    ours, theirs = np.asarray(first), np.asarray(second)
    if np.ptp(ours) == np.ptp(theirs) == 0:
        difference = float(ours[0] - theirs[0])
        return Interval(difference, difference)
    with warnings.catch_warnings(action="ignore", category=RuntimeWarning):  # of a side whose seeds are all alike
        if min(len(ours), len(theirs)) > 1:
            interval = stats.ttest_ind(ours, theirs, equal_var=False).confidence_interval(LEVEL)
        else:
            interval = stats.ttest_1samp(ours - theirs, 0).confidence_interval(LEVEL)
    return Interval(float(interval.low), float(interval.high))


def detectable(differences: "np.ndarray") -> float:
    """Return the least mean difference that as many images show with `POWER` (Cohen 1988, section 2.4): (m,)."""
    errors = statistics.NormalDist().inv_cdf((1 + LEVEL) / 2) + statistics.NormalDist().inv_cdf(POWER)
    return errors * float(differences.std(ddof=1)) / math.sqrt(len(differences)) if len(differences) > 1 else math.inf


def needed(differences: "np.ndarray") -> float:
    """Return how many images like these would show their mean difference with `POWER`; infinite for none: (m,)."""
    mean = abs(float(differences.mean()))
    return (detectable(differences) / mean) ** 2 * len(differences) if mean else math.inf
