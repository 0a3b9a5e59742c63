"""Measure accuracy over the number of labels, and append one row for each result to rows.csv.

    python docs/labels/measure.py shapes 0            # the rendered shapes, seed 0
    python docs/labels/measure.py cifar10 0 ROOT      # CIFAR-10 in the folder ROOT

Rows that rows.csv has are skipped and interrupted runs are continued, so the same command finishes an interrupted one.
`python docs/labels/plot.py` draws the rows. docs/labels.md describes the protocol.
"""

import csv
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import ssvit

ROWS = Path(__file__).parent / "rows.csv"
COLUMNS = ("images", "labels", "seed", "start", "accuracy", "test_images")
LABELS = {"shapes": (100, 500, 2000, 8192), "cifar10": (100, 500, 2000, 50_000)}  # the last: all training images
OUTPUTS = "outputs/labels"


def main(images: str, seed: int, root: str | None = None) -> None:
    """Measure all numbers of labels of a data set with one seed.

    Args:
        images: shapes or cifar10.
        seed: The seed of pre-training, fine-tuning and random weights. The labelled images are the same for all seeds.
        root: The folder of CIFAR-10; None for the rendered shapes.
    """
    data: dict[str, Any] = {"data": images} | ({"data.root": root} if root else {})
    for labels in LABELS[images]:
        point = f"{images}_{labels}_seed{seed}"
        if not done(images, labels, seed, "scratch"):
            rows = finetuned(pretrained(data, seed), labels, seed, f"finetune_{point}")
            append({"images": images, "labels": labels, "seed": seed, **row} for row in rows)
        if not done(images, labels, seed, "raw pixels"):
            rows = ridge(pretrained(data, seed), random_weights(data, seed), labels, f"ridge_{point}")
            append({"images": images, "labels": labels, "seed": seed, **row} for row in rows)


def pretrained(data: dict[str, Any], seed: int) -> ssvit.Run:
    """Return the run of the first command; one that has finished is not trained again."""
    name = f"pretrain_{data['data']}_seed{seed}"
    return ssvit.pretrain(objective="masked_patch", seed=seed, name=name, outputs=OUTPUTS, **data)


def random_weights(data: dict[str, Any], seed: int) -> ssvit.Run:
    """Return a run whose weights are random: one step at a learning rate that changes nothing in float32."""
    return ssvit.pretrain(
        objective="masked_patch",
        seed=seed,
        steps=1,
        warmup=0,
        optimizer="adamw",
        lr=1e-12,
        weight_decay=0,
        probes=[],
        name=f"random_{data['data']}_seed{seed}",
        outputs=OUTPUTS,
        **data,
    )


def finetuned(run: ssvit.Run, labels: int, seed: int, name: str) -> list[dict[str, object]]:
    """Run the second command with another number of labels; evaluate once, at the end of training."""
    options: dict[str, Any] = {"scratch_recipe.evaluate_every": 1600}
    result = ssvit.finetune(
        run,
        experiment="finetune_shapes",
        subset={"images": labels},
        seed=seed,
        evaluate_every=200,
        name=name,
        outputs=OUTPUTS,
        **options,
    ).comparison
    assert result is not None
    sides = {"pre-trained": "pretrained", "scratch": "scratch"}
    return [
        {"start": start, "accuracy": result["accuracy"][side]["mean"], "test_images": result["images"]}
        for start, side in sides.items()
    ]


def ridge(run: ssvit.Run, random: ssvit.Run, labels: int, name: str) -> list[dict[str, object]]:
    """Fit ridge regression to frozen features and to raw pixels; layer and penalty are chosen on training images."""
    report = ssvit.evaluate(
        run,
        against=[random],
        probes=["ridge"],
        train_images=labels,
        test_images=10_000,  # at most; both data sets have no more
        duplicates=False,
        precision="auto",
        output=f"{OUTPUTS}/{name}",
        outputs=OUTPUTS,
    ).metrics
    (scores,) = report["measured"]
    sides = {"frozen": "", "random weights": random.folder.name, "raw pixels": "pixels"}
    return [
        {"start": start, "accuracy": scores["values"][scores["chosen"][side]][-1], "test_images": scores["images"]}
        for start, side in sides.items()
    ]


def done(*cells: object) -> bool:
    """Return whether a row of rows.csv begins with these cells."""
    if not ROWS.exists():
        return False
    with ROWS.open(newline="") as file:
        return any(row[: len(cells)] == list(map(str, cells)) for row in csv.reader(file))


def append(rows: Iterable[dict[str, object]]) -> None:
    """Append rows to rows.csv, with a heading in a new file."""
    is_new = not ROWS.exists()
    with ROWS.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if is_new:
            writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
