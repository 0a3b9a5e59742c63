"""Measure the continuation of existing weights, and write the results of all finished runs to rows.csv.

    python docs/starting/measure.py FOLDER signs 0                # hand signs, seed 0, all methods
    python docs/starting/measure.py FOLDER signs 0 safe_simclr    # one method

FOLDER contains `vit-s14` (weights as transformers writes them), `sign-digits-100` (photographs in train/ and test/, a
folder for each class) and `cifar-10-batches-py`. Finished runs are skipped and interrupted ones are continued, so the
same command finishes an interrupted one. `python docs/starting/plot.py` draws the rows; docs/starting.md describes the
protocol.
"""

import csv
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from PIL import Image
from sklearn.datasets import load_digits
from torchvision.datasets import CIFAR10

import ssvit

ROWS = Path(__file__).parent / "rows.csv"
COLUMNS = ("images", "method", "seed", "measured_on", "probe", "accuracy", "difference", "low", "high")
STEPS, OUTPUTS = 200, "outputs"
SAFE = {"objective": "simclr", "continuation": "safe", "recipe.lr": 3e-3}
METHODS: dict[str, dict[str, Any]] = {
    "naive_mae": {"objective": "mae"},
    "naive_simclr": {"objective": "simclr"},
    "dietcp": {"objective": "diet_cp"},
    "safe_simclr": SAFE,
    "safe_mae": SAFE | {"objective": "mae"},
    "safe_diet": SAFE | {"objective": "diet"},
    "without_lora": SAFE | {"continuation.lora": None},
    "without_layer": SAFE | {"continuation.trained": 0},
    "without_heads_only": SAFE | {"continuation.heads_only": 0.0},
    "without_lower_rate": SAFE | {"continuation.encoder_lr": 1.0, "recipe.layer_decay": 1.0},
    "with_cosine": SAFE | {"continuation.anchor": {"kind": "cosine"}},
    "with_gram": SAFE | {"continuation.anchor": {"kind": "gram"}},
    "scratch": {"preset": "auto"},
}
MEASURED: dict[str, Any] = {
    "probe": ["ridge", "few_shot", "knn_standardized"],
    "evaluator": [],
    "probing.train_images": 5000,
    "probing.test_images": 2000,
    "recipe.best": None,
    "logger": [],
    "workers": 0,
}


def main(folder: Path, images: str, seed: int, methods: list[str]) -> None:
    """Measure methods on a data set with one seed.

    Args:
        folder: The folder of weights and images.
        images: signs or digits.
        seed: Seed of the runs.
        methods: Names of methods; all if empty.
    """
    root = {"signs": folder / "sign-digits-100", "digits": digits(folder)}[images]
    weights, others = folder / "vit-s14", cifar(folder)
    for method in methods or METHODS:
        name = f"{images}_{method}_{seed}"
        if (Path(OUTPUTS, name) / "evaluation" / "report.json").is_file():
            continue
        shared = {**MEASURED, **METHODS[method], "name": name, "recipe.seed": seed, "outputs": OUTPUTS}
        if method == "scratch":
            run = ssvit.pretrain(data=str(root), **shared)
            ssvit.evaluate(
                run,
                against=[{"path": str(weights), "image_size": 98}],
                probes=MEASURED["probe"],
                baselines=True,
                train_images=MEASURED["probing.train_images"],
                output=str(run.folder / "evaluation"),
                outputs=OUTPUTS,
            )
        else:
            schedule = {
                "recipe.steps": STEPS,
                "recipe.warmup": STEPS // 20,
                "recipe.batch_size": 64,
                "recipe.evaluate_every": STEPS,
                "recipe.save_every": STEPS // 2,
                "recipe.log_every": 10,
            }
            start = {"checkpoint": str(weights), "data": str(root), "preset": None, "forgetting": str(others)}
            run = ssvit.pretrain(**{**shared, **start, **schedule})
    write()


def rows(run: Path) -> Iterator[dict[str, object]]:
    """Yield the scores of a run and their differences from the start, from the reports in its folder."""
    for folder, measured_on in (("evaluation", "target"), ("forgetting", "cifar10")):
        report = run / folder / "report.json"
        standings = json.loads(report.read_text())["standings"] if report.is_file() else []
        starts = {one["probe"]: one for one in standings if one["encoder"] == "model"}  # named after its file
        for one in standings:
            if one["encoder"] == run.name:
                difference = starts[one["probe"]]["difference"]
                low, high = difference["interval"]
                values = {"accuracy": one["value"], "difference": difference["mean"], "low": low, "high": high}
                yield {"measured_on": measured_on, "probe": one["probe"], **values}


def digits(folder: Path) -> Path:
    """Write scikit-learn's digits as images of 8 pixels, the first 1,397 for training; return their folder."""
    out = folder / "digits"
    if not out.exists():
        data = load_digits()
        for number, (image, label) in enumerate(zip(data.images, data.target, strict=True)):
            file = out / ("train" if number < 1397 else "test") / str(label) / f"{number}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray((image / 16 * 255).round().astype("uint8")).save(file)
    return out


def cifar(folder: Path) -> Path:
    """Write the first images of each class of CIFAR-10, 500 for training and 200 for testing; return their folder."""
    out = folder / "cifar-folder"
    if not out.exists():
        for part, count in (("train", 500), ("test", 200)):
            left = dict.fromkeys(range(10), count)
            for number, (image, label) in enumerate(CIFAR10(folder, train=part == "train")):
                if left[label]:
                    left[label] -= 1
                    file = out / part / str(label) / f"{number}.png"
                    file.parent.mkdir(parents=True, exist_ok=True)
                    image.save(file)
    return out


def write() -> None:
    """Write the rows of all runs that have a report."""
    with ROWS.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        for report in sorted(Path(OUTPUTS).glob("*_*_[0-9]/evaluation/report.json")):
            run = report.parents[1]
            images, _, rest = run.name.partition("_")
            method, _, seed = rest.rpartition("_")
            writer.writerows({"images": images, "method": method, "seed": seed, **row} for row in rows(run))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4:])
