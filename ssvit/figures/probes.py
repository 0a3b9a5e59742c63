"""Accuracy of frozen features over the steps of a run, the encoder's layers, or the columns of a probe (labels, k).

Each probe has a plot, which compares the encoder with its baselines: the same encoder with random weights, raw
pixels, and chance.
"""

import math
import re
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Protocol

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ssvit.figures import style
from ssvit.figures.style import COLORS, INK, History, NamedLine

_RANDOM, _PIXELS = "random_", "pixels"  # the prefix of one baseline's names, and the name of the other
_TWO_SIDED = 1.96  # standard errors of a 95 % interval, by the number of test images
_WIDE, _TALL = 3.6, 3.2  # inches of a panel
_ENCODER: NamedLine = {"label": "encoder", "color": COLORS["model"], "linewidth": 2, "marker": "."}
_UNTRAINED: NamedLine = {
    **_ENCODER, "label": "random weights", "color": COLORS["replaced"], "linewidth": 1.5, "linestyle": "--",
}  # fmt: skip
_IMAGE: NamedLine = {"label": "pixels", "color": INK, "linewidth": 1, "linestyle": ":"}
_COUNT = re.compile(r"\d+ labels? per class|all labels|\d+")  # what a column counts: labels, 20-NN, recall@10
_LABELS = 400  # dots that a panel has for the names of its columns


class Scores(Protocol):
    """What is plotted of a probe: by feature set a share in [0, 1] for each column, and its deviation or None."""

    @property
    def title(self) -> str: ...
    @property
    def columns(self) -> tuple[str, ...]: ...
    @property
    def values(self) -> Mapping[str, tuple[float, ...]]: ...
    @property
    def deviations(self) -> Mapping[str, tuple[float | None, ...]]: ...
    @property
    def best(self) -> str: ...
    @property
    def chance(self) -> float | None: ...
    @property
    def images(self) -> int | None: ...


def probes(
    history: History,
    titles: Mapping[str, str],
    *,
    start: Mapping[str, float | None],
    chance: float,
    words: str = "random weights",
    several: bool = False,
) -> Figure:
    """Accuracies over the steps, with binomial intervals.

    titles: by the probes' names in metrics. start: the metrics of step 0, empty if they are not known. chance: an
    accuracy, 0 to 1. words: which weights those of step 0 were. several: whether an image may have several classes, and
    accuracies are mAPs, which have no such interval.
    """
    figure, axes = style.panels(len(titles), 5 * len(titles), 3.8)
    for axis, (name, title) in zip(axes, titles.items(), strict=True):
        style.over_steps(
            axis, history, name, "layer chosen without test images", 100,
            color=COLORS["model"], linewidth=2, marker=".",
        )  # fmt: skip
        points = [
            (row["step"], row[name], row["test_images"]) for row in history if {name, "test_images"} <= row.keys()
        ]
        points = [point for point in points if None not in point]
        if points and not several:
            steps, values, images = (np.array(column, float) for column in zip(*points, strict=True))
            around = _TWO_SIDED * np.sqrt(values * (1 - values) / images)
            low, high = 100 * (values - around), 100 * (values + around)
            axis.fill_between(
                steps, low, high, color=COLORS["model"], alpha=0.15, linewidth=0, label="its 95 % interval"
            )
        style.over_steps(
            axis, history, f"{name}_last", "last layer", 100,
            color=COLORS["train"], linewidth=1.5, linestyle=style.DASHED,
        )  # fmt: skip
        style.baseline(axis, style.latest([start], name, 100), words, "--", "{:.1f}")
        style.baseline(axis, style.latest(history, f"{name}_pixels", 100), "pixels", ":", "{:.1f}")
        style.chance_line(axis, chance, *(["a random order"] if several else []))
        axis.set_title(title, fontsize=10, color=INK)
        style.tidy(axis, "step", f"{'mAP' if several else 'top-1'} on held-out images (%)")
    return figure


