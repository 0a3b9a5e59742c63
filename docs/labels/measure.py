"""Measure accuracy over the number of labels on CIFAR-10, and append one row for each result to photographs.csv.

    python docs/labels/measure.py ROOT 0                  # the folder of CIFAR-10 and a seed: MAE and random weights
    python docs/labels/measure.py ROOT 0 masked_patch     # or masked_patch_decoder, for the same CPU time
    python docs/labels/measure.py ROOT 0 mae 29           # a pre-training that takes 29/6 of the time

Rows that photographs.csv has are skipped, and interrupted runs are continued: the same command finishes an interrupted
one. `python docs/plots.py` draws the rows. docs/labels.md describes the protocol.
"""

import csv
import sys
from pathlib import Path
from typing import Any

import ssvit

ROWS = Path(__file__).parent / "photographs.csv"
LABELS = (100, 500, 2000, 5000, 50_000)
# Equal CPU time: medians of three costs of a step, measured in turn, are 1.076 and 1.056 times that of MAE.
STEPS = {"mae": 1630, "masked_patch": 1515, "masked_patch_decoder": 1544}
OUTPUTS = "outputs/labels"


def main(root: str, seed: int, objective: str = "mae", minutes: int = 6) -> None:
    """Measure all numbers of labels with one seed; with MAE, also frozen features and training of random weights.

    Args:
        root: The folder of CIFAR-10.
        seed: Seed of pre-training and fine-tuning.
        objective: mae, masked_patch or masked_patch_decoder.
        minutes: CPU time of the pre-training on a core with AVX2.
    """
    shared: dict[str, Any] = {"outputs": OUTPUTS, "figures": "none", "seed": seed, "evaluator": []}
    steps = round(STEPS[objective] * minutes / 6)
    longer = f"_{minutes}min" * (minutes != 6)  # in names of runs
    run = ssvit.pretrain(
        objective=objective, encoder="mini", data="cifar10", steps=steps, warmup=steps // 20, evaluate_every=steps,
        probes=[], name=f"{objective}{longer}_seed{seed}", **shared, **{"data.root": root},
    )  # fmt: skip
    for labels in LABELS:
        key = ["cifar10", minutes, labels, seed]
        if objective == "mae" and not done(*key, "frozen"):
            append([[*key, "frozen", *frozen(run, labels), ""]])
        starts = {objective: "pretrained", "scratch": "scratch"} if objective == "mae" else {objective: ""}
        if done(*key, objective):
            continue
        name = f"labels{labels}_seed{seed}" + f"_{objective}" * (objective != "mae") + longer
        tuned = ssvit.finetune(
            run, subset={"images": labels}, compare="scratch" if objective == "mae" else None, seeds=1,
            evaluate_every=100_000, check_frozen=False, name=name, **shared,
        )  # fmt: skip
        if (compared := tuned.comparison) is not None:
            accuracies, images = compared["accuracy"], compared["images"]
            cells = [(accuracies[side]["mean"], images, compared["steps"][side]) for side in starts.values()]
        else:
            measured = tuned.metrics
            cells = [(measured["test/accuracy"], int(measured["test/images"]), tuned.history[-1]["step"])]
        append([[*key, start, *cell] for start, cell in zip(starts, cells, strict=True)])


def frozen(run: ssvit.Run, labels: int) -> tuple[float, int]:
    """Return the test accuracy of ridge regression on frozen features, and the number of test images.

    The layer and the penalty have the highest leave-one-out accuracy on the labelled images.
    """
    report = ssvit.evaluate(
        run, probes=["ridge"], train_images=labels, test_images=None, baselines=False, duplicates=False, figures="none",
        outputs=OUTPUTS,
    ).metrics  # fmt: skip
    (ridge,) = report["measured"]
    return ridge["values"][ridge["best"]][-1], report["metadata"]["test_images"]


def done(*cells: object) -> bool:
    """Return whether a row of photographs.csv begins with these cells."""
    with ROWS.open(newline="") as file:
        return any(row[: len(cells)] == list(map(str, cells)) for row in csv.reader(file))


def append(rows: list[list[object]]) -> None:
    """Append rows to photographs.csv."""
    with ROWS.open("a", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(rows)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:4], *map(int, sys.argv[4:]))
