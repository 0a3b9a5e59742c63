"""The picture of a comparison of objectives: the probes as they trained, over CPU minutes."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure

from ssvit.figures.style import panels, tidy

_MARKERS = "osD^vP*Xhd<>"


def accuracy(curves: Mapping[str, Sequence[Sequence[Mapping[str, float]]]], probes: Sequence[str]) -> Figure:
    """curves: of each objective, for each seed, rows with "cpu_seconds" and the accuracies, 0 to 1, of the probes.

    The lines are means over seeds.
    """
    figure, axes = panels(len(probes), 4.8 * len(probes) + 1.2, 4)
    for axis, probe in zip(axes, probes, strict=True):
        for place, (name, runs) in enumerate(curves.items()):
            minutes = [row["cpu_seconds"] / 60 for row in runs[0]]
            mean = 100 * np.mean([[row[probe] for row in run] for run in runs], axis=0)
            marker, color = _MARKERS[place % len(_MARKERS)], colormaps["tab20"](place % 20)
            axis.plot(minutes, mean, label=name, color=color, marker=marker, markersize=4, linewidth=1.5)
        tidy(axis, "CPU minutes of pre-training", f"{probe} in training (%)", legend=axis is axes[-1])
    return figure
