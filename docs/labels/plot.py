"""Draw rows.csv as accuracy.png: accuracy over the number of labels. python docs/labels/plot.py"""

import csv
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import NullLocator

from ssvit.figures.base import png
from ssvit.figures.style import COLORS, panels, tidy

FOLDER = Path(__file__).parent
TITLES = {"shapes": "rendered shapes", "cifar10": "CIFAR-10"}
STYLES: dict[str, tuple[str, dict[str, Any]]] = {
    "pre-trained": ("pre-trained, fine-tuned", {"color": COLORS["model"], "marker": "o", "linewidth": 2}),
    "scratch": ("from scratch", {"color": COLORS["replaced"], "marker": "s", "linewidth": 2}),
    "frozen": (
        "pre-trained, ridge regression",
        {"color": COLORS["train"], "marker": "o", "markersize": 4, "linestyle": ":"},
    ),
    "random weights": (
        "random weights, ridge regression",
        {"color": "#777777", "marker": "D", "markersize": 4, "linestyle": ":"},
    ),
    "raw pixels": (
        "raw pixels, ridge regression",
        {"color": COLORS["unchanged"], "marker": "v", "markersize": 4, "linestyle": ":"},
    ),
}


def main() -> None:
    """Draw the means over seeds, and bands from the lowest to the highest, in a panel for each data set."""
    accuracies: dict[str, dict[str, dict[int, list[float]]]] = defaultdict(lambda: defaultdict(dict))
    with (FOLDER / "rows.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            line = accuracies[row["images"]][row["start"]]
            line.setdefault(int(row["labels"]), []).append(100 * float(row["accuracy"]))
    shown = [images for images in TITLES if len(accuracies[images]["scratch"]) > 1]  # a curve has two points or more
    figure, axes = panels(len(shown), 4.2 * len(shown) + 2.2, 3.6)
    for axis, images in zip(axes, shown, strict=True):
        draw(axis, accuracies[images])
        axis.set_title(TITLES[images], fontsize=10)
    figure.legend(handles=axes[0].get_legend_handles_labels()[0], loc="outside right center", frameon=False, fontsize=8)
    (FOLDER / "accuracy.png").write_bytes(png(figure))


def draw(axis: Axes, lines: dict[str, dict[int, list[float]]]) -> None:
    """Draw the lines of one data set: for each start the accuracies in percent of each number of labels."""
    for start, (label, style) in STYLES.items():
        labels = sorted(lines[start])
        values = [lines[start][count] for count in labels]
        axis.plot(labels, [np.mean(of_seeds) for of_seeds in values], label=label, **style)
        lowest, highest = [min(of_seeds) for of_seeds in values], [max(of_seeds) for of_seeds in values]
        axis.fill_between(labels, lowest, highest, color=style["color"], alpha=0.2, linewidth=0)
    highest_of_all = max(value for line in lines.values() for values in line.values() for value in values)
    tidy(axis, "labelled training images", "top-1 accuracy on the test images (%)")
    axis.set_ylim(0, 1.06 * highest_of_all)
    axis.axhline(10, color="#222222", linewidth=1, linestyle="-.", label="chance")
    axis.set_xscale("log")
    counts = sorted({count for line in lines.values() for count in line})
    axis.set_xticks(counts, [f"{count:,}" for count in counts])
    axis.xaxis.set_minor_locator(NullLocator())


if __name__ == "__main__":
    main()
