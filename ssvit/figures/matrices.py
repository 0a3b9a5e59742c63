"""Show matrices: a confusion matrix, and similarities.

Shapes use k classes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from ssvit.figures import style
from ssvit.figures.base import Canvas, Figure
from ssvit.figures.style import COLORS, DPI, INK, PALE, fitted, width_of

_SIDE, _CELL = 7.5, 1.3  # maximum sides of the confusion matrix and of a cell, in inches
_NAMED, _NUMBERED = 40, 20  # maximum numbers of classes for class names, and for numbers in the cells


@dataclass(frozen=True)
class Confusion(Figure):
    """Show a confusion matrix, normalised by true class (row); rows without images are grey.

    Attributes:
        counts: Images, (k, k), or fewer rows and columns for blocks of neighbouring classes.
        classes: The names of the classes.
        title: The title.
    """

    counts: Tensor
    classes: Sequence[str]
    title: str

    def draw(self) -> Canvas:
        """Draw the matrix with a colour bar."""
        from matplotlib.colors import LinearSegmentedColormap
        from matplotlib.ticker import PercentFormatter

        shares = (self.counts.double() / self.counts.double().sum(1, keepdim=True)).numpy()
        k = len(self.classes)
        size = 9 if k <= _NUMBERED else 7
        names = [fitted(name, size, 1.3 * DPI) for name in self.classes] if k <= _NAMED else []
        side = min(_SIDE, _CELL * len(shares))
        margin = 0.6 + max((width_of(name, size) for name in names), default=0) / DPI
        title = style.wrapped(self.title, int(side * DPI / width_of("n", 10)))
        figure, (axis,) = style.panels(1, side + margin + 1.1, side + margin + 0.2 * title.count("\n") + 0.2)
        colors = LinearSegmentedColormap.from_list("shares", ["#ffffff", COLORS["model"], "#08263d"])
        edge = k - 0.5
        picture = axis.imshow(
            shares,
            cmap=colors.with_extremes(bad=PALE),
            vmin=0,
            vmax=1,
            extent=(-0.5, edge, edge, -0.5),
            interpolation="nearest",
        )
        if names:
            axis.set_xticks(range(k), names, fontsize=size, rotation=90)
            axis.set_yticks(range(k), names, fontsize=size)
            axis.tick_params(length=0)
        for (row, column), share in np.ndenumerate(shares) if k <= _NUMBERED else ():
            if share > 0.005:
                color = INK if share < 0.4 else "white"
                axis.text(column, row, f"{100 * share:.0f}", ha="center", va="center", fontsize=8, color=color)
        axis.set(xlabel="predicted class", ylabel="true class")
        axis.set_title(title, loc="left", fontsize=10, color=INK)
        percent = PercentFormatter(1, decimals=0, symbol=" %")
        bar = figure.colorbar(picture, ax=axis, shrink=0.85, format=percent)
        bar.set_label("share of the images of a true class (row)")
        axis.spines[:].set_color(PALE)
        return figure


@dataclass(frozen=True)
class Similarities(Figure):
    """Show similarities as tiles of a matrix, in colours from `low` to 1.

    Attributes:
        values: The tiles as one matrix; NaNs, between the tiles, are not drawn.
        xticks: Positions of the ticks of the columns by their labels.
        yticks: Positions of the ticks of the rows by their labels.
        low: Minimum of the colours.
        title: Title of the figure.
        measure: Name of the similarity.
        of: What the rows and columns are, as in "row of the patch"; None: they have no titles.
    """

    values: np.ndarray
    xticks: dict[str, float]
    yticks: dict[str, float]
    low: float
    title: str
    measure: str
    of: str | None = None

    def draw(self) -> Canvas:
        """Draw the matrix with a colour bar."""
        rows, columns = self.values.shape
        width = 5.5 * min(max(columns / rows, 0.5), 2.5)
        figure, (axis,) = style.panels(1, 1.2 + width, 5.5)
        picture = axis.imshow(self.values, vmin=self.low, vmax=1, cmap="viridis", interpolation="nearest")
        names = [[fitted(name, 7, 2 * DPI) for name in ticks] for ticks in (self.xticks, self.yticks)]
        room = min(np.diff([*self.xticks.values()]), default=columns) * 0.7 * DPI * width / columns
        is_dense = max(width_of(name, 7) for name in names[0]) > room
        axis.set_xticks([*self.xticks.values()], names[0], fontsize=7, rotation=90 * is_dense)
        axis.set_yticks([*self.yticks.values()], names[1], fontsize=7)
        axis.tick_params(length=0)
        axis.spines[:].set_visible(False)
        if self.of:
            axis.set(xlabel=f"column of the {self.of}", ylabel=f"row of the {self.of}")
        figure.colorbar(picture, ax=axis, shrink=0.85).set_label(self.measure)
        figure.suptitle(self.title, x=0.01, ha="left", fontsize=10, color=INK)
        return figure
