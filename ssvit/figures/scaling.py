"""The picture of a scaling study: the paper's Figures 3 to 5 (images, compute) and 8 (what makes a model larger)."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from ssvit.figures.style import panels, tidy

FINETUNED, SUPERVISED, MODEL = "fine-tuned", "trained with labels", ("depth", "width", "patch")
_LINES = ("-", "--", ":", "-.")
_MARKERS = "osD^vP*X"
Point = Mapping[str, Any]
# The points along an axis that are alike but for it, by what is alike, with the fitted accuracy of each score.
Curves = Mapping[tuple[str, ...], tuple[Sequence[Point], Mapping[str, Callable[[float], float]]]]


def scaling(points: Sequence[Point], over_images: Curves, over_compute: Curves) -> Figure:
    """A row of panels for each score: over images, over compute, and over the operations of an image for models that
    differ from the smallest in depth, width or patch alone. Thin lines are fitted.
    """
    scores = list(dict.fromkeys(name for point in points for name in point["scores"]))
    scores.sort(key=lambda name: name != FINETUNED)
    figure, axes = panels(3 * len(scores), 16, 3.7 * len(scores), down=len(scores))
    for place, name in enumerate(scores):
        having = [point for point in points if name in point["scores"]]
        images, compute, models = axes[3 * place : 3 * place + 3]
        _over_images(images, over_images, name)
        _over_compute(compute, over_compute, name)
        _over_models(models, having, name)
    return figure


def _over_images(axis: Axes, curves: Curves, name: str) -> None:
    objectives = list(dict.fromkeys(key[0] for key in curves))
    models = list(dict.fromkeys(key[1:] for key in curves))
    for key, curve in curves.items():
        color, style = colormaps["tab10"](models.index(key[1:]) % 10), _LINES[objectives.index(key[0]) % 4]
        _curve(axis, curve, "images", name, f"{key[0]}, {key[1]}, {key[2]} steps", color, style)
    _finish(axis, "images of pre-training", name)


def _over_compute(axis: Axes, curves: Curves, name: str) -> None:
    for place, (key, curve) in enumerate(curves.items()):
        color = colormaps["tab10"](place % 10)
        _curve(axis, curve, "flops", name, ", ".join(key), color, "", _MARKERS[place % len(_MARKERS)])
    _finish(axis, "operations of pre-training", name)


def _over_models(axis: Axes, points: Sequence[Point], name: str) -> None:
    """Of the most images and steps; encoders to compare with differ in more than one of depth, width and patch."""
    points = [point for point in points if point["encoder"] is None]
    objectives = list(dict.fromkeys(point["objective"] for point in points))
    for objective in objectives:
        own = [point for point in points if point["objective"] == objective]
        most = max((point["images"] or np.inf, point["steps"]) for point in own)
        own = [point for point in own if (point["images"] or np.inf, point["steps"]) == most]
        base = min(own, key=lambda point: point["step_flops"])
        for place, part in enumerate(MODEL):
            others = [other for other in MODEL if other != part]
            line = [point for point in own if all(point[other] == base[other] for other in others)]
            if len(line) > 1:
                style = _LINES[objectives.index(objective) % 4]
                x, y = ([point["step_flops"] / base["step_flops"] for point in line], _per_cent(line, name))
                color = colormaps["tab10"](place)
                axis.plot(x, y, linestyle=style, marker="o", color=color, label=f"{objective}, {part}")
    _finish(axis, "operations of an image, relative to the smallest model", name)


def _curve(
    axis: Axes,
    curve: tuple[Sequence[Point], Mapping[str, Callable[[float], float]]],
    x: str,
    name: str,
    label: str,
    color: tuple[float, ...],
    style: str,
    marker: str = "o",
) -> None:
    line = [point for point in curve[0] if name in point["scores"]]
    if not line:
        return
    values = [point[x] for point in line]
    axis.plot(values, _per_cent(line, name), linestyle=style or "none", marker=marker, color=color, label=label)
    if law := curve[1].get(name):
        grid = np.geomspace(min(values), max(values), 50)
        axis.plot(grid, [100 * law(one) for one in grid], color=color, linewidth=0.8, alpha=0.6)


def _per_cent(line: Sequence[Point], name: str) -> list[float]:
    return [100 * point["scores"][name] for point in line]


def _finish(axis: Axes, xlabel: str, name: str) -> None:
    axis.set_xscale("log")
    axis.xaxis.set_minor_locator(NullLocator())
    least = min((float(np.min(np.asarray(line.get_ydata(), dtype=float))) for line in axis.lines), default=0.0)
    tidy(axis, xlabel, f"{name.replace('_', ' ')} (%)", legend=bool(axis.lines))
    axis.set_ylim(bottom=0.9 * least)
    if axis.get_legend():
        axis.legend(fontsize=6, frameon=False)
    else:
        axis.text(0.5, 0.5, "a single value", transform=axis.transAxes, ha="center")
