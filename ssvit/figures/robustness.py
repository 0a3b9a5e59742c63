"""The picture of robustness: accuracies of sets, errors by severity, and the share of decisions for the shape."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ssvit.figures.style import COLORS, INK, panels, tidy
from ssvit.options import one_line

Interval = tuple[float, float]  # a fraction and its standard error


class Bar(NamedTuple):
    """A set: its accuracy, that on clean images of the same classes, and chance."""

    name: str
    accuracy: Interval
    clean: Interval | None
    chance: float


def robustness(
    bars: Sequence[Bar],
    errors: Mapping[str, Mapping[str, Mapping[int, float]]],
    shapes: Mapping[str, Mapping[str, Interval]],
) -> Figure:
    """errors: by set, corruption and severity; shapes: by set and class, with the whole set's as its first."""
    count = 1 + len(errors) + len(shapes)
    figure, (first, *others) = panels(count, 5.2 * count, 4.4)
    places = range(len(bars))
    widths = [100 * bar.accuracy[0] for bar in bars]
    first.barh(places, widths, 0.6, color=COLORS["train"], xerr=[100 * bar.accuracy[1] for bar in bars], ecolor=INK)
    with_clean = [(place, bar.clean) for place, bar in enumerate(bars) if bar.clean]
    if with_clean:
        at, clean = zip(*with_clean, strict=True)
        first.errorbar(
            [100 * value for value, _ in clean],
            [place + 0.15 for place in at],
            xerr=[100 * error for _, error in clean],
            fmt="o",
            markersize=5,
            color=COLORS["model"],
            label="clean images of the same classes",
        )
    chances = [100 * bar.chance for bar in bars]
    first.vlines(chances, [place - 0.35 for place in places], [place + 0.35 for place in places], color=INK,
                 linestyle="--", label="chance (most frequent class)")  # fmt: skip
    first.set_yticks(places, [one_line(bar.name) for bar in bars])
    tidy(first, "accuracy (%)", "", legend=False)
    _downwards(first, len(bars))
    first.legend(loc="upper center", bbox_to_anchor=(0.5, -0.13), frameon=False, fontsize=8)
    for axis, (name, by_corruption) in zip(others, errors.items(), strict=False):
        for number, (corruption, by_severity) in enumerate(by_corruption.items()):
            values = [100 * one for one in by_severity.values()]
            label = one_line(corruption.replace("_", " "))
            axis.plot(list(by_severity), values, marker="o", markersize=3, color=colormaps["tab20"](number % 20),
                      label=label)  # fmt: skip
        axis.set_xticks(sorted({one for of in by_corruption.values() for one in of}))
        tidy(axis, "severity", f"error on {one_line(name)} (%)", legend=False)
        axis.set_ylim(0, 100)
        axis.legend(fontsize=6, frameon=False, ncols=2)
    for axis, (name, of_classes) in zip(others[len(errors) :], shapes.items(), strict=True):
        rows = range(len(of_classes))
        axis.errorbar(
            [100 * value for value, _ in of_classes.values()], rows,
            xerr=[100 * error for _, error in of_classes.values()], fmt="o", markersize=5, color=COLORS["model"],
        )  # fmt: skip
        axis.axvline(50, color=INK, linestyle="--")
        axis.set_yticks(rows, [one_line(name) for name in of_classes])
        tidy(axis, f"{one_line(name)}: decisions for shape, of those for shape or texture (%)", "", legend=False)
        axis.set_xlim(-5, 105)
        _downwards(axis, len(of_classes))
    return figure


def _downwards(axis: Axes, rows: int) -> None:
    """The first row is at the top."""
    axis.set_ylim(rows - 0.4, -0.6)
    axis.grid(visible=False, axis="y")
