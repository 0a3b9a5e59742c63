"""Draw photographs.csv as photographs.png: accuracy over the number of labels. python docs/labels/plot.py"""

import csv
import statistics
from collections import defaultdict
from pathlib import Path

from ssvit.figures.plot import Level, Line, Panel, Plot

FOLDER = Path(__file__).parent
STYLES = {
    "mae": ("MAE, fine-tuned", "model", "o", "-"),
    "masked_patch": ("masked patch prediction, fine-tuned", "unchanged", "^", "-"),
    "masked_patch_decoder": ("the same with a decoder, fine-tuned", "#7a5195", "v", "-"),
    "frozen": ("MAE, frozen features", "model", "D", (0, (1, 2))),
    "scratch": ("from scratch", "replaced", "s", "-"),
}


def main() -> None:
    """Draw the means over the seeds, with bands of the standard deviation, for each start."""
    accuracies: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    with (FOLDER / "photographs.csv").open(newline="") as opened:
        for row in csv.DictReader(opened):
            accuracies[row["start"]][int(row["labels"])].append(100 * float(row["accuracy"]))
    lines: list[Line] = []
    for start, (name, color, marker, dash) in STYLES.items():
        seeds = sorted(accuracies[start].items())
        means = [statistics.fmean(values) for _, values in seeds]
        around = [statistics.stdev(values) if len(values) > 1 else 0 for _, values in seeds]
        lines.append(Line([count for count, _ in seeds], means, name, color, dash, marker, size=5, around=around))
    labels = sorted({count for line in lines for count in line.x})
    panel = Panel(
        "top-1 on the test images (%)", lines, [Level(10.0, "chance", form="")], "labelled training images",
        "CIFAR-10", labels, log=True,
    )  # fmt: skip
    (FOLDER / "photographs.png").write_bytes(Plot([panel], (5.4, 3.8)).png())


if __name__ == "__main__":
    main()
