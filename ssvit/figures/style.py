"""The common style of figures: colours, sizes in dots, text that fits, curves over steps.

Letters: c channels, h, w pixels.
"""

from bisect import bisect
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TypedDict, Unpack

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Colormap
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import text_to_path

from ssvit.options import one_line

INK, PALE = "#222222", "#e6e6e6"
COLORS = {"model": "#1b6ca8", "train": "#9db4c4", "masked": "#1b6ca8", "replaced": "#e07b00", "unchanged": "#3a9d5d"}
DPI = 150
DASHED = (0, (5, 2))  # of a line that may lie on another one, which shows in the gaps


class Line(TypedDict, total=False):
    """The style of a line in matplotlib."""

    color: str
    linewidth: float
    linestyle: str | tuple[int, tuple[int, ...]]
    marker: str
    markersize: float
    zorder: float


class NamedLine(Line):
    """A line with a name in the legend."""

    label: str


History = Sequence[Mapping[str, float | None]]  # rows of metrics


def panels(count: int, width: float, height: float, *, down: int = 1) -> tuple[Figure, list[Axes]]:
    """A figure of width x height inches, and its axes in `down` rows."""
    figure = Figure(figsize=(width, height), dpi=DPI, layout="constrained")
    return figure, [figure.add_subplot(down, -(-count // down), place) for place in range(1, count + 1)]


def framed(width: float, height: float, *boxes: tuple[float, float, float, float]) -> tuple[Figure, list[Axes]]:
    """A figure, and an axis in each box (left, bottom, width, height); all in dots."""
    figure = Figure(figsize=(width / DPI, height / DPI), dpi=DPI)
    return figure, [figure.add_axes((x / width, y / height, w / width, h / height)) for x, y, w, h in boxes]


def canvas(width: float, height: float) -> tuple[Figure, Axes]:
    """A figure, and one axis all over it, in dots from the top left corner."""
    figure, (axis,) = framed(width, height, (0, 0, width, height))
    axis.set(xlim=(0, width), ylim=(height, 0))
    axis.set_axis_off()
    return figure, axis


def show(axis: Axes, pixels: np.ndarray, x: float, y: float, width: float, height: float) -> None:
    """Show pixels (h, w, 3) on a `canvas`, the top left corner at (x, y). Enlarged twice or more, they keep edges."""
    interpolation = "nearest" if max(pixels.shape[:2]) <= max(width, height) / 2 else "antialiased"
    axis.imshow(pixels, extent=(x, x + width, y + height, y), interpolation=interpolation)


def width_of(text: str, size: float) -> float:
    """The width in dots of a text of `size` points."""
    return text_to_path.get_text_width_height_descent(text, FontProperties(size=size), False)[0] * DPI / 72


def fitted(name: str, size: float, room: float) -> str:
    """As much of a name as fits into `room` dots."""
    name = one_line(name)
    if width_of(name, size) <= room:
        return name
    letters = bisect(range(1, len(name)), room, key=lambda count: width_of(f"{name[:count]}…", size))
    return f"{name[:letters].rstrip()}…"


def over_steps(axis: Axes, history: History, key: str, label: str, scale: float = 1, **style: Unpack[Line]) -> None:
    """Plot a metric where it was measured."""
    points = [(row["step"], value * scale) for row in history if (value := row.get(key)) is not None]
    if points:
        axis.plot(*zip(*points, strict=True), label=label, **style)


def latest(history: History, key: str, scale: float = 1) -> float | None:
    """The last measured value of a metric."""
    return next((value * scale for row in reversed(history) if (value := row.get(key)) is not None), None)


def baseline(axis: Axes, value: float | None, label: str, linestyle: str, form: str = "{:.3g}") -> None:
    """Plot a horizontal line with its value in the legend; none if the value is None."""
    if value is not None:
        axis.axhline(value, color=INK, linewidth=1, linestyle=linestyle, label=f"{label}: {form.format(value)}")


def chance_line(axis: Axes, chance: float | None, words: str = "most frequent class") -> None:
    """Plot the accuracy of a model that ignores the image, 0 to 1, on an axis in per cent; words: of that model."""
    baseline(axis, None if chance is None else 100 * chance, f"chance ({words})", "-.", "{:.1f} %")


def scale_bar(axis: Axes, colors: Colormap, x: float, y: float, ends: tuple[str, str], note: str) -> None:
    """What the colours of a map mean, from their first to their last, on a `canvas`: middle left at (x, y)."""
    write = partial(axis.text, y=y, fontsize=7, color=INK, va="center")
    first, last = (width_of(end, 7) for end in ends)
    write(x, s=ends[0])
    show(axis, colors(np.linspace(0, 1, 256)[None])[..., :3], x + first + 20, y - 8, 120, 16)
    write(x + first + 152, s=ends[1])
    write(x + first + last + 190, s=note)


def tidy(axis: Axes, xlabel: str, ylabel: str, *, legend: bool = True) -> None:
    """Zero at the bottom, a pale grid, no frame at the top and right, and a legend."""
    axis.set(xlabel=xlabel, ylabel=ylabel)
    axis.set_ylim(bottom=0)
    axis.grid(color=PALE, linewidth=0.8)
    axis.spines[["top", "right"]].set_visible(False)
    if legend:
        # On white, so that no line runs through its words.
        axis.legend(facecolor="white", edgecolor="none", framealpha=0.85, fontsize=8, loc="best")


def evenly_spaced(total: int, count: int) -> list[int]:
    """At most `count` evenly spaced places of `total`."""
    count = min(total, count)
    return [place * total // count for place in range(count)]
