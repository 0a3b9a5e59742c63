"""Encoders beside each other: in the panel of a probe a dot for each encoder, and the interval of its mean."""

import math
from collections.abc import Sequence
from itertools import groupby
from typing import Protocol

from matplotlib.figure import Figure

from ssvit.figures import style
from ssvit.figures.style import COLORS, INK, PALE

_WIDE, _ROW, _EDGE = 4.2, 0.3, 0.9  # inches: a panel, the line of an encoder, title and axis
_CHANCE = "chance (most frequent class)"
_NAME, _SIZE = 330, 8  # dots that a name may take, and points of its letters


class Standing(Protocol):
    """What is plotted of an encoder by a probe, in [0, 1]: see `ssvit.evaluation.report.side_by_side.Standing`."""

    @property
    def probe(self) -> str: ...
    @property
    def encoder(self) -> str: ...
    @property
    def value(self) -> float: ...
    @property
    def values(self) -> Sequence[float]: ...
    @property
    def interval(self) -> tuple[float, float]: ...
    @property
    def chance(self) -> float | None: ...


def intervals(standings: Sequence[Standing]) -> Figure:
    """The encoder in question, which comes first, is blue, and a line marks its place among the others.

    Single seeds are small open circles.
    """
    probes = [(probe, list(rows)) for probe, rows in groupby(standings, key=lambda one: one.probe)]
    across = min(3, math.ceil(math.sqrt(len(probes))))
    down = math.ceil(len(probes) / across)
    rows = max(len(of_probe) for _, of_probe in probes)
    figure, axes = style.panels(len(probes), across * _WIDE, down * (_EDGE + _ROW * rows), down=down)
    for axis, (probe, of_probe) in zip(axes, probes, strict=True):
        axis.axvline(100 * of_probe[0].value, color=COLORS["model"], linewidth=0.8, alpha=0.5, zorder=1)
        for row, one in enumerate(of_probe):
            color = INK if row else COLORS["model"]
            low, high = (100 * end for end in one.interval)
            axis.plot((low, high), (row, row), color=color, linewidth=2, solid_capstyle="butt", zorder=2)
            axis.plot(100 * one.value, row, color=color, marker="o", markersize=5, zorder=3)
            if len(one.values) > 1:
                shares = [100 * value for value in one.values]
                axis.plot(shares, [row] * len(shares), "o", markersize=3.5, color=color, fillstyle="none", zorder=4)
        if (chance := of_probe[0].chance) is not None:
            axis.axvline(100 * chance, color=INK, linewidth=1, linestyle="-.", label=_CHANCE)
        axis.set_yticks(range(len(of_probe)), [style.fitted(one.encoder, _SIZE, _NAME) for one in of_probe])
        axis.set_ylim(len(of_probe) - 0.4, -0.6)
        axis.tick_params(axis="y", labelsize=_SIZE, length=0)
        axis.set_title(probe, loc="left", fontsize=9, color=INK)
        axis.set_xlabel("score (%)")
        axis.grid(axis="x", color=PALE, linewidth=0.8)
        axis.spines[["top", "right", "left"]].set_visible(False)
    if lines := [line for axis in axes for line in axis.lines if line.get_label() == _CHANCE]:
        figure.legend(lines[:1], [_CHANCE], loc="outside lower center", frameon=False, fontsize=8)
    return figure
