"""The picture of a comparison of objectives: the probes as they trained, over CPU minutes."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure

from ssvit.figures.style import chance_line, panels, tidy

_MARKERS = "osD^vP*Xhd<>"


def accuracy(curves: Mapping[str, Sequence[Sequence[Mapping[str, float]]]], probes: Mapping[str, str]) -> Figure:
    """curves: of each objective, for each seed, rows with "cpu_seconds" and the accuracies, 0 to 1, of the probes, and
    "chance" where that is known. probes: their titles by their names. The lines are means over seeds.
    """
    figure, axes = panels(len(probes), 4.8 * len(probes) + 1.8, 4)
    step = min(0.9, 4.5 / len(curves))  # points between the widths of curves
    for axis, (probe, title) in zip(axes, probes.items(), strict=True):
        for place, (name, runs) in enumerate(curves.items()):
            minutes = [row["cpu_seconds"] / 60 for row in runs[0]]
            mean = 100 * np.mean([[row[probe] for row in run] for run in runs], axis=0)
            marker, color = _MARKERS[place % len(_MARKERS)], colormaps["tab20"](place % 20)
            above = len(curves) - 1 - place  # a curve that lies on another one is thinner, so that both show
            axis.plot(
                minutes,
                mean,
                label=name,
                color=color,
                marker=marker,
                linewidth=1.5 + step * above,
                markersize=4 + step * above,
            )
        chance_line(
            axis, next((run[0]["chance"] for runs in curves.values() for run in runs if "chance" in run[0]), None)
        )
        tidy(axis, "CPU minutes of pre-training", f"{title} in training (%)", legend=False)
        least = min(np.asarray(line.get_ydata(), dtype=float).min() for line in axis.lines)
        axis.set_ylim(bottom=0.9 * least)  # objectives differ by little beside their distance from 0
    axes[-1].legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=8)
    return figure
