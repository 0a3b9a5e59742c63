"""Summarise a scaling study by power laws of the error over images and compute, and a table.

The error of a model is fitted as b x^-c by a line in log-log coordinates, as in Kaplan et al. 2020 and Zhai et al. 2022
without their constant terms, for which small studies have too few points.
"""

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from scipy.stats import linregress

from ssvit.evaluation.titles import title
from ssvit.figures.plot import Line, Panel, Plot
from ssvit.figures.style import of_objective
from ssvit.studies.methods import MARKERS, Row, markdown, mean_std

FINETUNED, SUPERVISED = "fine-tuned", "trained with labels"
BASE = "base"  # name of the point of which each axis is varied
_POINT = ("objective", "encoder", "images", "depth", "width", "mlp", "patch", "steps", "varied")


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

    def x(self, accuracy: float) -> float:
        """Return the x at which an accuracy is predicted, for a power above 0."""
        return (self.factor / max(1 - accuracy, 1e-6)) ** (1 / self.power)


def fit(x: Sequence[float], accuracies: Sequence[float]) -> PowerLaw | None:
    """Fit a power law to accuracies in [0, 1) at x > 0; None for fewer than two different x."""
    if len(set(x)) < 2:
        return None
    logs, errors = [math.log(value) for value in x], [math.log(max(1 - value, 1e-6)) for value in accuracies]
    line = linregress(logs, errors)
    deviation = float(line.stderr) if len(x) > 2 else math.nan
    law = PowerLaw(math.exp(line.intercept), -float(line.slope), deviation, 0.0)
    missed = [law.accuracy(value) - accuracy for value, accuracy in zip(x, accuracies, strict=True)]
    return law._replace(residual=math.sqrt(statistics.fmean(value**2 for value in missed)))


def points(rows: Mapping[str, Row]) -> list[dict[str, Any]]:
    """Return one point for each configuration of the grid and each objective, averaged over seeds.

    Each point has the axes of the grid; encoder: name of an encoder for comparison, or None; flops: operations of the
    whole pre-training; values: for each seed, by title of a probe, the accuracy at the chosen layer, and the accuracies
    after fine-tuning and supervised training, if all seeds have them; scores: their means.
    """
    grouped = defaultdict(list)
    for row in rows.values():
        key = tuple(row.get(name) for name in _POINT)
        grouped[key].append(row)
    grid = []
    for same in grouped.values():
        first = same[0]
        values = {
            title(name, probe["column"]): [row["probes"][name]["chosen"] for row in same]
            for name, probe in first["probes"].items()
        }
        for name, accuracy in ((FINETUNED, "finetuned"), (SUPERVISED, "supervised")):
            if all(accuracy in row for row in same):
                values[name] = [row[accuracy] for row in same]
        grid.append(
            {name: first.get(name) for name in _POINT}
            | {
                "seeds": len(same),
                "flops": first["steps"] * first["cost"]["flops"],
                "values": values,
                "scores": {name: statistics.fmean(of_seeds) for name, of_seeds in values.items()},
            }
        )
    return sorted(grid, key=lambda point: (point["objective"], point["flops"], point["images"] or math.inf))


def model_of(point: Mapping[str, Any]) -> str:
    """Return a model's name: depth x width / patch size, as 6 x 192 / 4, or the name of an encoder for comparison.

    A width of the MLP other than 4 * width is added.
    """
    if point["encoder"] is not None:
        return point["encoder"]
    mlp = f", MLP {point['mlp']}" if point["mlp"] else ""
    return "{depth} x {width} / {patch}".format(**point) + mlp


def series(grid: Sequence[Mapping[str, Any]], axis: str) -> dict[tuple[str, ...], list[Mapping[str, Any]]]:
    """Group the points into lines along an axis.

    Args:
        grid: Points.
        axis: "images", for which objective, model and steps are constant along a line, or "flops", for which the
            objective is, and for encoders for comparison the encoder too. If one axis of the grid was varied at a time,
            there is a line for each, from the base.
    """
    bases = [point for point in grid if point["varied"] == BASE]
    lines: defaultdict[tuple[str, ...], list[Mapping[str, Any]]] = defaultdict(list)
    for point in grid:
        compared = () if point["encoder"] is None else (point["encoder"],)
        if axis == "images":
            if point["images"] is not None:
                lines[point["objective"], model_of(point), str(point["steps"])].append(point)
        elif point["varied"] is None:
            lines[point["objective"], *compared].append(point)
        elif point["varied"] != BASE:
            line = lines[point["objective"], point["varied"]]
            if not line:
                line.extend(base for base in bases if base["objective"] == point["objective"])
            line.append(point)
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


