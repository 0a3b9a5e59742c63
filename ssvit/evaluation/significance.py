"""Is an accuracy above chance? Standard library only."""

import math
from collections import Counter
from collections.abc import Iterable

# What is said where nothing is above chance, after "not" or "neither is".
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
