"""Summarise a scaling study by power laws of the error over images and compute, and a table.

The error of a model is fitted as b x^-c by a line in log-log coordinates, as in Kaplan et al. 2020 and Zhai et al. 2022
without their constant terms, for which small studies have too few points.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from scipy.stats import linregress

from ssvit.evaluation.titles import title
from ssvit.figures.plot import Line, Panel, Plot
from ssvit.studies.methods import Row, markdown, spread

FINETUNED, SUPERVISED, MODEL = "fine-tuned", "trained with labels", ("depth", "width", "patch")
_MARKERS = "osD^vP*X"
_POINT = ("objective", "encoder", "images", *MODEL, "steps")


class PowerLaw(NamedTuple):
    """Store the power law error = factor * x ** -power.

    Attributes:
        factor: Error at x = 1.
        power: Exponent.
        deviation: Standard error of the exponent; NaN for two points.
        residual: Root mean squared difference between points and curve, in [0, 1].
    """

    factor: float
    power: float
    deviation: float
    residual: float

    def accuracy(self, x: float) -> float:
        """Return the accuracy predicted at x."""
        return 1 - self.factor * x**-self.power


def fit(x: Sequence[float], accuracies: Sequence[float]) -> PowerLaw | None:
    """Fit a power law to accuracies in [0, 1) at x > 0; None for fewer than two different x."""
    if len(set(x)) < 2:
        return None
    logs, errors = [math.log(one) for one in x], [math.log(max(1 - one, 1e-6)) for one in accuracies]
    line = linregress(logs, errors)
    deviation = float(line.stderr) if len(x) > 2 else math.nan
    found = PowerLaw(math.exp(line.intercept), -float(line.slope), deviation, 0.0)
    missed = [found.accuracy(one) - accuracy for one, accuracy in zip(x, accuracies, strict=True)]
    return found._replace(residual=math.sqrt(statistics.fmean(one**2 for one in missed)))


def points(rows: Mapping[str, Row]) -> list[dict[str, Any]]:
    """Return one point for each configuration of the grid and each objective, averaged over seeds.

    Each point has the axes of the grid; encoder: name of an encoder for comparison, or None; flops: operations of the
    whole pre-training; step_flops: operations of one image; scores: by title of a probe (those that all seeds have) the
    accuracy at the chosen layer, and the accuracies after fine-tuning and supervised training, if measured.
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
    """Return a model's name: depth x width / patch size, as 6 x 192 / 4, or the name of an encoder for comparison."""
    if point["encoder"] is not None:
        return point["encoder"]
    return "{depth} x {width} / {patch}".format(**point)


def series(found: Sequence[Mapping[str, Any]], axis: str) -> dict[tuple[str, ...], list[Mapping[str, Any]]]:
    """Group the points into lines along an axis.

    Args:
        found: Points.
        axis: "images", for which objective, model and steps are constant along a line, or "flops", for which the
            objective is, and for encoders for comparison the encoder too.
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


def laws(line: Sequence[Mapping[str, Any]], axis: str) -> dict[str, PowerLaw]:
    """Fit a power law over an axis to each score that has two points or more."""
    fitted = {}
    for name in dict.fromkeys(name for point in line for name in point["scores"]):
        having = [point for point in line if name in point["scores"]]
        law = fit([point[axis] for point in having], [point["scores"][name] for point in having])
        if law is not None:
            fitted[name] = law
    return fitted


def table(rows: Mapping[str, Row]) -> str:
    """Return Markdown tables of all points, and of the power laws over images and over compute with their errors."""
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


def plot(found: Sequence[Mapping[str, Any]]) -> Plot:
    """Plot the scores as in Figures 3 to 5 (images, compute) and 8 (model shape) of Dosovitskiy et al. 2021.

    Each score has a row of panels: over images, over compute, and over the operations of an image for models that
    differ from the smallest in depth, width or patch size only. Axes with a single value have no panel. Thin lines are
    fits.
    """
    names = list(dict.fromkeys(name for point in found for name in point["scores"]))
    models = _by_part(found)
    has_images = len({point["images"] for point in found} - {None}) > 1
    panels = []
    for name in sorted(names, key=lambda name: name != FINETUNED):
        if has_images:
            panels.append(_over(found, "images", name, "images of pre-training", 1))
        panels.append(_over(found, "flops", name, "operations of pre-training (10¹²)", 1e12))
        if models:
            panels.append(_over_models(models, name))
    down = len(names) if has_images or models else 1
    return Plot(panels, (5.3 * len(panels) / down, 4 * down), down)


def _over(found: Sequence[Mapping[str, Any]], axis: str, name: str, xlabel: str, unit: float) -> Panel:
    lines = []
    for place, (key, line) in enumerate(series(found, axis).items()):
        points = [point for point in line if name in point["scores"]]
        color, x = f"C{place % 10}", [point[axis] for point in points]
        y = [100 * point["scores"][name] for point in points]
        lines.append(Line([one / unit for one in x], y, ", ".join(key), color, "", _MARKERS[place % 8]))
        if law := laws(line, axis).get(name):
            between = [min(x) * (max(x) / min(x)) ** (step / 50) for step in range(51)]
            fitted = [100 * law.accuracy(one) for one in between]
            lines.append(Line([one / unit for one in between], fitted, "", color, "-", "", 0.8))
    return Panel(f"{name} (%)", lines, xlabel=xlabel, log=True, close=True)


def _by_part(found: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """Return lines of models that differ from the smallest in one dimension, with the most images and steps."""
    lines = {}
    points = [point for point in found if point["encoder"] is None]  # others differ in several dimensions
    for objective in dict.fromkeys(point["objective"] for point in points):
        own = [point for point in points if point["objective"] == objective]
        most = max((point["images"] or math.inf, point["steps"]) for point in own)
        own = [point for point in own if (point["images"] or math.inf, point["steps"]) == most]
        base = min(own, key=lambda point: point["step_flops"])
        for part in MODEL:
            line = [point for point in own if all(point[one] == base[one] for one in MODEL if one != part)]
            if len(line) > 1:
                lines[f"{objective}, {part}"] = sorted(line, key=lambda point: point["step_flops"])
    return lines


def _over_models(models: Mapping[str, list[Mapping[str, Any]]], name: str) -> Panel:
    lines = []
    for place, (label, line) in enumerate(models.items()):
        points = [point for point in line if name in point["scores"]]
        x = [point["step_flops"] / line[0]["step_flops"] for point in points]
        y = [100 * point["scores"][name] for point in points]
        lines.append(Line(x, y, label, f"C{place % 10}", "-", _MARKERS[place % 8]))
    xlabel = "operations of an image, relative to the smallest model"
    return Panel(f"{name} (%)", lines, xlabel=xlabel, log=True, close=True)
