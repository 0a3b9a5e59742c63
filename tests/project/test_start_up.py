"""The packages that commands have loaded at their first step or batch: start-up costs little more than torch."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from command import LIMIT, TINY
from images import picture, put

RUN = Path(__file__).parents[1] / "fixtures" / "outputs" / "masked_patch_synthetic"
# Packages that only some runs need, or that are needed at the end. Each takes from half as long as torch to import to
# as long.
HEAVY = (
    "lightly", "lightning_fabric", "matplotlib", "onnxruntime", "pandas", "scipy.stats", "sklearn", "sympy", "timm",
    "torch._dynamo", "torch.distributed.tensor", "torchmetrics", "torchvision", "transformers",
)  # fmt: skip
# Call a command until it calls a function for the first time, and print the loaded modules.
UNTIL = """
import json, os, sys
from ssvit.cli import find

def end(frame, event, argument):
    if event == "call" and frame.f_code.co_qualname == NAME and frame.f_code.co_filename.endswith(FILE):
        os.write(1, json.dumps(["modules", *sys.modules]).encode())
        os._exit(0)

FILE, NAME, command, *options = sys.argv[1:]
sys.setprofile(end)
find(command).call(options)
"""
STEP, BATCH = ("training/loop.py", "update"), ("evaluation/features.py", "Frozen.__call__")
EVALUATE = (f"checkpoint={RUN}", "cache=null", "fabric.accelerator=cpu")


@pytest.mark.parametrize(
    ("first", "command", "options"),
    [
        (STEP, "pretrain", TINY),
        (STEP, "pretrain", ("data=photographs", *TINY[3:])),
        (STEP, "pretrain", ("objective=mae", "recipe.optimizer=muon", *TINY[:7], *TINY[8:])),
        (STEP, "finetune", (f"checkpoint={RUN}", *TINY[8:])),
        (BATCH, "evaluate", ("output=report", "probe@probes=[knn]", *EVALUATE)),
        (BATCH, "knn", ("k=[5]", *EVALUATE)),
    ],
    ids=["pretrain", "photographs", "muon", "finetune", "evaluate", "knn"],
)
def test_a_command_has_loaded_nothing_heavy_but_torch(tmp_path, first, command, options):
    for number in range(32):
        put(tmp_path / "photographs" / "ab"[number % 2] / f"{number}.jpg", picture(number, "JPEG", (40, 40)))
    done = subprocess.run(
        [sys.executable, "-c", UNTIL, *first, command, *options, "outputs=outputs"],
        cwd=tmp_path, timeout=LIMIT, capture_output=True, text=True,
    )  # fmt: skip
    line = next((line for line in done.stdout.splitlines() if line.startswith('["modules')), "")
    assert line, done.stderr
    loaded = set(json.loads(line))
    assert "torch" in loaded
    assert loaded.isdisjoint(HEAVY)
