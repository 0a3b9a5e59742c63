"""Compare encoders in dot plots: one panel for each probe, with a dot and an interval for each encoder."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ssvit.figures import style
from ssvit.figures.base import Canvas, Figure
from ssvit.figures.style import COLORS, INK, PALE

_WIDE, _ROW, _EDGE = 4.2, 0.3, 1.1  # inches: a panel, the line of an encoder, title and axis
_NAME, _SIZE = 330, 8  # maximum width of a name in dots, and font size in points
_TITLE = 32  # maximum number of characters of a line of a title


class Dot(NamedTuple):
    """Describe an encoder by its score and the interval of the score, in [0, 1]."""

    name: str
    interval: tuple[float, float]
    value: float


@dataclass(frozen=True)
class Intervals(Figure):
    """Compare encoders by probe, on one scale. The first encoder is blue, and a line marks its mean.

    Attributes:
        probes: Encoders by title of the probe.
        chances: Chance level in [0, 1] of the probes that have one.
    """

    probes: dict[str, Sequence[Dot]]
    chances: dict[str, float]

    def draw(self) -> Canvas:
        """Draw the panels."""
        across = min(3, math.ceil(math.sqrt(len(self.probes))))
        down = math.ceil(len(self.probes) / across)
        rows = max(map(len, self.probes.values()))
        figure, axes = style.panels(len(self.probes), across * _WIDE, down * (_EDGE + _ROW * rows), down=down)
        chance: list[Any] = []
        shown = [end for dots in self.probes.values() for dot in dots for end in dot.interval]
        ends = [100 * end(*shown, *self.chances.values()) for end in (min, max)]
        for axis, (probe, dots) in zip(axes, self.probes.items(), strict=True):
            for row, dot in enumerate(dots):
                color = INK if row else COLORS["model"]
                if not row:
                    axis.axvline(100 * dot.value, color=color, linewidth=0.8, alpha=0.5, zorder=1)
                axis.plot([100 * end for end in dot.interval], (row, row), color=color, linewidth=2, zorder=2)
                axis.plot(100 * dot.value, row, color=color, marker="o", markersize=5, zorder=3)
            if probe in self.chances:
                chance.append(axis.axvline(100 * self.chances[probe], color=INK, linewidth=1, linestyle="-."))
            axis.set_yticks(range(len(dots)), [style.fitted(dot.name, _SIZE, _NAME) for dot in dots])
            axis.set_ylim(len(dots) - 0.4, -0.6)
            axis.tick_params(axis="y", labelsize=_SIZE, length=0)
            axis.set_title(style.wrapped(probe, _TITLE), loc="left", fontsize=9, color=INK)
            axis.set_xlabel("score (%)")
            axis.set_xlim(ends[0] - 2, ends[1] + 2)
            axis.grid(axis="x", color=PALE, linewidth=0.8)
            axis.spines[["top", "right", "left"]].set_visible(False)
        if chance:
            name = "chance (ignoring the image)"
            figure.legend(chance[:1], [name], loc="outside lower center", frameon=False, fontsize=8)
        return figure
