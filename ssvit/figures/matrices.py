"""Show matrices: a confusion matrix, and heat maps.

Shapes use k classes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
from torch import Tensor

from ssvit.figures import style
from ssvit.figures.base import Figure
from ssvit.figures.style import COLORS, DPI, INK, PALE, fitted, width_of

if TYPE_CHECKING:
    import matplotlib.figure

_SIDE, _CELL = 900, 200  # side of the confusion matrix, and maximum side of a cell, in dots
_NAMED, _NUMBERED = 40, 20  # maximum numbers of classes for class names, and for numbers in the cells


@dataclass(frozen=True)
class Confusion(Figure):
    """Show a confusion matrix, normalised by true class (row); rows without images are grey.

    A cell has a whole number of dots, so that none is lost by resampling. Colours are proportional to the square root
    of the share, which makes rare confusions visible.

    Attributes:
        counts: Images, (k, k), or fewer rows and columns for blocks of neighbouring classes.
        classes: The names of the classes.
        title: The title.
    """

    counts: Tensor
    classes: Sequence[str]
    title: str

    def draw(self) -> "matplotlib.figure.Figure":
        """Draw the matrix with a colour bar."""
        from matplotlib.colors import LinearSegmentedColormap, PowerNorm
        from matplotlib.ticker import PercentFormatter

        shares = (self.counts.double() / self.counts.double().sum(1, keepdim=True)).numpy()
        k = len(self.classes)
        cell = min(_CELL, max(1, _SIDE // len(shares)))
        size = 9 if k <= _NUMBERED else 7
        names = [fitted(name, size, 1.3 * DPI) for name in self.classes] if k <= _NAMED else []
        longest = max((width_of(name, size) for name in names), default=0.25 * DPI)
        upright = bool(names) and longest > 0.9 * cell
        side, left = len(shares) * cell, longest + 0.4 * DPI
        bottom = (longest if upright else 0.2 * DPI) + 0.4 * DPI
        title = "\n".join(fitted(line, 11, side + DPI) for line in self.title.split("\n"))
        top = (0.25 + 0.2 * (1 + title.count("\n"))) * DPI
        boxes = (left, bottom, side, side), (left + side + 0.15 * DPI, bottom, 0.12 * DPI, side)
        figure, (axis, bar) = style.framed(left + side + 1.1 * DPI, bottom + side + top, *boxes)
        colors = LinearSegmentedColormap.from_list("shares", ["#ffffff", COLORS["model"], "#08263d"])
        edge = k - 0.5
        picture = axis.imshow(
            shares, cmap=colors.with_extremes(bad=PALE), norm=PowerNorm(0.5, 0, 1), extent=(-0.5, edge, edge, -0.5)
        )
        if names:
            axis.set_xticks(range(k), names, fontsize=size, rotation=90 if upright else 0)
            axis.set_yticks(range(k), names, fontsize=size)
            axis.tick_params(length=0)
        for (row, column), share in np.ndenumerate(shares) if k <= _NUMBERED else ():
            if share > 0.005:
                color = INK if share < 0.12 else "white"
                axis.text(column, row, f"{100 * share:.0f}", ha="center", va="center", fontsize=8, color=color)
        axis.set(xlabel="taken for", ylabel="true class")
        axis.set_title(title, loc="left", fontsize=11, color=INK)
        ticks = [0, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 1]
        figure.colorbar(picture, cax=bar, ticks=ticks, format=PercentFormatter(1, decimals=0, symbol=" %"))
        bar.set_ylabel("share of the true class")
        for spine in (*axis.spines.values(), *bar.spines.values()):
            spine.set_color(PALE)
        return figure


class Matrix(NamedTuple):
    """Store values (rows, columns), labels of both axes, and positions of ticks by their labels."""

    values: np.ndarray
    xlabel: str
    ylabel: str
    xticks: dict[str, float]
    yticks: dict[str, float]


@dataclass(frozen=True)
class Heatmaps(Figure):
    """Show heat maps with a common colour scale from `low` to 1, whose label is `scale`."""

    matrices: Sequence[Matrix]
    title: str
    scale: str
    low: float = 0
    origin: Literal["upper", "lower"] = "upper"

    def draw(self) -> "matplotlib.figure.Figure":
        """Draw the heat maps with a colour bar."""
        # The width is proportional to the number of columns, within limits.
        shapes = [matrix.values.shape for matrix in self.matrices]
        side = 3.9 if len(shapes) > 1 else 5.5
        figure, axes = style.panels(len(shapes), 1.2 + side * sum(min(max(w / h, 0.5), 2.5) for h, w in shapes), side)
        for axis, matrix in zip(axes, self.matrices, strict=True):
            picture = axis.imshow(
                matrix.values,
                vmin=self.low,
                vmax=1,
                cmap="viridis",
                origin=self.origin,
                interpolation="nearest",
            )
            axis.set_xticks([*matrix.xticks.values()], [*matrix.xticks], fontsize=7)
            axis.set_yticks([*matrix.yticks.values()], [*matrix.yticks], fontsize=7)
            axis.tick_params(length=0)
            axis.spines[:].set_visible(False)
            axis.set(xlabel=fitted(matrix.xlabel, 10, 500), ylabel=matrix.ylabel)
        figure.colorbar(picture, ax=axes, shrink=0.85).set_label(self.scale)
        figure.suptitle(self.title, x=0.01, ha="left", fontsize=10, color=INK)
        return figure
