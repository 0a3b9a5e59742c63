"""The commands train, evaluate and predict several classes of an image."""

import csv
import json

import torch
from PIL import Image


def test_the_commands_train_measure_and_predict(tmp_path, tool, monkeypatch):
    monkeypatch.chdir(tmp_path)
    generator = torch.Generator().manual_seed(0)
    with open(tmp_path / "t.csv", "w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["path", "label"])
        for i in range(80):
            present = torch.rand(3, generator=torch.Generator().manual_seed(i)) < 0.5
            own = [name for name, is_present in zip("rgb", present, strict=True) if is_present]
            pixels = torch.randint(40, (16, 16, 3), generator=generator)
            for name in own:
                pixels["rgb".index(name) * 5 :][:5, :, "rgb".index(name)] += 200
            Image.fromarray(pixels.to(torch.uint8).numpy()).save(tmp_path / f"{i}.png")
            rows.writerow([f"{i}.png", ";".join(own)])
    data = ("data=csv", f"data.table={tmp_path / 't.csv'}", "data.separator=';'", "data.image_size=16")
    short = (
        "recipe.batch_size=16", "recipe.warmup=2", "recipe.log_every=5", "recipe.precision=32-true",
        "launch.accelerator=cpu", "figures=none",
    )  # fmt: skip
    small = ("encoder.width=32", "encoder.depth=2", "encoder.heads=2")
    tool(
        "pretrain", *data, *small, *short, "name=p", "recipe.steps=4", "recipe.evaluate_every=4",
        "probes=[knn,few_shot,logistic]", "probes.knn.k=5", "probes.few_shot.shots=2",
    )  # fmt: skip
    (folder,) = tmp_path.rglob("p/metrics.jsonl")
    last = [json.loads(line) for line in folder.read_text().splitlines()][-1]
    assert 0 < min(last["probe/knn5"], last["probe/logistic"]) <= 1
    run = ("finetune", "checkpoint=" + str(folder.parent), *short, "name=f", "recipe.steps=40", "recipe.lr=0.05")
    done = tool(*run, "objective.class_weights=balanced", "objective.mixup=0.1", "recipe.evaluate_every=40")
    assert "mAP" in done.stdout
    rows = [json.loads(line) for line in (folder.parent.parent / "f/metrics.jsonl").read_text().splitlines()]
    measured = [row for row in rows if "test/map" in row]
    assert measured[-1]["test/map"] > measured[-1]["test/map_constant"] + 0.2
    answer = tool("predict", f"checkpoint={folder.parent.parent / 'f'}", "0.png", "threshold=0", "output=a.json")
    assert all(name in answer.stdout.splitlines()[-1] for name in "rgb")
    (found,) = json.loads((tmp_path / "a.json").read_text())
    assert {one["class"] for one in found["classes"]} == {"r", "g", "b"}
    assert all(one["present"] for one in found["classes"])
