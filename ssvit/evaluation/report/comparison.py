"""Compare an encoder with its baselines and with other encoders, on the same images and by the same probes.

Shares and differences are in [0, 1].
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from ssvit.evaluation import statistics
from ssvit.evaluation.baselines import OWN, PIXELS, RANDOM
from ssvit.evaluation.measured import Accuracies
from ssvit.evaluation.report.scores import Scores
from ssvit.evaluation.statistics import NOT_ABOVE_CHANCE, Interval, verdict

_LEVEL = f"{100 * statistics.LEVEL:.0f} %"
METHOD = (
    f"Intervals are {_LEVEL} percentile bootstrap intervals over the test images. The resamples are the same for all "
    "encoders, so that differences are paired. Differences are in percentage points, the evaluated encoder minus the "
    "other result. A difference is significant (*) if its interval excludes zero. Otherwise the minimum detectable "
    f"difference for a power of {100 * statistics.POWER:.0f} % on as many images is stated instead. Intervals "
    "do not include the variation over training seeds, and nothing is corrected for multiple comparisons."
)
_MISSING, _MINUS = "\u2013", "\u2212"
HEAD = 12  # letters to which the headings of accuracies are wrapped in a terminal
_POINT = 0.01  # difference of accuracies from which balanced ones are shown


@dataclass(frozen=True)
class Difference:
    """Store the difference of the evaluated encoder from another one, with its uncertainty.

    Attributes:
        mean: Mean difference.
        interval: Interval over test images.
        detectable: Minimum detectable difference with this number of images.
    """

    mean: float
    interval: Interval
    detectable: float

    def __str__(self) -> str:
        """Return the difference in percentage points with its interval, or the minimum detectable difference."""
        detectable = "*" if self.interval.sign else f", detectable {100 * self.detectable:.1f}"
        mean, low, high = map(percentage_points, (self.mean, *self.interval))
        return f"{mean} ({low} to {high}){detectable}"


@dataclass(frozen=True)
class Standing:
    """Store the score of an encoder by the last column of a probe.

    Attributes:
        probe: Title of the probe.
        encoder: Name of the encoder.
        features: Chosen feature set.
        value: The score.
        interval: Interval of the score over test images.
        chance: Chance level; None if the column is not an accuracy.
        difference: Difference of the evaluated encoder from this result.
    """

    probe: str
    encoder: str
    features: str
    value: float
    interval: Interval
    chance: float | None
    difference: Difference


def compare_encoders(scores: Sequence[Scores], encoder: str) -> list[Standing]:
    """Compare all encoders by all probes, grouped by probe. Probes without scores of single images are omitted.

    Args:
        scores: Results of the probes.
        encoder: Name of the evaluated encoder, the first of each probe.
    """
    return [standing for result in scores if result.per_image for standing in _standings(result, encoder)]


def _standings(result: Scores, encoder: str) -> list[Standing]:
    values = np.stack([per_image.numpy() for per_image in result.per_image.values()])
    differences = values[0] - values
    intervals = [*statistics.bootstrap(values, 0, 1), *statistics.bootstrap(differences, -1, 1)]
    return [
        Standing(
            probe=result.title,
            encoder=name or encoder,
            features=result.chosen[name],
            value=float(values[number].mean()),
            interval=intervals[number],
            chance=result.chance,
            difference=Difference(
                mean=float(differences[number].mean()),
                interval=intervals[len(values) + number],
                detectable=statistics.detectable(differences[number]),
            ),
        )
        for number, name in enumerate(result.per_image)
    ]


def accuracy_table(encoders: Accuracies, images: str) -> list[list[str]]:
    """Return headings and one row for each encoder with its accuracy by each probe.

    Balanced accuracies are next to them if one differs by more than a point.

    Args:
        encoders: Accuracy by encoder and probe, and balanced accuracy, None if unknown.
        images: The images on which they are measured, such as "412 test images".
    """
    values = chain.from_iterable(row.values() for row in encoders.values())
    differs = any(abs(value - balanced) > _POINT for value, balanced in values if balanced is not None)
    shown = slice(None) if differs else slice(1)
    heads = [head for title in next(iter(encoders.values())) for head in (title, f"{title} balanced")[shown]]
    rows = [
        [name, *(percent(one) for pair in row.values() for one in [*pair][shown])] for name, row in encoders.items()
    ]
    return [[f"% of {images}", *heads], *rows]


def accuracies(scores: Sequence[Scores], encoder: str) -> Accuracies:
    """Return the headline metric and the balanced accuracy of each encoder, `encoder` for `OWN`, by each probe."""
    return {
        name or encoder: {row.title: (row.values[row.chosen[name]][-1], row.balanced.get(name)) for row in scores}
        for name in (scores[0].chosen if scores else ())
    }


def comparison_table(scores: Sequence[Scores], standings: Sequence[Standing]) -> list[list[str]]:
    """Return a table of headings and one row for each probe: the encoder's score, and its differences from the others.

    Args:
        scores: Results of the probes.
        standings: Comparison of the encoders.
    """
    _, *others = scores[0].chosen
    heads = "probe", "%", f"{_LEVEL} interval", "chance", "balanced %"
    rows = [[*heads, *(f"from {name}" for name in others), "features"]]
    for result in scores:
        first, *baselines = (result.values[features][-1] for features in result.chosen.values())
        interval, differences = _MISSING, [percentage_points(first - other) for other in baselines]
        if tested := [row for row in standings if row.probe == result.title]:  # otherwise the uncertainty is unknown
            low, high = tested[0].interval
            interval = f"{percent(low)} to {percent(high)}"
            differences = [str(row.difference) for row in tested[1:]]
        levels = percent(result.chance), percent(result.balanced.get(OWN))
        rows.append([result.title, percent(first), interval, *levels, *differences, result.best])
    return rows


def conclude(
    scores: Sequence[Scores], standings: Sequence[Standing], start: str | None = None, advice: str = ""
) -> list[str]:
    """Return a sentence for each other encoder on whether the evaluated one is better, and advice if it is not.

    Advice is added if a baseline is significantly better by a probe, or if no probe shows a gain over all baselines.

    Args:
        scores: Results of the probes.
        standings: Comparison of the encoders.
        start: Name of the encoder from which the training of the evaluated one started. If the training was no
            improvement, this is the first sentence.
        advice: The advice.
    """
    _, *others = scores[0].chosen
    sentences = []
    if start and not any(row.encoder == start and row.difference.interval.sign > 0 for row in standings):
        sentences.append(f"No probe shows a significant improvement over the start of the training, {start}.")
    for name in others:
        probes = defaultdict(list)
        for row in sorted(standings, key=lambda row: -row.difference.interval.sign):
            if row.encoder == name:
                probes[verdict(row.difference.interval)].append(row.probe)
        if probes:
            verdicts = (f"{words} {name} by {', '.join(of_words)}" for words, of_words in probes.items())
            sentences.append(f"The features are {'; '.join(verdicts)}.")
    if weak := [result.title for result in scores if not result.is_above_chance]:
        sentences.append(f"{NOT_ABOVE_CHANCE.capitalize()}: {', '.join(weak)}.")
    if RANDOM not in others:
        return [*sentences, *([] if others else ["No baseline was evaluated (baselines=false)."])]
    signs: dict[str, set[int]] = {result.title: set() for result in scores}
    for row in standings:
        if row.encoder in (RANDOM, PIXELS):
            signs[row.probe].add(row.difference.interval.sign)
    has_gain = any(result.is_above_chance and signs[result.title] == {1} for result in scores)
    is_worse = any(-1 in of_probe for of_probe in signs.values())
    return [*sentences, advice] if advice and standings and (is_worse or not has_gain) else sentences


def percentage_points(share: float) -> str:
    """Format a difference in percentage points: 0.0123 -> +1.2."""
    return f"{100 * share:+.1f}".replace("-", _MINUS)


def percent(share: float | None, deviation: float | None = None) -> str:
    """Format a share as a percentage without the sign, with its standard deviation: 0.523 -> 52.3."""
    if share is None or not math.isfinite(share):
        return _MISSING
    return f"{100 * share:.1f}" + ("" if deviation is None else f" ± {100 * deviation:.1f}")