def by_layer(scores: Sequence[Scores], own: Sequence[str]) -> Figure:
    """The last column of each probe after each layer; own: the encoder's feature sets, in the order of layers.

    The title names the layer that was chosen without test labels, and its difference from the last layer in points.
    """
    figure, axes = _panels(len(scores))
    layers = {name: int(name.removeprefix("layer").split("_")[0]) for name in own}  # layer3_patch_mean: 3
    numbers = list(layers.values())
    for axis, found in zip(axes, scores, strict=True):
        values = {name: 100 * row[-1] for name, row in found.values.items()}
        axis.plot(numbers, [values[name] for name in own], **_ENCODER)
        untrained = [(layer, values[_RANDOM + name]) for name, layer in layers.items() if _RANDOM + name in values]
        if untrained:
            axis.plot(*zip(*untrained, strict=True), **_UNTRAINED)
        if _PIXELS in values:
            axis.axhline(values[_PIXELS], **_IMAGE)
        gain = f", {values[found.best] - values[own[-1]]:+.1f} points from the last" if found.best != own[-1] else ""
        axis.set_xticks(numbers[:: len(numbers) // 16 + 1])
        _finish(axis, f"{found.title}\nlayer {layers[found.best]} chosen{gain}", found, "layer")
    _legend(figure)
    return figure


def by_column(scores: Sequence[Scores]) -> Figure:
    """Every column of each probe, for the chosen features and their baselines; deviations are bands.

    Columns that count the same thing, such as labels, are joined by a line, evenly spaced; others are points.
    """
    figure, axes = _panels(len(scores))
    for axis, found in zip(axes, scores, strict=True):
        styles = {found.best: _ENCODER, _RANDOM + found.best: _UNTRAINED, _PIXELS: _IMAGE | {"marker": "."}}
        kinds = [_COUNT.sub("", column) for column in found.columns]
        for name, line in styles.items():
            if name not in found.values:
                continue
            mean = 100 * np.array(found.values[name])
            spread = 100 * np.array([deviation or 0 for deviation in found.deviations[name]])
            for _, run in groupby(range(len(kinds)), key=kinds.__getitem__):
                columns = list(run)
                label = "" if columns[0] else line["label"]
                axis.plot(columns, mean[columns], **line | {"markersize": 8, "label": label})
                low, high = (mean - spread)[columns], (mean + spread)[columns]
                axis.fill_between(columns, low, high, color=line["color"], alpha=0.2, linewidth=0)
        crowded = sum(style.width_of(f"{column}  ", 8) for column in found.columns) > _LABELS
        turn, end, mode = (40, "right", "anchor") if crowded else (0, "center", "default")
        places = range(len(found.columns))
        axis.set_xticks(places, found.columns, fontsize=8, rotation=turn, ha=end, rotation_mode=mode)
        axis.margins(x=0.1)
        _finish(axis, f"{found.title}\n{found.best}", found, "")
    _legend(figure)
    return figure


def _panels(count: int) -> tuple[Figure, list[Axes]]:
    across = math.ceil(math.sqrt(count))
    down = math.ceil(count / across)
    return style.panels(count, across * _WIDE, down * _TALL, down=down)


def _finish(axis: Axes, title: str, found: Scores, xlabel: str) -> None:
    style.chance_line(axis, found.chance, *(["a random order"] if found.images is None else []))
    axis.margins(y=0.1)
    axis.set_title(title, loc="left", fontsize=9, color=INK)
    style.tidy(axis, xlabel, "score (%)", legend=False)


def _legend(figure: Figure) -> None:
    """One legend for all panels, below them, so that it lies over no line."""
    lines = {str(line.get_label()): line for axis in figure.axes for line in axis.lines}
    named = {label: line for label, line in lines.items() if label and not label.startswith("_")}
    figure.legend(list(named.values()), list(named), loc="outside lower center", ncols=4, frameon=False, fontsize=8)
