"""Picture of the measures of features without labels: over the steps of a run, and over the encoder's layers."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from ssvit.figures.collapse import plot_spread
from ssvit.figures.style import COLORS, DASHED, History, Line, over_steps, panels, tidy

TITLES = {"rankme": "RankMe", "rankme_centered": "RankMe without the mean", "lidar": "LiDAR", "alpha": "alpha-ReQ"}
_LINES: Sequence[Line] = [
    Line(color=COLORS[name], linewidth=2, marker=".") for name in ("model", "unchanged", "replaced")
]


def label_free(history: History, layers: int) -> Figure:
    """Four panels: the ranks over the steps and now over the layers (dashed: at step 0), alpha-ReQ, the spread."""
    figure, (ranks, by_layer, powers, spread) = panels(4, 10, 7.2, down=2)
    numbers = range(1, layers + 1)
    first = history[0] if history[0]["step"] == 0 and len(history) > 1 else {}
    for name, line in zip(("rankme", "rankme_centered", "lidar"), _LINES, strict=True):
        over_steps(ranks, history, name, TITLES[name], **line)
        for row, style in ((history[-1], line), (first, line | Line(linewidth=1, linestyle=DASHED))):
            values = [value for layer in numbers if (value := row.get(f"{name}_layer{layer}")) is not None]
            if len(values) == layers:
                by_layer.plot(numbers, values, **style)
    if any("alpha" in row for row in history):
        over_steps(powers, history, "alpha", TITLES["alpha"], **_LINES[0])
    else:
        powers.text(0.5, 0.5, "needs 15 held-out images", ha="center", transform=powers.transAxes)
    plot_spread(spread, history)
    by_layer.set_xticks(numbers[:: layers // 16 + 1])
    tidy(ranks, "step", "directions of the features, last layer", legend=False)
    figure.legend(handles=ranks.lines, loc="outside upper left", ncols=3, frameon=False, fontsize=8)
    tidy(by_layer, "layer (dashed: at step 0)", "directions of the features", legend=False)
    tidy(powers, "step", "exponent of the eigenvalues (alpha-ReQ)", legend=False)
    return figure
