"""Measure the continuation of existing weights, and write the results of all finished runs to rows.csv.

    python docs/starting/measure.py FOLDER public signs 0                # hand signs, seed 0, all methods
    python docs/starting/measure.py FOLDER public signs 0 safe_simclr    # one method
    python docs/starting/measure.py                                      # only write rows.csv

FOLDER contains `vit-s14` (weights as transformers writes them, the start `public`), `mae` (a run of ssvit, the start
`small`), `sign-digits-100` (photographs in train/ and test/, a folder for each class) and `cifar-10-batches-py`.
Finished runs are skipped and interrupted ones are continued, so the same command finishes an interrupted one.
`python docs/plots.py` draws the rows; docs/starting.md describes the protocol.
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
COLUMNS = ("start", "images", "method", "seed", "measured_on", "probe", "accuracy", "difference", "low", "high")
OUTPUTS = Path("outputs")
STARTS = {"public": "vit-s14", "small": "mae"}
SAFE = {"objective": "simclr", "continuation": "safe", "continuation.heads_only": 0.1, "recipe.lr": 3e-3}
ALL = {"continuation.trained": "all", "continuation.lora": None}
METHODS: dict[str, dict[str, Any]] = {
    "naive_mae": {"objective": "mae"},
    "naive_simclr": {"objective": "simclr", "recipe.optimizer": "adamw"},
    "low_mae": {"objective": "mae", "recipe.optimizer": "adamw", "recipe.lr": 1e-4},
    "low_simclr": {"objective": "simclr", "recipe.optimizer": "adamw", "recipe.lr": 1e-4},
    "dietcp": {"objective": "diet_cp"},
    "safe_mae": SAFE | {"objective": "mae"},
    "safe_diet": SAFE | {"objective": "diet"},
    "safe_simclr": SAFE,
    "all_simclr": SAFE | ALL,
    "without_lora": SAFE | {"continuation.lora": None},
    "without_layer": SAFE | {"continuation.trained": 0},
    "without_heads_only": SAFE | {"continuation.heads_only": 0.0},
    "without_lower_rate": SAFE | {"continuation.encoder_lr": 1.0, "recipe.layer_decay": 1.0},
    "with_cosine": SAFE | {"continuation.anchor": {"kind": "cosine"}},
    "with_gram": SAFE | {"continuation.anchor": {"kind": "gram"}},
    "long_simclr": SAFE | {"recipe.steps": 2400},
    "long_diet": SAFE | {"objective": "diet", "recipe.steps": 2400},
    "long_dietcp": {"objective": "diet_cp", "recipe.steps": 2400},
    "scratch": {"preset": "auto"},
}
FINETUNED = "finetuned_"  # followed by a method, or by start
FINETUNE_LR = 2e-4  # chosen on a fifth of the training images
MEASURED: dict[str, Any] = {
    "probes": ["ridge", "few_shot", "knn_standardized"],
    "evaluator": [],
    "probing.train_images": 5000,
    "probing.test_images": 2000,
    "recipe.best": None,
}


def main(folder: Path, start: str, images: str, seed: int, methods: list[str]) -> None:
    """Measure methods on a data set with one seed.

    Args:
        folder: The folder of weights and images.
        start: public or small.
        images: signs, digits or cifar10; forgetting is measured on CIFAR-10, and that of cifar10 on the hand signs.
        seed: Seed of the runs.
        methods: Names of methods, or finetuned_ and the name of a method whose run exists, or finetuned_start; all
            methods if empty.
    """
    roots = {"signs": folder / "sign-digits-100", "digits": digits(folder), "cifar10": cifar(folder)}
    root, others = roots[images], roots["signs" if images == "cifar10" else "cifar10"]
    weights = folder / STARTS[start]
    for method in methods or METHODS:
        name = f"{start}_{images}_{method}_{seed}"
        shared = {"name": name, "recipe.seed": seed, "outputs": OUTPUTS, "logger": [], "workers": 0}
        if method.startswith(FINETUNED):
            source = method.removeprefix(FINETUNED)
            checkpoint = weights if source == "start" else OUTPUTS / f"{start}_{images}_{source}_{seed}"
            schedule = {"recipe.steps": 300, "recipe.warmup": 30, "recipe.batch_size": 64, "recipe.lr": FINETUNE_LR}
            ssvit.finetune(checkpoint, data=root, **shared, **schedule, **{"recipe.best": None})
        elif (OUTPUTS / name / "evaluation" / "report.json").is_file():
            continue
        elif method == "scratch":
            run = ssvit.pretrain(root, **MEASURED, **shared, preset="auto")
            ssvit.evaluate(
                run,
                against=[{"path": str(weights), "image_size": 98}],
                probes=MEASURED["probes"],
                baselines=True,
                train_images=MEASURED["probing.train_images"],
                output=str(run.folder / "evaluation"),
                outputs=OUTPUTS,
            )
        else:
            options = {"recipe.steps": 200, "recipe.batch_size": 64, "recipe.log_every": 10} | METHODS[method]
            steps = options["recipe.steps"]
            options |= {"recipe.warmup": steps // 20, "recipe.evaluate_every": steps, "recipe.save_every": steps // 2}
            ssvit.pretrain(root, checkpoint=weights, preset=None, forgetting=others, **MEASURED, **shared, **options)


def rows(run: Path) -> Iterator[dict[str, object]]:
    """Yield the scores of a run and their differences from the start, from the reports in its folder."""
    for folder, measured_on in (("evaluation", "target"), ("forgetting", "other")):
        report = run / folder / "report.json"
        standings = json.loads(report.read_text())["standings"] if report.is_file() else []
        starts = {one["probe"]: one for one in standings if one["encoder"] in ("model", "mae")}  # named after its file
        for one in standings:
            if one["encoder"] == run.name:
                difference = starts[one["probe"]]["difference"]
                low, high = difference["interval"]
                values = {"accuracy": one["value"], "difference": difference["mean"], "low": low, "high": high}
                yield {"measured_on": measured_on, "probe": one["probe"], **values}
    if (run / "confusion.png").is_file():
        yield {"measured_on": "target", "probe": "fine-tuned", "accuracy": ssvit.Run(run).metrics["test/accuracy"]}


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
    """Write the rows of all finished runs."""
    with ROWS.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        for run in sorted(OUTPUTS.glob("*_*_*_[0-9]")):
            start, images, rest = run.name.split("_", 2)
            method, _, seed = rest.rpartition("_")
            writer.writerows(
                {"start": start, "images": images, "method": method, "seed": seed, **row} for row in rows(run)
            )


if __name__ == "__main__":
    if sys.argv[1:]:
        main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]), sys.argv[5:])
    else:
        write()
