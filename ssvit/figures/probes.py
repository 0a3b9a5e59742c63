"""The picture of the probes of a run: accuracy over the steps, with baselines and chance as straight lines."""

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from ssvit.figures.style import COLORS, DPI, INK, chance_line, over_steps, tidy


def probes(
    history: Sequence[Mapping[str, float | None]],
    titles: Mapping[str, str],
    *,
    start: Mapping[str, float | None],
    chance: float,
) -> Figure:
    """A panel for each probe. history: rows of metrics; titles: by the names of the probes in metrics; start: the
    metrics of the random weights, empty if they are not known; chance: an accuracy, 0 to 1.
    """
    figure = Figure(figsize=(5 * len(titles), 3.8), dpi=DPI, layout="constrained")
    for axis, (name, title) in zip(figure.subplots(1, len(titles), squeeze=False)[0], titles.items(), strict=True):
        own = {"color": COLORS["model"], "linewidth": 2, "marker": "."}
        over_steps(axis, history, name, "layer chosen without test images", 100, **own)
        over_steps(axis, history, f"{name}_last", "last layer", 100, color=COLORS["train"], linewidth=1)
        pixels = [row[f"{name}_pixels"] for row in history if row.get(f"{name}_pixels") is not None]
        for values, label, style in (([start.get(name)], "random weights", "--"), (pixels, "pixels", ":")):
            if values and values[-1] is not None:
                baseline = 100 * values[-1]
                axis.axhline(baseline, color=INK, linewidth=1, linestyle=style, label=f"{label}: {baseline:.1f}")
        chance_line(axis, chance)
        axis.set_title(title, fontsize=10, color=INK)
        axis.set_ylabel("top-1 on held-out images (%)")
        tidy(axis, "step")
    return figure
