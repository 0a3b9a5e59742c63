"""A scaling study: how accuracy grows with images and compute, by a power law of the error, and its table.

The error of a model is fitted as b x^-c, a line of its logarithm over that of x (as Kaplan et al. 2020 and Zhai et al.
2022 have it without their constant terms, for which small studies have too few points).
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from scipy.stats import linregress

from ssvit.evaluation.report.titles import title
from ssvit.figures.scaling import FINETUNED, MODEL, SUPERVISED, Curves
from ssvit.studies.methods import Row, markdown, spread

_POINT = ("objective", "encoder", "images", *MODEL, "steps")


class Fit(NamedTuple):
    """error = factor * x ** -power. deviation: of power, its standard error, NaN of two points. residual: the root of
    the mean squared difference of points and curve, as a share."""

    factor: float
    power: float
    deviation: float
    residual: float

    def accuracy(self, x: float) -> float:
        """What the curve says at x, 0 to 1."""
        return 1 - self.factor * x**-self.power


def fit(x: Sequence[float], accuracies: Sequence[float]) -> Fit | None:
    """The power law through accuracies (0 to 1, below 1) at x > 0; None for fewer than two different x."""
    if len(set(x)) < 2:
        return None
    logs, errors = [math.log(one) for one in x], [math.log(max(1 - one, 1e-6)) for one in accuracies]
    line = linregress(logs, errors)
    deviation = float(line.stderr) if len(x) > 2 else math.nan
    found = Fit(math.exp(line.intercept), -float(line.slope), deviation, 0.0)
    missed = [found.accuracy(one) - accuracy for one, accuracy in zip(x, accuracies, strict=True)]
    return found._replace(residual=math.sqrt(statistics.fmean(one**2 for one in missed)))


def points(rows: Mapping[str, Row]) -> list[dict[str, Any]]:
    """A point for each place of the grid and objective, means over seeds.

    Its axes; encoder: the name of one to compare with, else None; flops: of the whole pre-training; step_flops: of one
    image; scores: by title of a probe (those that all seeds have) the accuracy at the chosen layer, after fine-tuning,
    if there was any, and of what learned from labels the accuracy of that.
    """
    grouped = defaultdict(list)
    for row in rows.values():
        key = tuple(row.get(name) for name in _POINT)
        grouped[key].append(row)
    found = []
    for same in grouped.values():
        first = same[0]
        common = [name for name in first["probes"] if all(name in row["probes"] for row in same)]
        scores = {
            title(name, first["probes"][name]["column"]): [row["probes"][name]["chosen"] for row in same]
            for name in common
        }
        for name, part in ((FINETUNED, "finetuned"), (SUPERVISED, "supervised")):
            if all(part in row for row in same):
                scores[name] = [row[part] for row in same]
        found.append(
            {name: first.get(name) for name in _POINT}
            | {
                "seeds": len(same),
                "flops": first["steps"] * first["cost"]["flops"],
                "step_flops": first["cost"]["flops"] / first["cost"]["images"],
                "values": scores,
                "scores": {name: statistics.fmean(values) for name, values in scores.items()},
            }
        )
    return sorted(found, key=lambda point: (point["objective"], point["flops"], point["images"] or math.inf))


def model_of(point: Mapping[str, Any]) -> str:
    """A model's name: its depth, width and patch, as 6 x 192 / 4; that of an encoder to compare with."""
    if point["encoder"] is not None:
        return point["encoder"]
    return "{depth} x {width} / {patch}".format(**point)


def series(found: Sequence[Mapping[str, Any]], axis: str) -> dict[tuple[str, ...], list[Mapping[str, Any]]]:
    """The points by what is alike along an axis: of images, the objective, model and steps; of flops, the objective,
    and the encoder where it is one to compare with.
    """
    lines: defaultdict[tuple[str, ...], list[Mapping[str, Any]]] = defaultdict(list)
    for point in found:
        if axis == "images":
            if point["images"] is not None:
                lines[point["objective"], model_of(point), str(point["steps"])].append(point)
        else:
            compared = () if point["encoder"] is None else (point["encoder"],)
            lines[point["objective"], *compared].append(point)
    return dict(lines)


def curves(found: Sequence[Mapping[str, Any]], axis: str) -> Curves:
    """The `series` with their power laws by score."""
    return {
        key: (line, {name: law.accuracy for name, law in laws(line, axis).items()})
        for key, line in series(found, axis).items()
    }


def laws(line: Sequence[Mapping[str, Any]], axis: str) -> dict[str, Fit]:
    """The power laws of a line's scores over an axis, of those that have two points or more."""
    fitted = {}
    for name in dict.fromkeys(name for point in line for name in point["scores"]):
        having = [point for point in line if name in point["scores"]]
        law = fit([point[axis] for point in having], [point["scores"][name] for point in having])
        if law is not None:
            fitted[name] = law
    return fitted


def table(rows: Mapping[str, Row]) -> str:
    """Markdown: every point, and the power laws over images and over compute with their errors."""
    found = points(rows)
    names = list(dict.fromkeys(name for point in found for name in point["scores"]))
    grid = [["objective", "images", "model", "steps", "TFLOP", "seeds", *names]]
    for point in found:
        cells = [spread(point["values"][name]) if name in point["values"] else "" for name in names]
        images = "all" if point["images"] is None else f"{point['images']:,}"
        spent = f"{point['flops'] / 1e12:.1f}"
        grid.append(
            [point["objective"], images, model_of(point), str(point["steps"]), spent, str(point["seeds"]), *cells]
        )
    fits = [["over", "of", "measure", "power of the error", "deviation of the points (percentage points)", "points"]]
    for axis in ("images", "flops"):
        for key, line in series(found, axis).items():
            for name, law in laws(line, axis).items():
                power = f"{law.power:.3f}" + ("" if math.isnan(law.deviation) else f" ± {law.deviation:.3f}")
                count = sum(name in point["scores"] for point in line)
                fits.append([axis, ", ".join(key), name, power, f"{100 * law.residual:.1f}", str(count)])
    return "\n\n".join(markdown(part) for part in (grid, fits) if len(part) > 1) + "\n"
