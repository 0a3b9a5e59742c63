"""The package examples/mine, which docs/extending.md explains: two modules for each part, and no edit in ssvit/."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from command import one_line, tiny_options
from runs import kill_after

from ssvit.checkpoints import storage

ROOT = Path(__file__).resolve().parents[2]
OWN = ("--plugin", "mine")
FILES = ("--config-dir", "configs")
SIZES = tiny_options("target.")  # those of any target
METHOD = (*OWN, *SIZES, "objective=mine", "target=mine", "data=mine")
MEASURED = (*METHOD, "evaluator=[spread]", "probes=[mine]")
SHORT = ("recipe.steps=1", "recipe.batch_size=8", "recipe.warmup=0", "launch.accelerator=cpu", "check_frozen=false")


@pytest.fixture
def path(tmp_path):
    """Copy the example into a folder, where tests add to it; what PYTHONPATH is with it."""
    shutil.copytree(ROOT / "examples" / "mine", tmp_path / "mine")
    return os.pathsep.join((str(tmp_path), str(ROOT)))


def test_trains_resumes_fine_tunes_and_is_evaluated(path, tool, tmp_path):
    kill_after(tmp_path, "step 3/6", *MEASURED, "name=killed", PYTHONPATH=path)
    done = tool("pretrain", *MEASURED, "name=killed", "figures=end", PYTHONPATH=path)
    assert "continues after step 2" in done.stdout
    assert "spread: " in done.stdout
    assert "probe: nearest mean " in done.stdout
    assert done.stdout.splitlines()[-1].startswith("next: ")
    assert " --plugin mine" in done.stdout.splitlines()[-1]
    run, whole = (tmp_path / "outputs" / name for name in ("killed", "whole"))
    assert (run / "spread.png").is_file()
    assert len((run / "spread.csv").read_text().splitlines()) == 16
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "spread/deviation" in row] == [0, 3, 6]
    assert {"train/loss", "train/rate"} <= {key for row in rows for key in row}

    tool("pretrain", *METHOD, "name=whole", "probes=[]", PYTHONPATH=path)  # an evaluator and a probe only look on
    (_, states), (_, others) = (storage.newest(folder, print) for folder in (run, whole))
    torch.testing.assert_close(states, others, rtol=0, atol=0)
    assert states["model"]["mean"].item() > 0  # what `after_step` changed

    line = one_line(tool("finetune", f"checkpoint={run}", *SHORT, status=2))
    assert "data=mine, augment@data.augment=mine: " in line
    assert "--plugin" in line
    done = tool("finetune", *OWN, f"checkpoint={run}", *SHORT, "evaluator=[spread]", PYTHONPATH=path)
    assert "64 images" in done.stdout  # the run's own
    assert "test: " in done.stdout
    assert "spread: " in done.stdout
    options = (*OWN, f"checkpoint={run}", "launch.accelerator=cpu", "features.layer=all", "baselines=false")
    done = tool("evaluate", *options, "probes=[mine]", "report=false", PYTHONPATH=path)
    assert "nearest mean" in done.stdout
    assert "layer1_patch_mean" in done.stdout
    assert "3-NN" in tool("knn", *options, "k=[3]", PYTHONPATH=path).stdout


def test_a_target_serves_another_objective(path, tool):
    options = (*OWN, *SIZES, "target=mine", "data=mine", "probes=[]", "evaluators.held_out.images=8")
    done = tool("pretrain", *options, "recipe.steps=1", "recipe.warmup=0", PYTHONPATH=path)
    assert "squared error" in done.stdout


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["objective.hidden=2"], "objective.hidden=2: "),
        (["target.contrast=0"], "target.contrast=0: "),
        (["objective.hidden=1.0"], "objective.hidden=1.0: "),
        (["augment@data.augment=multi_crop_small"], "data.augment=MultiCrop: "),
        (["augment@data.augment=shift_crop", "data.augment.size=32"], "data.augment.size=[32,32]: "),
    ],
)
def test_a_wrong_option_is_reported_before_torch_is_loaded(path, no_torch, tool, options, words):
    trapped = os.pathsep.join((no_torch, path))
    line = one_line(tool("pretrain", *METHOD, *options, status=2, PYTHONPATH=trapped))
    assert line.startswith(f"ssvit: {words}")


@pytest.mark.parametrize("command", [("pretrain",), ("finetune", "checkpoint=scratch", "data=shapes")])
def test_an_encoder_class_of_ones_own_is_refused_before_torch_is_loaded(path, no_torch, tool, tmp_path, command):
    folder = tmp_path / "configs" / "encoder"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text("defaults: [small, _self_]\n_part_: encoder/own\n")
    (tmp_path / "mine" / "encoder.py").write_text("from ssvit.models.vit import ViT\n\nclass Own(ViT):\n    pass\n")
    trapped = os.pathsep.join((no_torch, path))
    line = one_line(tool(*command, *FILES, "encoder=mine", status=2, PYTHONPATH=trapped))
    assert "encoder=encoder/own: " in line
    assert not (tmp_path / "outputs").exists()


def test_a_file_of_ones_own_may_give_other_options_to_the_encoders_of_ssvit(path, tool, tmp_path):
    folder = tmp_path / "configs" / "encoder"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text("defaults: [small, _self_]\nactivation_checkpointing: true\n")
    options = ("encoder=mine", "recipe.steps=1", "recipe.warmup=0", "probes=[]")
    assert tool("pretrain", "--dry-run", *FILES, *SIZES, *options, PYTHONPATH=path).stdout
