"""Statistics of accuracies, against exact binomial tails, all orders of a curve, and plain resampling."""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy.stats import binom, binomtest, norm

from ssvit.evaluation.statistics import (
    Interval,
    above_chance,
    another_seed,
    bootstrap,
    chance,
    detectable,
    error_of_difference,
    of_accuracy,
    of_seeds,
    trend,
    verdict,
)

GENERATOR = torch.Generator().manual_seed(0)


def least(share: float, images: int) -> int:
    """Return the smallest number of correct predictions that is above chance; images + 1 if there is none."""
    passed = [above_chance(right / images, share, images) for right in range(images + 1)]
    assert passed == sorted(passed)
    return passed.index(True) if any(passed) else images + 1


def test_guessing_is_above_chance_in_at_most_four_of_a_hundred():
    for share, images in itertools.product((0.001, 0.01, 0.05, 0.1, 0.3, 0.5, 0.9), (10, 45, 210, 412, 3000)):
        if share * images < 1:  # the most frequent class has an image
            continue
        right = least(share, images)
        assert binom.sf(right - 1, images, share) <= 0.04
        # The test is not too conservative: with two correct predictions fewer, errors are more frequent.
        assert binom.sf(right - 3, images, share) >= norm.sf(2)


def test_what_cannot_be_above_chance_is_not():
    assert not above_chance(0.1, 0.1, 10_000)
    assert not above_chance(1.0, 1.0, 10_000)  # one class
    assert not above_chance(math.nan, 0.1, 100)
    assert above_chance(1.0, 0.5, 100)


def test_chance_is_the_share_of_the_most_frequent_class():
    assert chance([3, 1, 1, 2]) == 0.5
    assert math.isnan(chance([]))


def test_a_curve_that_flattens_has_not_risen_since_the_bend():
    steps = list(range(0, 1600, 100))
    rising = [0.1 + 0.01 * place for place in range(16)]
    assert trend(steps, rising) == (1, 1500)
    assert trend(steps, rising[::-1]) == (-1, 0)
    flat = [*rising[:6], *(0.15 + 0.01 * sign for sign in (1, -1, 0, -1, 1, 0, -1, 0, 1, -1))]
    assert (trend(steps, flat)[0], 400 <= trend(steps, flat)[1] <= 500) == (0, True)
    assert trend(steps[:8], rising[:8]) is None
    assert trend(steps, [0.1] * 16) == (0, 0)
    assert trend(range(11), [0.08, 0.12, 0.16, 0.18, 0.19] + [0.2] * 6) == (0, 5)  # whose mean is rounded upwards
    assert trend(range(11), [0.35, 0.21, 0.15, 0.12, 0.11, 0.1, 0.11, 0.1, 0.11, 0.1, 0.11])[1] > 3  # after a fall


def test_intervals_of_means_are_those_of_their_errors():
    values = np.random.default_rng(1).normal(size=(3, 4000)) * [[1], [2], [3]]
    for row, interval in zip(values, bootstrap(values, -1, 1), strict=True):
        error = row.std(ddof=1) / math.sqrt(4000)
        assert interval == pytest.approx((row.mean() - 1.96 * error, row.mean() + 1.96 * error), abs=0.25 * error)
    assert bootstrap(values, -1, 1) == bootstrap(values, -1, 1)


@pytest.mark.parametrize(("images", "significant"), [(2, False), (5, False), (6, True), (100, True)])
def test_equal_values_are_significant_if_a_sign_test_is(images, significant):
    better, equal = np.ones((1, images)), np.zeros((1, images))
    assert (binomtest(images, images).pvalue < 0.05) == significant
    ((low, high),) = bootstrap(better, -1, 1)
    assert ((low > 0), high) == (significant, 1)
    ((low, high),) = bootstrap(equal, -1, 1)
    assert low == -high < 0
    ((low, high),) = bootstrap(better, 0, 1)
    exact = binomtest(images, images).proportion_ci(0.95, method="exact")
    assert (low, high) == pytest.approx((exact.low, 1))


