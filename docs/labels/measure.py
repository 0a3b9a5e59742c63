"""Measure accuracy over the number of labels on CIFAR-10, and append one row for each result to photographs.csv.

    python docs/labels/measure.py ROOT 0      # the folder of CIFAR-10 and a seed

Rows that photographs.csv has are skipped, and interrupted runs are continued: the same command finishes an interrupted
one. `python docs/labels/plot.py` draws the rows. docs/labels.md describes the protocol.
"""

import csv
import sys
from pathlib import Path
from typing import Any

import ssvit

ROWS = Path(__file__).parent / "photographs.csv"
LABELS = (100, 500, 2000, 5000)
OUTPUTS = "outputs/labels"


def main(root: str, seed: int) -> None:
    """Measure all numbers of labels with one seed of pre-training, fine-tuning and random weights."""
    shared: dict[str, Any] = {"outputs": OUTPUTS, "figures": "none", "seed": seed, "evaluator": []}
    run = ssvit.pretrain(
        objective="mae", encoder="mini", data="cifar10", steps=1630, warmup=81, evaluate_every=1630, probes=[],
        name=f"mae_seed{seed}", **shared, **{"data.root": root},
    )  # fmt: skip
    for labels in LABELS:
        key = ["cifar10", labels, seed]
        if done(*key):
            continue
        comparison = ssvit.finetune(
            run, subset={"images": labels}, compare="scratch", seeds=1, evaluate_every=100_000, check_frozen=False,
            name=f"labels{labels}_seed{seed}", **shared,
        ).comparison  # fmt: skip
        assert comparison is not None
        sides = {"pre-trained": "pretrained", "scratch": "scratch"}
        accuracies = {start: comparison["accuracy"][side]["mean"] for start, side in sides.items()}
        steps = {start: comparison["steps"][side] for start, side in sides.items()}
        cells = ([start, accuracies[start], comparison["images"], steps[start]] for start in sides)
        append([[*key, *row] for row in cells])


def done(*cells: object) -> bool:
    """Return whether a row of photographs.csv begins with these cells."""
    with ROWS.open(newline="") as file:
        return any(row[: len(cells)] == list(map(str, cells)) for row in csv.reader(file))


def append(rows: list[list[object]]) -> None:
    """Append rows to photographs.csv."""
    with ROWS.open("a", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(rows)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
