"""Draw the accuracies on CIFAR-10 as results.png: python docs/distillation/plot.py"""

import json
from pathlib import Path

import numpy as np

from ssvit.figures.base import png
from ssvit.figures.style import COLORS, INK, PALE, panels
from ssvit.studies import methods

FOLDER = Path(__file__).parent
METHODS = {  # rows and title
    "6 min: MAE": ("cifar10_6min", "mae"),
    "6 min: distill": ("cifar10_6min", "distill"),
    "6 min, teacher not counted: distill": ("uncounted_6min", "distill"),
    "29 min: MAE, AdamW": ("../methods/cifar10_29min", "mae"),
    "29 min: distill": ("cifar10_29min", "distill"),
    "29 min: distill, cached features": ("cifar10_29min", "cached"),
}
PROBES = {
    "ridge": "ridge regression, 20,000 labels",
    "few_shot": "ridge regression, 100 labels per class",
    "knn": "20-NN",
}


def main() -> None:
    """Draw a panel for each probe with a point for each seed and a bar for the mean."""
    teacher = methods.probes(json.loads((FOLDER / "teacher.json").read_text()))
    figure, axes = panels(len(PROBES), 3.3 * len(PROBES) + 1.6, 2.3)
    for axis, (probe, title) in zip(axes, PROBES.items(), strict=True):
        for place, (table, objective) in enumerate(METHODS.values()):
            files = sorted((FOLDER / table).glob(f"{objective}_seed*.json"))
            values = [100 * json.loads(file.read_text())["probes"][probe]["chosen"] for file in files]
            color = COLORS["replaced" if objective == "mae" else "model"]
            axis.barh(place, np.mean(values), color=color, alpha=0.5)
            axis.plot(values, [place] * len(values), "o", color=INK, markersize=3)
        axis.axvline(100 * teacher[probe]["chosen"], color=INK, linewidth=1, linestyle="--")
        axis.set_yticks(range(len(METHODS)), METHODS if axis is axes[0] else [""] * len(METHODS))
        axis.invert_yaxis()
        axis.set_title(title, loc="left", fontsize=9)
        axis.set_xlabel("test accuracy (%)")
        axis.grid(axis="x", color=PALE, linewidth=0.8)
        axis.spines[["top", "right", "left"]].set_visible(False)
    (FOLDER / "results.png").write_bytes(png(figure))


if __name__ == "__main__":
    main()
