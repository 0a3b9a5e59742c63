"""The picture of a comparison: accuracy over the steps of each side, with the deviation over its seeds, and chance."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from ssvit.figures.style import COLORS, DASHED, chance_line, panels, tidy


def comparison(
    curves: Mapping[str, Mapping[str, Sequence[float]]],
    names: Mapping[str, str],
    *,
    finals: Mapping[str, Mapping[str, float]],
    parts: tuple[str, str],
    chance: float | None,
    measure: str = "top-1",
) -> Figure:
    """curves: "step", "mean" and "deviation" of the accuracy, 0 to 1, of each side. names: of the sides.

    finals: "mean" and "deviation" of the reported accuracy. parts: the images of the curves and of the reported
    accuracy, test or validation. chance: an accuracy, None if it is not known. measure: what is shown, top-1 or mAP.
    """
    figure, (axis,) = panels(1, 6.4, 4)
    watched, reported = parts
    of = f", {reported}" if watched != reported else ""
    styles = zip((COLORS["model"], COLORS["replaced"]), ("-", DASHED), strict=True)
    for (side, curve), (color, dashes) in zip(curves.items(), styles, strict=True):
        mean, spread = (100 * np.array(curve[name]) for name in ("mean", "deviation"))
        value, deviation = (100 * finals[side][name] for name in ("mean", "deviation"))
        label = f"{names[side]}{of}: {value:.1f} %" + (f" ± {deviation:.1f}" if deviation else "")
        name = "" if of else label
        axis.plot(curve["step"], mean, color=color, linestyle=dashes, linewidth=2, marker=".", label=name)
        axis.fill_between(curve["step"], mean - spread, mean + spread, color=color, alpha=0.2, linewidth=0)
        if of:
            last = curve["step"][-1]
            axis.errorbar(last, value, deviation, label=label, color=color, fmt="*", markersize=12, capsize=4)
    chance_line(axis, chance, "most frequent class" if measure == "top-1" else "a random order")
    tidy(axis, "step of fine-tuning", f"{measure} on the {watched} images (%)")
    return figure
