"""Plot curves over steps, layers, images or time, next to baselines."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

import numpy as np

from ssvit.errors import one_line
from ssvit.figures import style
from ssvit.figures.base import Axes, Canvas, Figure
from ssvit.figures.style import COLORS, INK, PALE

Dash = str | tuple[int, tuple[int, ...]]
History = Sequence[Mapping[str, float | None]]
"""Rows of metrics, each with its "step"; None is a value that was not finite."""
DASHED: Dash = (0, (5, 2))  # for a line that may overlap another one, which is visible in the gaps
_THIN = ("train", "ink")
_MARGIN = 1.15  # factor between the last tick of a logarithmic axis and its end
_COLUMN = 2.4  # width of a column of a common legend in inches
_TITLE = 45  # maximum number of characters of a line of a title


@dataclass(frozen=True)
class Line:
    """Describe a curve through points (x, y), or single points if `dash` is "".

    Attributes:
        x: The positions.
        y: The values.
        label: The name in the legend; "": none.
        color: A name of `style.COLORS`, or a colour of matplotlib. Lines in "train" and "ink" are thin, without
            markers; a single point has one.
        dash: The line style.
        marker: The marker of a point; None: by the colour.
        width: The width of the line in points; None: by the colour.
        size: The size of a marker in points.
        around: Half-width of each value's interval: a band for a line, error bars for points.
    """

    x: Sequence[float]
    y: Sequence[float]
    label: str = ""
    color: str = "model"
    dash: Dash = "-"
    marker: str | None = None
    width: float | None = None
    size: float = 6
    around: Sequence[float] | None = None

    def draw(self, axis: Axes) -> None:
        """Draw the line on an axis of matplotlib."""
        color, thin = COLORS.get(self.color, self.color), self.color in _THIN
        usual = "" if thin and len(self.x) > 1 else "."
        axis.plot(
            self.x, self.y, label=one_line(self.label), color=color, linestyle=self.dash or "none",
            markersize=self.size, marker=usual if self.marker is None else self.marker,
            linewidth=(1 if thin else 2) if self.width is None else self.width, zorder=2.5 if thin else 2,
        )  # fmt: skip
        if self.around is not None and self.dash:
            y, around = np.asarray(self.y, float), np.asarray(self.around, float)
            axis.fill_between(self.x, y - around, y + around, color=color, alpha=0.18, linewidth=0)
        elif self.around is not None:
            axis.errorbar(self.x, self.y, self.around, fmt="none", ecolor=color, capsize=4)


@dataclass(frozen=True)
class Level:
    """Describe a horizontal line with its value in the legend, unless `form` is ""; omitted if y is None."""

    y: float | None
    label: str
    dash: str = "--"
    form: str = "{:.3g}"


@dataclass(frozen=True)
class Panel:
    """Describe a panel of a figure.

    Attributes:
        ylabel: Label of the y axis.
        lines: The curves; those without points are omitted.
        levels: The baselines.
        xlabel: Label of the x axis.
        title: The title; "": none.
        xticks: The ticks; None: matplotlib's. A logarithmic axis ends at these ticks.
        log: Whether the x axis is logarithmic.
        close: Whether the y axis starts near the minimum instead of at 0, for values that differ little.
        log_y: Whether the y axis is logarithmic.
    """

    ylabel: str
    lines: Sequence[Line] = ()
    levels: Sequence[Level] = ()
    xlabel: str = "step"
    title: str = ""
    xticks: Sequence[float] | None = None
    log: bool = False
    close: bool = False
    log_y: bool = False

    def draw(self, axis: Axes) -> None:
        """Draw the panel on an axis of matplotlib."""
        lines = [line for line in self.lines if len(line.x)]
        for line in lines:
            line.draw(axis)
        for level in self.levels:
            if level.y is not None:
                label = f"{level.label}: {level.form.format(level.y)}" if level.form else level.label
                axis.axhline(level.y, color=INK, linewidth=1, linestyle=level.dash, label=label)
        axis.set(xlabel=self.xlabel, ylabel=self.ylabel)
        if not self.log_y:
            high = axis.get_ylim()[1]
            low = min(0, axis.dataLim.y0)
            axis.set_ylim(low, max(high, 1.04 * high))  # room for markers of large values that differ little
        axis.grid(color=PALE, linewidth=0.8)
        axis.spines[["top", "right"]].set_visible(False)
        if self.title:
            axis.set_title(style.wrapped(self.title, _TITLE), loc="left", fontsize=9, color=INK)
        if self.close and lines:
            values = [
                y + side * half
                for line in lines
                for y, half in zip(line.y, line.around or [0] * len(line.y), strict=True)
                for side in (-1, 1)
            ]
            room = 0.08 * max(max(values) - min(values), 1)
            axis.set_ylim(min(values) - room, max(values) + room)
        for ticks, scale, is_log in (
            (axis.xaxis, axis.set_xscale, self.log),
            (axis.yaxis, axis.set_yscale, self.log_y),
        ):
            if is_log:
                from matplotlib.ticker import LogLocator, NullLocator

                scale("log")
                ticks.set_major_locator(LogLocator(subs=(1, 2, 5)))
                ticks.set_minor_locator(NullLocator())
                ticks.set_major_formatter("{x:,g}")
        if not self.log and all(float(x).is_integer() for line in lines for x in line.x):  # such as few steps
            from matplotlib.ticker import MaxNLocator

            axis.xaxis.set_major_locator(MaxNLocator("auto", steps=(1, 2, 5, 10), integer=True))
        if self.xticks is not None:
            axis.set_xticks(self.xticks[:: len(self.xticks) // 16 + 1])
            if self.log:
                axis.set_xlim(min(self.xticks) / _MARGIN, max(self.xticks) * _MARGIN)


@dataclass(frozen=True)
class Plot(Figure):
    """Show panels next to each other.

    Attributes:
        panels: The panels.
        size: Width and height of the figure in inches.
        down: Rows of panels.
        legend: each: one in each panel; under: one under each panel; below: one for all panels.
        shared: Whether the panels have one scale of the y axis.
    """

    panels: Sequence[Panel]
    size: tuple[float, float]
    down: int = 1
    legend: Literal["each", "under", "below"] = "each"
    shared: bool = False

    @property
    def is_informative(self) -> bool:
        """Return whether a line has at least three points."""
        return any(len(line.x) > 2 for panel in self.panels for line in panel.lines)

    def draw(self) -> Canvas:
        """Draw the panels and legends."""
        figure, axes = style.panels(len(self.panels), *self.size, down=self.down)
        for axis, panel in zip(axes, self.panels, strict=True):
            panel.draw(axis)
        if self.shared:
            top = max(axis.get_ylim()[1] for axis in axes)
            for axis in axes:
                axis.set_ylim(top=top)
        if self.legend == "below":
            pairs = (zip(*axis.get_legend_handles_labels(), strict=True) for axis in axes)
            named = {label: line for line, label in chain.from_iterable(pairs)}
            columns = max(1, min(4, int(self.size[0] / _COLUMN)))
            figure.legend(
                [*named.values()], [*named], loc="outside lower center", ncols=columns, frameon=False, fontsize=8
            )
            return figure
        under = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.15)}
        location: dict[str, Any] = under if self.legend == "under" else {"loc": "best"}
        for axis in axes:
            if axis.get_legend_handles_labels()[0]:
                # A white background keeps lines from crossing the text.
                axis.legend(facecolor="white", edgecolor="none", framealpha=0.85, fontsize=8, **location)
        return figure


def curve(
    history: History,
    key: str,
    label: str,
    color: str = "model",
    scale: float = 1,
    dash: Dash = "-",
    marker: str | None = None,
) -> Line:
    """Return the line of a metric over the steps at which it was measured.

    Args:
        history: Rows of metrics.
        key: Name of the metric.
        label: Name in the legend.
        color: Colour, see `Line`.
        scale: Factor of the values, such as 100 for per cent.
        dash: Line style.
        marker: Marker; None: by the colour.
    """
    points = [(row["step"] or 0, value * scale) for row in history if (value := row.get(key)) is not None]
    return Line([x for x, _ in points], [y for _, y in points], label, color, dash, marker)


def level(history: History, key: str, label: str, dash: str = "--", scale: float = 1, form: str = "{:.3g}") -> Level:
    """Return the last measured value of a metric as a baseline.

    Args:
        history: Rows of metrics.
        key: Name of the metric.
        label: Name in the legend.
        dash: Line style.
        scale: Factor of the value, such as 100 for per cent.
        form: Format of the value in the legend; "": none.
    """
    measured = (value * scale for row in reversed(history) if (value := row.get(key)) is not None)
    return Level(next(measured, None), label, dash, form)


def chance(share: float | None, words: str = "most frequent class") -> Level:
    """Return chance, an accuracy in [0, 1], as a baseline on an axis in per cent."""
    return Level(None if share is None else 100 * share, f"chance ({words})", "-.", "{:.1f} %")


def losses(history: History, baselines: Mapping[str, str], ylabel: str) -> Panel:
    """Return a panel of the training and held-out loss, with baselines.

    Args:
        history: Rows of metrics.
        baselines: Labels of the baselines by metric.
        ylabel: Label of the y axis.
    """
    lines = curve(history, "train/loss", "training", "train"), curve(history, "loss", "held-out")
    levels = [
        level(history, key, words, dash) for (key, words), dash in zip(baselines.items(), ("--", ":"), strict=False)
    ]
    return Panel(ylabel, lines, levels)


def feature_spread(history: History, items: str = "images") -> Panel:
    """Return a panel of the spread of features over the steps; the level marks isotropic features."""
    lines = (
        curve(history, "feature_std", "standard deviation"),
        curve(history, "feature_cosine", f"mean cosine of two {items}", "replaced"),
    )
    return Panel("features of length 1", lines, [Level(1, "standard deviation of isotropic features", form="{:.0f}")])