def test_a_detectable_difference_is_found_four_times_in_five():
    generator = np.random.default_rng(0)

    def sample(images, rate):
        """Differences of two classifiers that disagree on 30 % of the images."""
        return generator.choice([1.0, 0.0, -1.0], p=[0.15 + rate / 2, 0.7, 0.15 - rate / 2], size=images)

    rate = detectable(sample(100_000, 0.04)) * math.sqrt(100_000 / 1000)
    found = [sample(1000, rate) for _ in range(1000)]
    share = np.mean([abs(one.mean()) > 1.96 * one.std() / math.sqrt(1000) for one in found])
    assert share == pytest.approx(0.8, abs=0.03)


def test_seeds_have_an_interval_of_their_own():
    several, single = [0.50, 0.52, 0.57], [0.4]
    width = 4.302652729911275 * np.std(several, ddof=1)  # Student's t, two degrees of freedom
    alone = np.mean(several) - width / math.sqrt(3), np.mean(several) + width / math.sqrt(3)
    assert of_seeds(several) == pytest.approx(alone)
    mean, width = np.mean(several) - 0.4, width * math.sqrt(1 + 1 / 3)
    assert of_seeds(several, single) == pytest.approx((mean - width, mean + width))
    assert of_seeds(single, several) == pytest.approx((-mean - width, -mean + width))
    assert of_seeds(single, single) is None
    assert of_seeds([0.5, 0.5], [0.4]) == pytest.approx((0.1, 0.1))
    assert of_seeds(single) is None
    ours, theirs = of_seeds(several, [0.3, 0.31])
    assert ours < np.mean(several) - 0.305 < theirs


def test_intervals_of_few_images_contain_the_true_accuracy():
    """Exact coverage, as the sum of binomial probabilities over all numbers of correct predictions."""
    for images, accuracy in ((5, 0.9), (10, 0.9), (30, 0.97), (100, 0.97)):
        counts = range(images + 1)
        chances = binom.pmf(counts, images, accuracy)
        inside = []
        for p in (count / images for count in counts):
            low, high = of_accuracy(p, images)
            z = norm.ppf(0.975)
            half = z * math.sqrt(p * (1 - p) / images + z**2 / 4 / images**2) / (1 + z**2 / images)
            centre = (p + z**2 / 2 / images) / (1 + z**2 / images)
            assert (low, high) == pytest.approx((centre - half, centre + half), abs=1e-12)
            inside.append(low <= accuracy <= high)
        assert chances[inside].sum() > 0.91
        equal = 0.0
        for first, second in itertools.product(counts, repeat=2):
            error = error_of_difference((first / images, images), (second / images, images))
            equal += chances[first] * chances[second] * (abs(first - second) / images <= error)
        assert equal > 0.94


@pytest.mark.parametrize("tested", [False, True])
def test_a_verdict_is_one_of_three_answers(tested):
    better, same, worse = (Interval.around(gain, 0.1 * tested) for gain in (0.2, 0.05 * tested, -0.2))
    words = [verdict(interval, tested=tested) for interval in (better, same, worse)]
    assert [("better" in text, "worse" in text) for text in words] == [(True, False), (False, False), (False, True)]
    assert ["significantly" in text for text in words] == [tested] * 3


def test_a_prediction_interval_contains_the_result_of_another_seed_in_95_of_100_cases():
    random = np.random.default_rng(0)
    inside = {"own": 0, "like": 0}
    for _ in range(2000):
        *seeds, another = random.normal(3, 2, 5).tolist()
        low, high = another_seed(seeds)
        inside["own"] += low < another < high
        low, high = another_seed(seeds[:1], like=random.normal(0, 2, 6).tolist())
        inside["like"] += low < another < high
    assert inside == {name: pytest.approx(0.95 * 2000, abs=3 * (0.95 * 0.05 * 2000) ** 0.5) for name in inside}


def test_one_result_has_no_prediction_interval():
    assert another_seed([0.3]) is None
    low, high = another_seed([0.3], like=[0.1, 0.1])
    assert low == high == pytest.approx(0.3)
