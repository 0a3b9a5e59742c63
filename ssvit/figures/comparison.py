"""The picture of a comparison: accuracy over the steps of each side, with the deviation over its seeds, and chance."""

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from ssvit.figures.style import COLORS, DPI, chance_line, tidy

_SIDES = (COLORS["model"], COLORS["replaced"])


def comparison(
    curves: Mapping[str, Mapping[str, Sequence[float]]],
    names: Mapping[str, str],
    *,
    finals: Mapping[str, Mapping[str, float]],
    parts: tuple[str, str],
    chance: float | None,
) -> Figure:
    """curves: for each side "step", "mean" and "deviation" of the accuracy, 0 to 1. names: what a side is called.

    finals: for each side "mean" and "deviation" of the reported accuracy. parts: which images the curves are of, and
    which the reported accuracy: test or validation. chance: an accuracy, None if it is not known.
    """
    figure = Figure(figsize=(6.4, 4), dpi=DPI, layout="constrained")
    axis = figure.subplots()
    watched, reported = parts
    of = f", {reported}" if watched != reported else ""
    for (side, curve), color in zip(curves.items(), _SIDES, strict=True):
        mean = [100 * value for value in curve["mean"]]
        spread = [100 * value for value in curve["deviation"]]
        value, deviation = (100 * finals[side][name] for name in ("mean", "deviation"))
        label = f"{names[side]}{of}: {value:.1f} %" + (f" ± {deviation:.1f}" if deviation else "")
        axis.plot(curve["step"], mean, color=color, linewidth=2, marker=".", label="" if of else label)
        low, high = ([m + sign * s for m, s in zip(mean, spread, strict=True)] for sign in (-1, 1))
        axis.fill_between(curve["step"], low, high, color=color, alpha=0.2, linewidth=0)
        if of:
            own = {"color": color, "fmt": "*", "markersize": 12, "capsize": 4}
            axis.errorbar(curve["step"][-1], value, deviation, label=label, **own)
    if chance is not None:
        chance_line(axis, chance)
    axis.set_ylabel(f"top-1 on the {watched} images (%)")
    tidy(axis, "step of fine-tuning")
    return figure
