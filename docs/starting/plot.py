"""Draw rows.csv as continuation.png: differences from the start, by method and probe. python docs/starting/plot.py"""

import csv
from collections import defaultdict
from pathlib import Path

import numpy as np

from ssvit.figures.base import png
from ssvit.figures.style import COLORS, INK, PALE, panels

FOLDER = Path(__file__).parent
METHODS = {
    "naive_mae": "all weights, MAE",
    "naive_simclr": "all weights, SimCLR",
    "low_simclr": "all weights, SimCLR, lr 1e-4",
    "dietcp": "DIET-CP",
    "safe_mae": "safe + heads first, MAE",
    "safe_diet": "safe + heads first, DIET",
    "safe_simclr": "safe + heads first, SimCLR",
    "without_heads_only": "safe, SimCLR",
    "long_dietcp": "DIET-CP, 2,400 steps",
    "scratch": "from random weights, MAE",
}
PROBES = {
    ("target", "ridge regression (all labels)"): "hand signs: ridge, all labels",
    ("target", "ridge regression (5 labels per class)"): "hand signs: ridge, 5 labels per class",
    ("target", "20-NN (standardised features)"): "hand signs: 20-NN",
    ("other", "20-NN (standardised features)"): "CIFAR-10 afterwards: 20-NN",
}


def main() -> None:
    """Draw a panel for each probe with a point for each seed and a bar for the mean."""
    found: dict[tuple[str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    with (FOLDER / "rows.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            chosen = row["start"] == "public" and row["images"] == "signs" and row["method"] in METHODS
            if chosen and row["difference"]:
                key = row["measured_on"], row["probe"]
                found[key][row["method"]].append(100 * float(row["difference"]))
    methods = {name: title for name, title in METHODS.items() if any(name in values for values in found.values())}
    figure, axes = panels(len(PROBES), 3.1 * len(PROBES) + 1.2, 2.6)
    for axis, (probe, title) in zip(axes, PROBES.items(), strict=True):
        for place, method in enumerate(methods):
            if not (values := found[probe][method]):  # training from random weights forgets nothing
                continue
            axis.barh(
                place,
                np.mean(values),
                color=COLORS["model" if METHODS[method].startswith("safe") else "replaced"],
                alpha=0.5,
            )
            axis.plot(values, [place] * len(values), "o", color=INK, markersize=3)
        axis.axvline(0, color=INK, linewidth=1)
        axis.set_yticks(range(len(methods)), methods.values() if axis is axes[0] else [""] * len(methods))
        axis.set_ylim(len(methods) - 0.5, -0.5)
        axis.set_title(title, loc="left", fontsize=9)
        axis.set_xlabel("difference from the start (points)")
        axis.grid(axis="x", color=PALE, linewidth=0.8)
        axis.spines[["top", "right", "left"]].set_visible(False)
    (FOLDER / "continuation.png").write_bytes(png(figure))


if __name__ == "__main__":
    main()
