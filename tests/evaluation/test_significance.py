"""Chance, and what is above it: held against exact binomial tails."""

import itertools
import math

import pytest
from scipy.stats import binom, norm

from ssvit.evaluation.significance import above_chance, chance, standard_error


def least(share: float, images: int) -> int:
    """The fewest right answers of so many images that are above chance; images + 1 if none are."""
    passed = [above_chance(right / images, share, images) for right in range(images + 1)]
    assert passed == sorted(passed)
    return passed.index(True) if any(passed) else images + 1


def test_guessing_is_above_chance_in_at_most_four_of_a_hundred():
    for share, images in itertools.product((0.001, 0.01, 0.05, 0.1, 0.3, 0.5, 0.9), (10, 45, 210, 412, 3000)):
        if share * images < 1:  # the most frequent class has an image
            continue
        right = least(share, images)
        assert binom.sf(right - 1, images, share) <= 0.04
        # It is no stricter than it says: two right answers fewer are no rare event.
        assert binom.sf(right - 3, images, share) >= norm.sf(2)


def test_with_many_images_it_is_the_tail_of_two_standard_errors():
    for share in (0.1, 0.25, 0.5):
        assert binom.sf(least(share, 50_000) - 1, 50_000, share) == pytest.approx(norm.sf(2), rel=0.05)


def test_what_cannot_be_above_chance_is_not():
    assert not above_chance(0.1, 0.1, 10_000)
    assert not above_chance(1.0, 1.0, 10_000)  # one class
    assert not above_chance(math.nan, 0.1, 100)
    assert above_chance(1.0, 0.5, 100)


def test_the_error_is_that_of_the_binomial_distribution():
    for accuracy, images in ((0.1, 50), (0.7, 412)):
        assert standard_error(accuracy, images) == pytest.approx(binom.std(images, accuracy) / images)


def test_chance_is_the_share_of_the_most_frequent_class():
    assert chance([3, 1, 1, 2]) == 0.5
    assert math.isnan(chance([]))
