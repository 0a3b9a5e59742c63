"""The packages that commands have loaded at their first step or batch: start-up costs little more than torch."""

import json
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest
from command import LIMIT, TINY, tiny_options
from images import picture, put

from ssvit.evaluation import evaluators

RUN = Path(__file__).parents[1] / "fixtures" / "outputs" / "masked_patch_shapes"
# Packages that only some runs need, or that are needed at the end. Each takes from half as long as torch to import to
# as long.
HEAVY = (
    "lightly.models", "lightning_fabric", "matplotlib", "onnxruntime", "pandas", "scipy.stats", "sklearn", "sympy",
    "timm", "torch._dynamo", "torch.distributed.tensor", "torchmetrics", "torchvision", "transformers",
)  # fmt: skip
# With torch loaded, start a process for each command, which writes the loaded modules to a file at the first call of a
# function, and one that imports what computes figures.
UNTIL = """
import importlib, json, os, sys, torch
from pathlib import Path
from ssvit.cli import find_command

def end(*arguments, **options):
    path.write_text(json.dumps([*sys.modules]))
    os._exit(0)

pretrain = find_command("pretrain")
pretrain.compose(pretrain.line(["data=shapes"]))  # packages that all commands load
for name, module, place, function, command, options in json.loads(sys.argv[1]):
    path = Path(name + ".json")
    if os.fork() == 0:
        module = importlib.import_module(module)
        setattr(getattr(module, place) if place else module, function, end)
        find_command(command).call(options)
        os._exit(1)
    os.wait()
path = Path("figures.json")
if os.fork() == 0:
    for module in json.loads(sys.argv[2]):
        importlib.import_module(module)
    end()
os.wait()
"""
DESCRIBE_FIGURES = [
    "ssvit.analysis.inside", "ssvit.studies.scaling", "ssvit.evaluation.report.figures",
    *(module.name for module in pkgutil.iter_modules(evaluators.__path__, f"{evaluators.__name__}.")),
]  # fmt: skip
STEP, BATCH = ("ssvit.training.loop", "", "update"), ("ssvit.evaluation.features", "Frozen", "__call__")
EVALUATE = (f"checkpoint={RUN}", "cache=null", "launch.accelerator=cpu")


COMMANDS = {
    "pretrain": (*STEP, "pretrain", TINY),
    "photographs": (*STEP, "pretrain", ("data=photographs", "data.image_size=16", *tiny_options("data"))),
    "muon": (*STEP, "pretrain", ("objective=mae", "recipe.optimizer=muon", *tiny_options("target"))),
    "dino": (*STEP, "pretrain", ("objective=dino", *tiny_options("target"))),
    "simclr": (*STEP, "pretrain", ("objective=simclr", *tiny_options("target"))),
    "finetune": (*STEP, "finetune", (f"checkpoint={RUN}", *tiny_options("data", "encoder", "target"))),
    "evaluate": (*BATCH, "evaluate", ("output=report", "probe@probes=[knn]", *EVALUATE)),
}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """The folder with the names of the modules that each command has loaded, and what the commands have printed."""
    folder = tmp_path_factory.mktemp("loaded")
    for number in range(32):
        put(folder / "photographs" / "ab"[number % 2] / f"{number}.jpg", picture(number, "JPEG", (40, 40)))
    cases = [(name, *case[:-1], (*case[-1], f"outputs=of_{name}")) for name, case in COMMANDS.items()]
    command = [sys.executable, "-c", UNTIL, json.dumps(cases), json.dumps(DESCRIBE_FIGURES)]
    return folder, subprocess.run(command, cwd=folder, timeout=LIMIT, capture_output=True, text=True).stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_has_loaded_nothing_heavy_but_torch(name, loaded):
    folder, errors = loaded
    file = folder / f"{name}.json"
    assert file.is_file(), errors
    modules = set(json.loads(file.read_text()))
    assert COMMANDS[name][0] in modules
    assert modules.isdisjoint(HEAVY)


def test_figures_are_computed_without_matplotlib(loaded):
    modules = set(json.loads((loaded[0] / "figures.json").read_text()))
    assert {*DESCRIBE_FIGURES} <= modules
    assert "matplotlib" not in modules
