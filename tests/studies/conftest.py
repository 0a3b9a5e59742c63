"""Simulated commands of a study."""

import json
from pathlib import Path

import pytest
from images import put

from ssvit.engine.atomic_io import sealed
from ssvit.studies.trials import Trials


class Commands:
    """Record the options of commands, and write the files of the real commands.

    A test may replace `cost`, which returns properties of a step by the options, and `scores`, which returns the
    accuracy of each layer by the name of a run.
    """

    def __init__(self):
        self.asked = []
        self.cost = lambda given: {}
        self.scores = lambda name: {"layer1": 0.5, "layer2": 0.4}

    def __call__(self, trials, command, options, *, capture=False):
        given = dict(option.split("=", 1) for option in options)
        self.asked.append((command, given))
        if command == "cost":
            cost = {"images": 64, "preparation": 0, "flops": 10**9, "backend": "eager"} | self.cost(given)
            return f"a line before\n{json.dumps(cost)}\n"
        if command == "evaluate":
            values = {layer: [0.1, score] for layer, score in self.scores(Path(given["checkpoint"]).name).items()}
            layers = list(values)
            if given["baselines"] == "true":
                values |= {"random_layer1": [0.1, 0.2], "random_layer2": [0.1, 0.3], "pixels": [0, 0.25]}
            knn = {"measure": "knn", "columns": ["1-NN", "20-NN"], "values": values, "best": "layer1"}
            measured = [knn | {"chosen": {"random weights": "random_layer2", "pixels": "pixels"}}]
            put(Path(given["output"], "report.json"), json.dumps({"own": layers, "measured": measured}).encode())
            return ""
        if command == "finetune" and given.get("compare") != "null":
            return ""  # a comparison with random weights has no metrics of its own
        rows = [{"step": 1, "validation/accuracy": 0.1}, {"step": 2, "test/accuracy": 0.6}]
        if command == "pretrain" and given["objective"] != "supervised":
            steps = int(given["recipe.steps"])
            of_evaluator = {"held_out/prototypes_chosen": 7}  # of DINO, and no probe's
            shares = ((step, step / steps) for step in (0, steps // 2, steps))
            rows = [{"step": step, "probe/knn": share, "probe/knn_chosen": 1, **of_evaluator} for step, share in shares]
            rows.insert(1, {"step": 1, "train/loss": 3.0})
        run = trials.folder / given["name"]
        if command == "pretrain":
            manifest = {
                "schema": 2,
                "step": int(given["recipe.steps"]),
                "sha256": {"model.safetensors": ""},
                "precision": "32-true",
            }
            put(run / f"step_{manifest['step']:08d}" / "manifest.json", sealed(manifest))
        put(run / "metrics.jsonl", "".join(json.dumps(row) + "\n" for row in rows).encode())
        return ""


@pytest.fixture
def commands(monkeypatch, tmp_path):
    """The commands that the studies of a test call, in an empty folder."""
    simulated = Commands()
    monkeypatch.setattr(Trials, "call", lambda *arguments, **options: simulated(*arguments, **options))
    monkeypatch.chdir(tmp_path)
    return simulated
