"""Compare an encoder with its baselines and with other encoders, on the same images and by the same probes.

Runs that differ only in the seed form one entry, whose value is the mean over seeds. Shares and differences are in
[0, 1].
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from ssvit.evaluation import statistics
from ssvit.evaluation.baselines import PIXELS, RANDOM
from ssvit.evaluation.report.scores import Scores
from ssvit.evaluation.statistics import NOTHING_YET, Interval

_LEVEL = f"{100 * statistics.LEVEL:.0f} %"
METHOD = (
    f"Intervals are {_LEVEL} percentile bootstrap intervals over the test images. The resamples are the same for all "
    "encoders, so that differences are paired. Differences are in percentage points, the evaluated encoder minus the "
    f"other one. A difference is significant (*) if its interval excludes zero and, for several seeds, if Student's "
    f"{_LEVEL} interval over the seeds does too. Otherwise the minimum detectable difference follows: that of a test "
    f"with a power of {100 * statistics.POWER:.0f} % on as many images. Nothing is corrected for multiple comparisons."
)
_VERDICTS = {1: "significantly better", -1: "significantly worse", 0: "not significantly different"}
_MISSING, _MINUS = "\u2013", "\u2212"
_ADVICE = (
    "Options that may help, in this order: existing weights (ssvit pretrain checkpoint=PATH), a larger "
    "data.image_size if the images have more pixels, more recipe.steps, standardised features "
    "(probes=[knn_standardized]). ssvit finetune compare=scratch measures the gain after fine-tuning."
)


@dataclass(frozen=True)
class Difference:
    """Store the difference of the evaluated encoder from another one, with its uncertainty.

    Attributes:
        mean: Mean difference.
        images: Interval over test images.
        seeds: Interval over seeds; None for single seeds.
        detectable: Minimum detectable difference with this number of images.
    """

    mean: float
    images: Interval
    seeds: Interval | None
    detectable: float

    @property
    def sign(self) -> int:
        """Return 1 if the encoder is significantly better, -1 if significantly worse, or else 0."""
        return self.images.sign if self.seeds is None or self.seeds.sign == self.images.sign else 0

    def __str__(self) -> str:
        """Return the difference in percentage points with its interval, or the minimum detectable difference."""
        detectable = "*" if self.sign else f", detectable {100 * self.detectable:.1f}"
        return f"{points(self.mean)} ({points(self.images.low)} to {points(self.images.high)}){detectable}"


@dataclass(frozen=True)
class Standing:
    """Store the score of an encoder by the last column of a probe.

    Attributes:
        probe: Title of the probe.
        encoder: Name of the entry.
        features: Chosen feature set of each seed.
        values: Score of each seed.
        interval: Interval of their mean over test images.
        chance: Chance level; None if the column is not an accuracy.
        difference: Difference of the evaluated encoder from this one.
    """

    probe: str
    encoder: str
    features: tuple[str, ...]
    values: tuple[float, ...]
    interval: Interval
    chance: float | None
    difference: Difference


def compare(scores: Sequence[Scores], groups: Mapping[str, Sequence[str]]) -> list[Standing]:
    """Compare all encoders by all probes, grouped by probe. Probes without scores of single images are omitted.

    Args:
        scores: Results of the probes.
        groups: Encoders of each entry by its name, the evaluated encoder first.
    """
    return [standing for one in scores if one.per_image for standing in _standings(one, groups)]


def _standings(one: Scores, groups: Mapping[str, Sequence[str]]) -> list[Standing]:
    by_seed = [np.stack([one.per_image[encoder].numpy() for encoder in encoders]) for encoders in groups.values()]
    means = np.stack([values.mean(0) for values in by_seed])
    differences = means[0] - means
    intervals = statistics.bootstrap(np.concatenate([means, differences]))
    standings = []
    for number, (name, values) in enumerate(zip(groups, by_seed, strict=True)):
        difference = Difference(
            mean=float(differences[number].mean()),
            images=intervals[len(means) + number],
            seeds=statistics.of_seeds(by_seed[0].mean(1), values.mean(1)),
            detectable=statistics.detectable(differences[number]),
        )
        standings.append(
            Standing(
                probe=one.title,
                encoder=name,
                features=tuple(one.chosen[encoder] for encoder in groups[name]),
                values=tuple(values.mean(1).tolist()),
                interval=intervals[number],
                chance=one.chance,
                difference=difference,
            )
        )
    return standings


def table(
    scores: Sequence[Scores], standings: Sequence[Standing], groups: Mapping[str, Sequence[str]]
) -> list[list[str]]:
    """Return a table of headings and one row for each probe: the encoder's score, and its differences from the others.

    Args:
        scores: Results of the probes.
        standings: Comparison of the encoders.
        groups: Encoders of each entry by its name, the evaluated encoder first.
    """
    _, *others = groups
    rows = [["probe", "%", f"{_LEVEL} interval", "chance", *(f"from {name}" for name in others), "features"]]
    for one in scores:
        if rows_of_probe := [row for row in standings if row.probe == one.title]:
            own, *compared = rows_of_probe
            score, (low, high) = fmean(own.values), own.interval
            interval = f"{percent(low)} to {percent(high)}"
            differences = [str(row.difference) for row in compared]
        else:  # the uncertainty of an mAP or mIoU is unknown
            means = [fmean(one.values[one.chosen[encoder]][-1] for encoder in entry) for entry in groups.values()]
            score, interval = means[0], _MISSING
            differences = [points(score - mean) for mean in means[1:]]
        rows.append([one.title, percent(score), interval, percent(one.chance), *differences, one.best])
    return rows


def conclude(scores: Sequence[Scores], standings: Sequence[Standing], groups: Mapping[str, Sequence[str]]) -> list[str]:
    """Return a sentence for each other encoder on whether the evaluated one is better, and advice if it is not.

    Advice is given if a baseline is significantly better by a probe, or if no probe shows a gain over all baselines.

    Args:
        scores: Results of the probes.
        standings: Comparison of the encoders.
        groups: Encoders of each entry by its name, the evaluated encoder first.
    """
    _, *others = groups
    sentences = []
    for name in others:
        verdicts = []
        for sign, words in _VERDICTS.items():
            probes = [row.probe for row in standings if row.encoder == name and row.difference.sign == sign]
            if probes:
                verdicts.append(f"{words} by {' and '.join(probes)}")
        if verdicts:
            sentences.append(f"Compared with {name}, the features are {'; '.join(verdicts)}.")
    if weak := [one.title for one in scores if not one.is_above_chance]:
        sentences.append(f"Not {NOTHING_YET}: {' and '.join(weak)}.")
    if RANDOM not in groups:
        return [*sentences, "No baseline was evaluated (baselines=false)."]
    signs = [
        {row.difference.sign for row in standings if row.probe == one.title and row.encoder in (RANDOM, PIXELS)}
        for one in scores
    ]
    has_gain = any(one.is_above_chance and of_probe == {1} for one, of_probe in zip(scores, signs, strict=True))
    is_worse = any(-1 in of_probe for of_probe in signs)
    return [*sentences, _ADVICE] if standings and (is_worse or not has_gain) else sentences


def points(share: float) -> str:
    """Format a difference in percentage points: 0.0123 -> +1.2."""
    return f"{100 * share:+.1f}".replace("-", _MINUS)


def percent(share: float | None, deviation: float | None = None) -> str:
    """Format a share as a percentage without the sign, with its standard deviation: 0.523 -> 52.3."""
    if share is None or not math.isfinite(share):
        return _MISSING
    return f"{100 * share:.1f}" + ("" if deviation is None else f" ± {100 * deviation:.1f}")
