"""Two encoders on the same test images: the difference, its interval, and whether there are images enough to tell it.

An image counts for both, so what is hard about it cancels in the difference. All functions take values of test images,
such as 1 where an image is right and 0 where not.

Letters: e encoders, m test images, s seeds.
"""

import math
import warnings
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

LEVEL, POWER = 0.95, 0.8  # of intervals, and of the smallest difference that is said to be seen
_RESAMPLES, _HELD = 2000, 50  # of the bootstrap, and of these at a time
# How many standard errors a difference has that a test at this level finds with this power (Cohen 1988, section 2.4).
_ERRORS = float(stats.norm.ppf((1 + LEVEL) / 2) + stats.norm.ppf(POWER))


class Interval(NamedTuple):
    """From `low` to `high`."""

    low: float
    high: float

    @property
    def sign(self) -> int:
        """1 if all of it is above zero, -1 if all of it is below, 0 if it holds zero."""
        return (self.low > 0) - (self.high < 0)


def bootstrap(values: np.ndarray) -> list[Interval]:
    """Of each row's mean, by resampled images, the same for all rows: (e, m) -> e intervals of `LEVEL`.

    The percentile interval (Efron, Tibshirani 1993, chapter 13). The same values give the same interval.
    """
    found = stats.bootstrap(
        (values,), np.mean, n_resamples=_RESAMPLES, batch=_HELD, vectorized=True, axis=1, confidence_level=LEVEL,
        method="percentile", rng=np.random.default_rng(0),
    ).confidence_interval  # fmt: skip
    return [Interval(float(low), float(high)) for low, high in zip(found.low, found.high, strict=True)]


def mcnemar(one: np.ndarray, other: np.ndarray) -> float | None:
    """The exact p of McNemar's test that two classifiers are right equally often; None unless all values are 0 or 1.

    Under that hypothesis, of the images that one alone is right on, each is as probably the other's: (m,), (m,).
    Recommended for classifiers that are trained once (Dietterich 1998).
    """
    if not all(np.isin(values, (0, 1)).all() for values in (one, other)):
        return None
    better, worse = int((one > other).sum()), int((one < other).sum())
    return float(stats.binomtest(better, better + worse).pvalue) if better + worse else 1.0


def of_seeds(one: Sequence[float], other: Sequence[float]) -> Interval | None:
    """Of the difference of means over seeds, Student's t with Welch's degrees of freedom; None without two of a side.

    A side of one seed is taken as exact: as if another seed of it made no difference.
    """
    if max(len(one), len(other)) < 2:
        return None
    ours, theirs = np.asarray(one), np.asarray(other)
    if np.ptp(ours) == np.ptp(theirs) == 0:
        difference = float(ours[0] - theirs[0])
        return Interval(difference, difference)
    with warnings.catch_warnings(action="ignore", category=RuntimeWarning):  # of a side whose seeds are all alike
        if min(len(ours), len(theirs)) > 1:
            found = stats.ttest_ind(ours, theirs, equal_var=False).confidence_interval(LEVEL)
        else:
            found = stats.ttest_1samp(ours - theirs, 0).confidence_interval(LEVEL)
    return Interval(float(found.low), float(found.high))


def detectable(differences: np.ndarray) -> float:
    """The least mean difference that as many images show with `POWER`: (m,) differences, image by image."""
    return _ERRORS * float(differences.std(ddof=1)) / math.sqrt(len(differences)) if len(differences) > 1 else math.inf


def needed(differences: np.ndarray) -> float:
    """How many images like these would show their mean difference with `POWER`; infinite for none: (m,)."""
    mean = abs(float(differences.mean()))
    return (detectable(differences) / mean) ** 2 * len(differences) if mean else math.inf