def scaling_table(rows: Mapping[str, Row]) -> str:
    """Return Markdown tables of all points, and of the power laws over images and over compute with their errors."""
    points_of_grid = points(rows)
    names = list(dict.fromkeys(name for point in points_of_grid for name in point["scores"]))
    grid = [["objective", "images", "model", "steps", "TFLOP", "seeds", *names]]
    for point in points_of_grid:
        cells = [mean_std(point["values"][name]) if name in point["values"] else "" for name in names]
        images = "all" if point["images"] is None else f"{point['images']:,}"
        spent = f"{point['flops'] / 1e12:.1f}"
        grid.append(
            [point["objective"], images, model_of(point), str(point["steps"]), spent, str(point["seeds"]), *cells]
        )
    fits = [["over", "of", "measure", "power of the error", "deviation of the points (percentage points)", "points"]]
    for axis in ("images", "flops"):
        for key, line in series(points_of_grid, axis).items():
            for name, law in laws(line, axis).items():
                power = f"{law.power:.3f}" + ("" if math.isnan(law.deviation) else f" ± {law.deviation:.3f}")
                count = sum(name in point["scores"] for point in line)
                fits.append([axis, ", ".join(key), name, power, f"{100 * law.residual:.1f}", str(count)])
    return "\n\n".join(markdown(part) for part in (grid, fits) if len(part) > 1) + "\n"


def conclusion(rows: Mapping[str, Row]) -> list[str]:
    """Return the highest score of a study, after fine-tuning if the study has it, with its point of the grid."""
    grid = points(rows)
    name = FINETUNED if any(FINETUNED in point["scores"] for point in grid) else next(iter(grid[0]["scores"]))
    best = max((point for point in grid if name in point["scores"]), key=lambda point: point["scores"][name])
    score = mean_std(best["values"][name])
    highest = f"highest accuracy ({name}): {score} % by {best['objective']}, {model_of(best)}, {best['steps']} steps"
    return [highest, *savings(grid, name)]


def savings(grid: Sequence[Mapping[str, Any]], name: str) -> list[str]:
    """Return by which factor one line of the plot over compute needs less compute than another for equal accuracy.

    The compute follows from the power laws, at both ends of the range of accuracies that both lines have.

    Args:
        grid: Points.
        name: The score.
    """
    families = []
    for key, line in series(grid, "flops").items():
        scores = [point["scores"][name] for point in line if name in point["scores"]]
        law = laws(line, "flops").get(name)
        if law is not None and law.power > 2 * law.deviation:  # of three points or more
            families.append((", ".join(key), law, min(scores), max(scores)))
    lines = []
    for one, other in itertools.combinations(families, 2):
        low, high = max(one[2], other[2]), min(one[3], other[3])
        ratios = sorted(other[1].x(accuracy) / one[1].x(accuracy) for accuracy in (low, high))
        if low >= high or ratios[0] < 1 < ratios[1]:  # no common accuracies, or the curves cross
            continue
        if ratios[1] <= 1:
            one, other, ratios = other, one, [1 / ratio for ratio in reversed(ratios)]
        factors, where = " to ".join(f"{ratio:.2g}" for ratio in ratios), f"{100 * low:.1f} to {100 * high:.1f} %"
        lines.append(
            f"compute for equal accuracy ({name}, {where}): {one[0]} needs {factors} times less than {other[0]}"
        )
    return lines


def plot(grid: Sequence[Mapping[str, Any]]) -> Plot:
    """Plot the scores as in Figures 3 to 5 of Dosovitskiy et al. 2021.

    Each score has a row of panels: over images, unless all points have the same number, and over compute. Thin lines
    are fits.
    """
    names = list(dict.fromkeys(name for point in grid for name in point["scores"]))
    has_images = len({point["images"] for point in grid} - {None}) > 1
    panels = []
    for name in sorted(names, key=lambda name: name != FINETUNED):
        if has_images:
            panels.append(_over(grid, "images", name, "images of pre-training", 1))
        panels.append(_over(grid, "flops", name, "operations of pre-training (10¹²)", 1e12))
    down = len(names) if has_images else 1
    return Plot(panels, (5.3 * len(panels) / down, 4.6 * down), down, legend="under")


def _over(grid: Sequence[Mapping[str, Any]], axis: str, name: str, xlabel: str, unit: float) -> Panel:
    lines = []
    for index, (key, line) in enumerate(series(grid, axis).items()):
        points = [point for point in line if name in point["scores"]]
        color = of_objective(key[0]) if len(key) == 1 else f"C{index % 10}"  # several models have an objective
        x = [point[axis] for point in points]
        y = [100 * point["scores"][name] for point in points]
        lines.append(Line([value / unit for value in x], y, ", ".join(key), color, "", MARKERS[index % len(MARKERS)]))
        if law := laws(line, axis).get(name):
            between = [min(x) * (max(x) / min(x)) ** (step / 50) for step in range(51)]
            fitted = [100 * law.accuracy(value) for value in between]
            lines.append(Line([value / unit for value in between], fitted, "", color, "-", "", 0.8))
    return Panel(f"{name} (%)", lines, xlabel=xlabel, log=True, close=True)
