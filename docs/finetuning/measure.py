"""Measure fine-tuning over the number of labels, and append one row for each result to labels.csv.

    python docs/finetuning/measure.py signs FOLDER 0             # images, their folder, a seed: own and random weights
    python docs/finetuning/measure.py cifar10 FOLDER 0 WEIGHTS   # the weights of another project
    python docs/finetuning/measure.py shapes null 0

Rows that labels.csv has are skipped, and an interrupted run is continued. docs/finetuning.md describes the protocol.
"""

import csv
import sys
from pathlib import Path
from typing import Any

import ssvit

ROWS = Path(__file__).parent / "labels.csv"
LABELS = {"cifar10": (100, 500, 2000), "shapes": (100, 500, 2000, 8192), "signs": (100, 400, 1650)}


def main(images: str, root: str, seed: int, checkpoint: str | None = None) -> None:
    """Fine-tune with each number of labels from the weights of a checkpoint, or from own and from random weights."""
    shared: dict[str, Any] = {"outputs": "outputs/finetuning", "figures": "none", "seed": seed, "evaluator": []}
    data: dict[str, Any] = {"data": root} if images == "signs" else {"data": images}
    if images == "cifar10":
        data["data.root"] = root
    if images == "signs" and checkpoint is None:
        data |= {"data.image_size": 64, "encoder.patch_size": 8}
    starts: dict[str, Any] = {"another project": (checkpoint, data)}
    if checkpoint is None:
        run = ssvit.pretrain(
            objective="masked_patch" if images == "shapes" else "mae", encoder="mini", steps=1630, warmup=81,
            batch_size=32, lr=3e-3, evaluate_every=1630, probes=[], name=f"{images}_seed{seed}", **shared, **data,
        )  # fmt: skip
        starts = {"own": (run, {}), "random": ("scratch", {"encoder": "mini", **data})}
    for labels in LABELS[images]:
        for weights, (start, options) in starts.items():
            if done(cells := [images, labels, seed, weights]):
                continue
            subset = {} if labels == max(LABELS["signs"]) else {"subset": {"images": labels}}
            tuned = ssvit.finetune(
                start, evaluate_every=100_000, check_frozen=False, compare=None,
                name="_".join(map(str, cells)).replace(" ", "_"), **subset, **shared, **options,
            )  # fmt: skip
            measured = tuned.metrics
            append([*cells, measured["test/accuracy"], int(measured["test/images"]), tuned.history[-1]["step"]])


def done(cells: list[Any]) -> bool:
    """Return whether a row of labels.csv begins with these cells."""
    with ROWS.open(newline="") as file:
        return any(row[: len(cells)] == list(map(str, cells)) for row in csv.reader(file))


def append(row: list[Any]) -> None:
    """Append a row to labels.csv."""
    with ROWS.open("a", newline="") as file:
        csv.writer(file, lineterminator="\n").writerow(row)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), *sys.argv[4:])
