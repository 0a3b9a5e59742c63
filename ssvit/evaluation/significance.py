"""Is an accuracy above chance, does it still rise? Standard library only."""

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import combinations

# What is said where nothing is above chance, after "not" or "neither is".
ENOUGH, LEVEL = 5, 0.05  # points of a curve, and the level of its test
NOTHING_YET = "above chance by two standard errors, so this tells nothing yet"


def chance(labels: Iterable[int]) -> float:
    """The accuracy of the best model that ignores the image: the share of the most frequent class. NaN of no labels."""
    counts = Counter(labels)
    return max(counts.values()) / counts.total() if counts else math.nan


def standard_error(accuracy: float, images: float) -> float:
    """Of an accuracy measured on so many independent images (binomial)."""
    return math.sqrt(accuracy * (1 - accuracy) / images)


def above_chance(accuracy: float, chance: float, images: float) -> bool:
    """Whether an accuracy on so many images is above chance by more than two standard errors of chance.

    With the continuity correction of half an image, a model that ignores the image passes in at most 4 % of cases.
    """
    return accuracy - 0.5 / images - chance > 2 * standard_error(chance, images)


def chance_of_rise(values: Sequence[float]) -> float:
    """The probability that as many pairs of values, or more, would rise if their order were random (Mann 1945).

    Exact; of two equal values the later one counts as lower.
    """
    fallen = sum(later <= earlier for earlier, later in combinations(values, 2))
    orders = [1]  # of 1, 2, … values: how many orders have 0, 1, 2, … pairs that fall
    for count in range(2, len(values) + 1):
        sums = [sum(orders[max(0, pairs - count + 1) : pairs + 1]) for pairs in range(len(orders) + count - 1)]
        orders = sums
    return sum(orders[: fallen + 1]) / math.factorial(len(values))


def last_rise(steps: Sequence[int], values: Sequence[float]) -> int | None:
    """The step since which a curve has not risen; its last one if it still rises in its second half (5 % level).

    That is where it first came within a standard deviation of the mean of that half. None if the half has fewer than
    `ENOUGH` points, which cannot tell.
    """
    level = values[len(values) // 2 :]
    if len(level) < ENOUGH:
        return None
    if chance_of_rise(level) < LEVEL:
        return steps[-1]
    reached = statistics.fmean(level) - statistics.stdev(level)
    return next(step for step, value in zip(steps, values, strict=True) if value >= reached)
