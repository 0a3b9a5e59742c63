"""The picture of a scaling study: the paper's Figures 3 to 5 (images, compute) and 8 (what makes a model larger)."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from ssvit.figures.style import panels, tidy

FINETUNED, SUPERVISED, MODEL = "fine-tuned", "trained with labels", ("depth", "width", "patch")
_LINES = ("-", "--", ":", "-.")
_MARKERS = "osD^vP*X"
Point = Mapping[str, Any]
# The points along an axis that are alike but for it, by what is alike, with the fitted accuracy of each score.
Curves = Mapping[tuple[str, ...], tuple[Sequence[Point], Mapping[str, Callable[[float], float]]]]


def scaling(points: Sequence[Point], over_images: Curves, over_compute: Curves) -> Figure:
    """Panels of each score: over images, over compute, and over the operations of an image for models that differ from
    the smallest in depth, width or patch alone.

    Thin lines are fitted. What has a single value gets no panel. The scores stand below each other, with a legend above
    each column, or side by side where there is one panel for each.
    """
    scores = list(dict.fromkeys(name for point in points for name in point["scores"]))
    scores.sort(key=lambda name: name != FINETUNED)
    columns: list[Callable[[Axes, str], None]] = [lambda axis, name: _over_compute(axis, over_compute, name)]
    if len({point["images"] for point in points} - {None}) > 1:
        columns.insert(0, lambda axis, name: _over_images(axis, over_images, name))
    if lines := _by_part(points):
        columns.append(lambda axis, name: _over_models(axis, lines, name))
    down, across = (len(scores), len(columns)) if len(columns) > 1 else (1, len(scores))
    figure, axes = panels(down * across, 5.3 * across, 3.7 * down + (down == 1), down=down)
    for place, axis in enumerate(axes):
        columns[place % len(columns)](axis, scores[place // len(columns)])
    if len(columns) == 1:
        figure.legend(handles=axes[0].get_legend_handles_labels()[0], loc="outside upper left", ncols=3, frameon=False)
        return figure
    for axis in (axis for axis in axes[: len(columns)] if axis.lines):
        axis.legend(fontsize=7, frameon=False, ncols=2, loc="lower left", bbox_to_anchor=(0, 1.02))
    return figure


def _over_images(axis: Axes, curves: Curves, name: str) -> None:
    objectives = list(dict.fromkeys(key[0] for key in curves))
    models = list(dict.fromkeys(key[1:] for key in curves))
    for key, curve in curves.items():
        color, objective = colormaps["tab10"](models.index(key[1:]) % 10), objectives.index(key[0])
        label = f"{key[0]}, {key[1]}, {key[2]} steps"
        _curve(axis, curve, "images", name, label, color, _LINES[objective % 4], _MARKERS[objective % 8])
    _finish(axis, "images of pre-training", name)


def _over_compute(axis: Axes, curves: Curves, name: str) -> None:
    for place, (key, curve) in enumerate(curves.items()):
        color = colormaps["tab10"](place % 10)
        label = f"{key[0]}, ViT" if len(key) == 1 and max(map(len, curves)) > 1 else ", ".join(key)
        _curve(axis, curve, "flops", name, label, color, "", _MARKERS[place % 8], unit=1e12)
    _finish(axis, "operations of pre-training (10¹²)", name)


class _Line(NamedTuple):
    """Models of an objective that differ in one part, with the most images and steps."""

    number: int  # of the objective
    part: str
    base: Point  # the smallest model
    line: Sequence[Point]


def _by_part(points: Sequence[Point]) -> list[_Line]:
    """The lines of two models or more; encoders to compare with differ in more than one part."""
    points = [point for point in points if point["encoder"] is None]
    found = []
    for number, objective in enumerate(dict.fromkeys(point["objective"] for point in points)):
        own = [point for point in points if point["objective"] == objective]
        most = max((point["images"] or np.inf, point["steps"]) for point in own)
        own = [point for point in own if (point["images"] or np.inf, point["steps"]) == most]
        base = min(own, key=lambda point: point["step_flops"])
        for part in MODEL:
            others = [other for other in MODEL if other != part]
            line = [point for point in own if all(point[other] == base[other] for other in others)]
            if len(line) > 1:
                found.append(_Line(number, part, base, line))
    return found


def _over_models(axis: Axes, lines: Sequence[_Line], name: str) -> None:
    for number, part, base, every in lines:
        line = [point for point in every if name in point["scores"]]
        if not line:
            continue
        style, marker, color = _LINES[number % 4], _MARKERS[number % 8], colormaps["tab10"](MODEL.index(part))
        x, label = [point["step_flops"] / base["step_flops"] for point in line], f"{base['objective']}, {part}"
        axis.plot(x, _per_cent(line, name), linestyle=style, marker=marker, color=color, label=label)
    _finish(axis, "operations of an image, relative to the smallest model", name)


def _curve(
    axis: Axes,
    curve: tuple[Sequence[Point], Mapping[str, Callable[[float], float]]],
    x: str,
    name: str,
    label: str,
    color: tuple[float, ...],
    style: str,
    marker: str,
    unit: float = 1.0,
) -> None:
    line = [point for point in curve[0] if name in point["scores"]]
    if not line:
        return
    values = np.array([point[x] for point in line], dtype=float)
    axis.plot(values / unit, _per_cent(line, name), linestyle=style or "none", marker=marker, color=color, label=label)
    if law := curve[1].get(name):
        grid = np.geomspace(values.min(), values.max(), 50)
        axis.plot(grid / unit, [100 * law(one) for one in grid], color=color, linewidth=0.8, alpha=0.6)


def _per_cent(line: Sequence[Point], name: str) -> list[float]:
    return [100 * point["scores"][name] for point in line]


def _finish(axis: Axes, xlabel: str, name: str) -> None:
    """Plain numbers on the axes. The accuracies do not begin at zero, since they differ by little."""
    axis.set_xscale("log")
    axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter("{x:,g}")
    tidy(axis, xlabel, f"{name} (%)", legend=False)
    if not axis.lines:  # no point of this column has the score
        return
    shown = np.concatenate([np.asarray(line.get_ydata(), dtype=float) for line in axis.lines])
    room = 0.08 * max(shown.max() - shown.min(), 1)
    axis.set_ylim(shown.min() - room, shown.max() + room)
