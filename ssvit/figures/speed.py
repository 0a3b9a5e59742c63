"""The picture of a benchmark: the rate of each contender as a bar, with its quartiles."""

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from ssvit.figures.style import COLORS, INK, PALE, panels


def speed(
    names: Sequence[str], rates: Sequence[float], quartiles: Sequence[tuple[float, float]], *, title: str, unit: str
) -> Figure:
    """One bar for each name, the first on top and in the model's colour."""
    figure, (axis,) = panels(1, 8, 1.2 + 0.4 * len(names))
    away = np.abs(np.array(quartiles).T - rates)
    colors = [COLORS["model"], *[COLORS["train"]] * (len(names) - 1)]
    bars = axis.barh(names, rates, xerr=away, color=colors, ecolor=INK, error_kw={"linewidth": 1})
    axis.bar_label(bars, labels=[f"{rate:,.1f}" for rate in rates], padding=6, color=INK, fontsize=9)
    axis.invert_yaxis()
    axis.margins(x=0.12)
    axis.set_xlabel(unit)
    axis.set_title(title, fontsize=9, color=INK)
    axis.grid(axis="x", color=PALE, linewidth=0.8)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    return figure
