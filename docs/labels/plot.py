"""Draw photographs.csv and rows.csv as PNG: accuracy over the number of labels. python docs/labels/plot.py"""

import csv
import statistics
from collections import defaultdict
from pathlib import Path

from ssvit.figures.plot import Level, Line, Panel, Plot

FOLDER = Path(__file__).parent
FIGURES = {"photographs": "photographs.csv", "accuracy": "rows.csv"}
TITLES = {"shapes": "rendered shapes", "cifar10": "CIFAR-10"}
DOTTED = (0, (1, 2))
STYLES = {
    "mae": ("MAE, fine-tuned", "model", "-", "o"),
    "masked_patch": ("masked patch prediction, fine-tuned", "unchanged", "-", "^"),
    "masked_patch_decoder": ("the same with a decoder, fine-tuned", "#7a5195", "-", "v"),
    "scratch": ("from scratch", "replaced", "-", "s"),
    "frozen": ("masked patch prediction, ridge regression", "train", DOTTED, "o"),
    "random weights": ("random weights, ridge regression", "#777777", DOTTED, "D"),
    "raw pixels": ("raw pixels, ridge regression", "unchanged", DOTTED, "v"),
}


def main() -> None:
    """Draw a panel for each data set of a file."""
    for name, file in FIGURES.items():
        accuracies: dict[str, dict[str, dict[int, list[float]]]] = defaultdict(lambda: defaultdict(dict))
        with (FOLDER / file).open(newline="") as opened:
            for row in csv.DictReader(opened):
                line = accuracies[row["images"]][row["start"]]
                line.setdefault(int(row["labels"]), []).append(100 * float(row["accuracy"]))
        shown = [panel(title, accuracies[images]) for images, title in TITLES.items() if images in accuracies]
        (FOLDER / f"{name}.png").write_bytes(Plot(shown, (5.4 * len(shown), 3.8)).png())


def panel(title: str, accuracies: dict[str, dict[int, list[float]]]) -> Panel:
    """Draw the means over the seeds, with bands of the standard deviation, for each start."""
    lines: list[Line] = []
    for start, (name, color, dash, marker) in ((start, STYLES[start]) for start in STYLES if start in accuracies):
        seeds = sorted(accuracies[start].items())
        means = [statistics.fmean(values) for _, values in seeds]
        around = [statistics.stdev(values) if len(values) > 1 else 0 for _, values in seeds]
        lines.append(Line([count for count, _ in seeds], means, name, color, dash, marker, size=5, around=around))
    labels = sorted({count for line in lines for count in line.x})
    return Panel(
        "top-1 on the test images (%)", lines, [Level(10.0, "chance", form="")], "labelled training images", title,
        labels, log=True,
    )  # fmt: skip


if __name__ == "__main__":
    main()
