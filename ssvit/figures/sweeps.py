"""Accuracy of frozen features over the encoder's layers, and over the columns of each probe: shots, neighbours.

Every probe has a panel of its own, in which the encoder stands beside what it must beat: the same encoder with
random weights, raw pixels, and chance.
"""

import math
import re
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, Protocol

from matplotlib.figure import Figure

from ssvit.figures.style import COLORS, DPI, INK, chance_line, tidy, width_of

_RANDOM, _PIXELS = "random_", "pixels"  # what the name of a baseline begins with, and the name of the other
_WIDE, _TALL = 3.6, 3.2  # inches of a panel
_ENCODER = {"color": COLORS["model"], "linewidth": 2, "marker": "."}
_UNTRAINED = {"color": COLORS["replaced"], "linewidth": 1.5, "linestyle": "--", "marker": "."}
_IMAGE = {"color": INK, "linewidth": 1, "linestyle": ":"}
_COUNT = re.compile(r"\d+|\ball\b")  # what a column counts: 5 shot, all shot, 20-NN, recall@10
_LABELS = 400  # dots that a panel has for the names of its columns


class Scores(Protocol):
    """What is plotted of a probe: by feature set a share in [0, 1] for each column, and its deviation or None."""

    probe: str
    columns: tuple[str, ...]
    values: Mapping[str, tuple[float, ...]]
    deviations: Mapping[str, tuple[float | None, ...]]
    best: str
    chance: float | None


def _layer(name: str) -> int:
    """layer3_patch_mean -> 3: see `Reading.name`."""
    return int(name.removeprefix("layer").split("_")[0])


def by_layer(scores: Sequence[Scores], own: Sequence[str]) -> Figure:
    """The last column of each probe after each layer; own: the encoder's feature sets, in the order of layers.

    A title says which layer is best on the test images, and by how many points it beats the last.
    """
    figure, axes = _panels(len(scores))
    layers = [_layer(name) for name in own]
    for axis, found in zip(axes, scores, strict=True):
        values = {name: 100 * row[-1] for name, row in found.values.items()}
        axis.plot(layers, [values[name] for name in own], label="encoder", **_ENCODER)
        untrained = [(_layer(name), values[_RANDOM + name]) for name in own if _RANDOM + name in values]
        if untrained:
            axis.plot(*zip(*untrained, strict=True), label="random weights", **_UNTRAINED)
        if _PIXELS in values:
            axis.axhline(values[_PIXELS], label="pixels", **_IMAGE)
        if found.chance is not None:
            chance_line(axis, found.chance)
        best = max(own, key=lambda name: values[name])
        gain = values[best] - values[own[-1]]
        over = f", {gain:.1f} points over the last" if best != own[-1] else ""
        _title(axis, f"{found.probe}, {found.columns[-1]}", f"layer {_layer(best)} is best{over}")
        axis.margins(y=0.1)
        axis.set_xticks(layers[:: len(layers) // 16 + 1])
        axis.set_ylabel("score (%)")
        tidy(axis, "layer", legend=None)
    _legend(figure)
    return figure


def by_column(scores: Sequence[Scores]) -> Figure:
    """Every column of each probe, for the chosen features and their baselines; deviations are bands.

    Columns that count the same thing, as shots do, are joined by a line, evenly spaced; others are points.
    """
    figure, axes = _panels(len(scores))
    for axis, found in zip(axes, scores, strict=True):
        sides = {
            found.best: ("encoder", _ENCODER),
            _RANDOM + found.best: ("random weights", _UNTRAINED),
            _PIXELS: ("pixels", _IMAGE | {"marker": "."}),
        }
        for name, (label, style) in sides.items():
            for places in _runs(found.columns) if name in found.values else ():
                mean = [100 * found.values[name][place] for place in places]
                spread = [100 * (found.deviations[name][place] or 0) for place in places]
                axis.plot(places, mean, label="" if places[0] else label, **style | {"markersize": 8})
                low, high = ([m + sign * s for m, s in zip(mean, spread, strict=True)] for sign in (-1, 1))
                axis.fill_between(places, low, high, color=style["color"], alpha=0.2, linewidth=0)
        if found.chance is not None:
            chance_line(axis, found.chance)
        _title(axis, found.probe, found.best)
        crowded = sum(width_of(f"{column}  ", 8) for column in found.columns) > _LABELS
        upright = {"rotation": 40, "ha": "right", "rotation_mode": "anchor"} if crowded else {}
        axis.set_xticks(range(len(found.columns)), found.columns, fontsize=8, **upright)
        axis.margins(x=0.1, y=0.1)
        axis.set_ylabel("score (%)")
        tidy(axis, "", legend=None)
    _legend(figure)
    return figure


def _runs(columns: Sequence[str]) -> list[list[int]]:
    """Places of neighbouring columns that differ only in what they count."""

    def unit(place: int) -> str:
        return _COUNT.sub("", columns[place])

    return [list(run) for _, run in groupby(range(len(columns)), key=unit)]


def _panels(count: int) -> tuple[Figure, list[Any]]:
    across = math.ceil(math.sqrt(count))
    down = math.ceil(count / across)
    figure = Figure(figsize=(across * _WIDE, down * _TALL), dpi=DPI, layout="constrained")
    axes = list(figure.subplots(down, across, squeeze=False).flat)
    for axis in axes[count:]:
        axis.remove()
    return figure, axes[:count]


def _legend(figure: Figure) -> None:
    """One for all panels, below them, so that it lies over no line."""
    drawn = {line.get_label(): line for axis in figure.axes for line in axis.lines}
    named = {label: line for label, line in drawn.items() if label and not label.startswith("_")}
    figure.legend(named.values(), named, loc="outside lower center", ncols=4, frameon=False, fontsize=8)


def _title(axis: Any, probe: str, says: str) -> None:
    axis.set_title(f"{probe.replace('_', ' ')}\n{says}", loc="left", fontsize=9, color=INK, parse_math=False)
