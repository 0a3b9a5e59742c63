"""Compare an encoder with others on the same images by the same probes.

Runs that differ only in the seed form one entry, whose value is the mean over seeds. Shares and differences are in
[0, 1].
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ssvit.evaluation import statistics
from ssvit.evaluation.baselines import RANDOM
from ssvit.evaluation.report.scores import Scores
from ssvit.evaluation.statistics import Interval

_LEVEL = f"{100 * statistics.LEVEL:.0f} %"
METHOD = (
    f"Intervals hold {_LEVEL} of resampled sets of test images (percentile bootstrap; the same for all encoders, so "
    "that differences are paired), and for several seeds also Student's t. A difference is told where no interval of "
    "it holds zero. p: McNemar's exact test, of single classifiers. Detectable: the least difference that so many test "
    f"images show in {100 * statistics.POWER:.0f} % of cases. Nothing is corrected for the number of comparisons."
)
_MINUS = "\u2212"
_ROUNDING = 1e-9  # rounding error of equal means over seeds


@dataclass(frozen=True)
class Difference:
    """Store the difference of the evaluated encoder from another one, with its uncertainty.

    Attributes:
        mean: Mean difference.
        images: Interval over test images.
        seeds: Interval over seeds; None for single seeds.
        p: p-value of McNemar's test; None unless both are single classifiers.
        detectable: Smallest difference that this number of images detects.
        needed: Number of images at which this difference is detected.
    """

    mean: float
    images: Interval
    seeds: Interval | None
    p: float | None
    detectable: float
    needed: float

    @property
    def sign(self) -> int:
        """Return 1 if the encoder is significantly better, -1 if significantly worse, or else 0."""
        return self.images.sign if self.seeds is None or self.seeds.sign == self.images.sign else 0


@dataclass(frozen=True)
class Standing:
    """Store the score of an encoder by the last column of a probe.

    Attributes:
        probe: Title of the probe.
        encoder: Name of the entry.
        images: Number of test images.
        features: Chosen feature set of each seed.
        values: Score of each seed.
        interval: Interval of their mean over test images.
        chance: Chance level; None if the column is not an accuracy.
        difference: Difference of the evaluated encoder from this one; None for the evaluated encoder itself.
    """

    probe: str
    encoder: str
    images: int
    features: tuple[str, ...]
    values: tuple[float, ...]
    interval: Interval
    chance: float | None
    difference: Difference | None

    @property
    def value(self) -> float:
        """Return the mean over seeds."""
        return sum(self.values) / len(self.values)


@dataclass(frozen=True)
class SideBySide:
    """Compare all encoders by all probes. Probes without scores of single images are omitted.

    Attributes:
        scores: Results of the probes.
        groups: Encoders of each entry by its name, the evaluated encoder first.
    """

    scores: Sequence[Scores]
    groups: Mapping[str, Sequence[str]]

    @cached_property
    def standings(self) -> list[Standing]:
        """Return the scores of all entries, grouped by probe."""
        return [standing for one in self.scores if one.per_image for standing in _standings(one, self.groups)]

    def sentences(self) -> list[str]:
        """Return a sentence for each entry on whether the evaluated encoder is better."""
        _, *others = self.groups
        found = {name: [standing for standing in self.standings if standing.encoder == name] for name in others}
        return [_sentence(name, standings) for name, standings in found.items() if standings]


def _standings(one: Scores, groups: Mapping[str, Sequence[str]]) -> list[Standing]:
    by_seed = {name: np.stack([one.per_image[encoder].numpy() for encoder in of]) for name, of in groups.items()}
    rows = np.stack([values.mean(0) for values in by_seed.values()])
    intervals = statistics.bootstrap(np.concatenate([rows, rows[0] - rows]))
    own, *_ = by_seed.values()
    standings = []
    for place, (name, values) in enumerate(by_seed.items()):
        difference, ours = rows[0] - rows[place], tuple(values.mean(1).tolist())
        standings.append(
            Standing(
                probe=one.title,
                encoder=name,
                images=rows.shape[1],
                features=tuple(one.chosen[encoder] for encoder in groups[name]),
                values=ours,
                interval=intervals[place],
                chance=one.chance,
                difference=Difference(
                    mean=float(difference.mean()),
                    images=intervals[len(rows) + place],
                    seeds=statistics.of_seeds(own.mean(1), values.mean(1)),
                    p=statistics.mcnemar(rows[0], rows[place]),
                    detectable=statistics.detectable(difference),
                    needed=statistics.needed(difference),
                )
                if place
                else None,
            )
        )
    return standings


def _sentence(name: str, standings: Sequence[Standing]) -> str:
    """Return a sentence on the difference from one entry: the first probe in detail, further probes as a list."""
    first, *others = standings
    difference = first.difference
    assert difference is not None
    intervals = [f"{between(difference.images)} over the images"]
    if difference.seeds is not None:
        intervals.append(f"{between(difference.seeds)} over the seeds")
    figures = f"{points(difference.mean)} percentage points ({_LEVEL} interval {', '.join(intervals)})"
    seen = f"{first.images:,} test images show differences of {100 * difference.detectable:.1f} points and more"
    if difference.sign:
        helped, harmed = ("pre-training helped", "pre-training did harm") if name == RANDOM else ("better", "worse")
        verdict, sizes = helped if difference.sign > 0 else harmed, ""
    elif difference.images.sign:
        verdict, sizes = "no difference can be told", " The images would tell it, but the seeds differ too much."
    elif not difference.detectable:
        verdict, sizes = "no difference", " Both have the same value on every image."
    elif abs(difference.mean) < _ROUNDING:
        verdict, sizes = "no difference can be told", f" The measured difference is 0; {seen}."
    else:
        verdict, count = "no difference can be told", f"about {rounded(difference.needed):,}"
        sizes = f" The test set is too small to tell: {seen}; {count} images like these would show this one."
    by_sign: dict[int, list[str]] = {1: [], -1: [], 0: []}
    for one in others:
        assert one.difference is not None
        by_sign[one.difference.sign].append(f"{one.probe} {points(one.difference.mean)}")
    words = {1: "Also better by", -1: "Worse by", 0: "Not told by"}
    rest = "".join(f" {words[sign]} {', '.join(named)}." for sign, named in by_sign.items() if named)
    return f"Against {name}, by {first.probe}: {verdict}, {figures}.{sizes}{rest}"


def points(share: float) -> str:
    """Format a difference in percentage points: 0.0123 -> +1.2."""
    return f"{100 * share:+.1f}".replace("-", _MINUS)


def between(interval: Interval) -> str:
    """Format an interval in percentage points: (0.01, 0.02) -> +1.0 to +2.0."""
    return f"{points(interval.low)} to {points(interval.high)}"


def rounded(count: float) -> int:
    """Round to two significant digits: 61,234 -> 61,000."""
    return int(round(count, 1 - math.floor(math.log10(count)))) if count >= 1 else 1


def table(standings: Sequence[Standing]) -> list[list[str]]:
    """Return a table of headings and one row for each entry of each probe."""
    rows = [["probe", "encoder", "%", "interval", "difference", "interval of it", "over seeds", "p", "detectable"]]
    for one in standings:
        values = f"{100 * one.interval.low:.1f} to {100 * one.interval.high:.1f}"
        seeds = f" ({len(one.values)} seeds)" if len(one.values) > 1 else ""
        row = [one.probe, f"{one.encoder}{seeds}", f"{100 * one.value:.1f}", values]
        if (found := one.difference) is None:
            rows.append([*row, *["\u2013"] * 5])
            continue
        p = "\u2013" if found.p is None else f"{found.p:.2g}" if found.p >= 1e-4 else "< 0.0001"
        over_seeds = "\u2013" if found.seeds is None else between(found.seeds)
        told = [points(found.mean), between(found.images), over_seeds, p, f"{100 * found.detectable:.1f}"]
        rows.append([*row, *told])
    return rows
