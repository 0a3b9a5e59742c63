"""The picture of a comparison: accuracy over the steps of each side, with the deviation over its seeds."""

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from ssvit.inspection.style import COLORS, DPI, tidy

_SIDES = (COLORS["model"], COLORS["replaced"])


def comparison(curves: Mapping[str, Mapping[str, Sequence[float]]], names: Mapping[str, str]) -> Figure:
    """curves: for each side "step", "mean" and "deviation" of the accuracy, 0 to 1; names: what a side is called."""
    figure = Figure(figsize=(6.4, 4), dpi=DPI, layout="constrained")
    axis = figure.subplots()
    for (side, curve), color in zip(curves.items(), _SIDES, strict=True):
        mean = [100 * value for value in curve["mean"]]
        spread = [100 * value for value in curve["deviation"]]
        label = f"{names[side]}: {mean[-1]:.1f} %" + (f" ± {spread[-1]:.1f}" if any(spread) else "")
        axis.plot(curve["step"], mean, color=color, linewidth=2, marker=".", label=label)
        low, high = ([m + sign * s for m, s in zip(mean, spread, strict=True)] for sign in (-1, 1))
        axis.fill_between(curve["step"], low, high, color=color, alpha=0.2, linewidth=0)
    axis.set_ylabel("top-1 on the test images (%)")
    tidy(axis, "step of fine-tuning", legend="lower right")
    return figure
