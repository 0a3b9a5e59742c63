"""What checkpoint=newest takes: the result that a user means, never a control; and what a run that was begun keeps."""

import json
import os
from pathlib import Path

import pytest
import yaml

from ssvit.atomic_io import seal
from ssvit.checkpoints import configuration
from ssvit.checkpoints.checkpoint import FINETUNE, PRETRAIN
from ssvit.checkpoints.manifest import SCHEMA
from ssvit.config.command_line import CommandLine
from ssvit.loading import finding, pretrained
from ssvit.options import UserError

ENCODER = {
    "image_size": 16, "patch_size": 4, "width": 16, "depth": 2, "heads": 2, "mlp_width": None, "channels": 3,
    "class_token": True, "pooling": "patch_mean", "positions": "learned_1d", "positions_at": "stem", "dropout": 0.0,
    "stochastic_depth": 0.0, "mean": 0.5, "std": 0.25,
}  # fmt: skip
DATA = {"image_size": 16, "images": 64, "held_out_images": 32, "mean": 0.5}


def run(folder: Path, name: str, *, written: int, stage: str = PRETRAIN, step: int = 6, start: str = "", **config):
    """A run's folder with one checkpoint, written so many seconds after the others."""
    path = folder / "outputs" / name / f"step_{step:08d}"
    path.mkdir(parents=True)
    facts = {
        "schema": SCHEMA,
        "step": step,
        "stage": stage,
        "start": start,
        "encoder": ENCODER,
        "sha256": {"model.safetensors": ""},
    }
    (path / "manifest.json").write_text(json.dumps({**facts, "seal": seal(facts)}))
    os.utime(path / "manifest.json", (written, written))
    choices = {"data": "synthetic", "augment@data.augment": "inception_crop"}
    values = {"checkpoint": "newest", "recipe": {"steps": 6}, "data": DATA, **config}
    (path.parent / "config.yaml").write_text(
        yaml.safe_dump({"schema": configuration.SCHEMA, "choices": choices, **values})
    )
    return path


def newest(folder: Path, stage: str) -> tuple[str, str]:
    said = []
    found = finding.find("newest", outputs=str(folder / "outputs"), stage=stage, say=said.append)
    (line,) = said
    return found.path.parent.name, line.replace(f"{folder}/", "")


TUNED = {"stage": FINETUNE}
SCRATCH = {**TUNED, "start": "scratch"}
RATE = {**TUNED, "sweep": "table4"}


@pytest.mark.parametrize(
    ("stage", "runs", "taken", "remarks"),
    [
        (PRETRAIN, {"first": {}, "second": {}, "third": {"step": 4}, "tuned": TUNED}, "second",
         "third (at step 4 of 6)"),
        (FINETUNE, {"compare/pretrained_seed0": {**TUNED, "compare": "scratch"},
                    "compare/scratch_seed0": {**SCRATCH, "compare": "scratch"}}, "pretrained_seed0",
         "scratch_seed0 (the arm of a comparison that began with random weights)"),
        (FINETUNE, {"scratch": SCRATCH}, "scratch", "that was finished last"),
        (FINETUNE, {"tuned": TUNED, "scratch": SCRATCH}, "tuned", "outputs/scratch (began with random weights)"),
        (FINETUNE, {"table4/chosen": {**RATE, "development": None}, "table4/lr_0.1": {**RATE, "development": 0.1}},
         "chosen", "lr_0.1 (trained to choose a learning rate)"),
    ],
)  # fmt: skip
def test_the_last_finished_result_is_taken_and_the_others_are_told(tmp_path, stage, runs, taken, remarks):
    for written, (name, facts) in enumerate(runs.items()):
        run(tmp_path, name, written=written, **facts)
    name, line = newest(tmp_path, stage)
    assert name == taken
    assert remarks in line


def test_where_there_are_controls_alone_nothing_is_taken(tmp_path):
    run(tmp_path, "compare_a/scratch_seed0", written=2, **SCRATCH, compare="scratch")
    with pytest.raises(UserError, match="scratch_seed0 is the arm of a comparison"):
        newest(tmp_path, FINETUNE)


def test_what_cannot_be_read_is_passed_over(tmp_path):
    run(tmp_path, "good", written=1)
    (run(tmp_path, "damaged", written=2) / "manifest.json").write_text("{")
    (run(tmp_path, "foreign", written=3).parent / "config.yaml").write_text("data: {_target_: os.mkdir}")
    assert newest(tmp_path, PRETRAIN)[0] == "good"


def offered(monkeypatch, folder: Path, *options: str) -> str:
    """The run whose checkpoint ssvit finetune would start from with these options."""
    monkeypatch.chdir(folder)
    line = CommandLine(options)
    pretrained.offer_again(line)
    return Path(line.nodes["encoder", "pretrained"]["path"]).parent.name


def test_a_run_that_was_begun_keeps_its_checkpoint(tmp_path, monkeypatch, capsys):
    options = ("recipe.steps=6", "recipe.lr=0.1")
    first = run(tmp_path, "first", written=1)
    assert offered(monkeypatch, tmp_path, *options) == "first"
    begun = {"encoder": {"path": str(first)}, "command": CommandLine(options).identity}
    run(tmp_path, "finetune_first", written=2, stage=FINETUNE, step=3, **begun)
    run(tmp_path, "second", written=3)
    assert offered(monkeypatch, tmp_path, *options) == "first"
    assert offered(monkeypatch, tmp_path, *reversed(options)) == "first"
    assert offered(monkeypatch, tmp_path, "recipe.steps=7") == "second"
    assert offered(monkeypatch, tmp_path, *options, "overwrite=true") == "second"
    assert offered(monkeypatch, tmp_path, "name=finetune_first") == "first"
    # Once it is finished, the same command means the newest again; but not where the run is named.
    done = tmp_path / "outputs" / "finetune_first"
    facts = json.loads((done / "step_00000003" / "manifest.json").read_text()) | {"step": 6}
    (done / "step_00000006").mkdir()
    (done / "step_00000006" / "manifest.json").write_text(json.dumps({**facts, "seal": seal(facts)}))
    assert offered(monkeypatch, tmp_path, *options) == "second"
    assert offered(monkeypatch, tmp_path, "name=finetune_first") == "first"


def test_a_comparison_keeps_its_checkpoint_until_it_is_done(tmp_path, monkeypatch):
    first = run(tmp_path, "first", written=1)
    options = ("compare=scratch",)
    offered(monkeypatch, tmp_path, *options)
    begun = {"encoder": {"path": str(first)}, "command": CommandLine(options).identity, "compare": "scratch"}
    run(tmp_path, "compare_first/pretrained_seed0", written=2, stage=FINETUNE, **begun)
    study = tmp_path / "outputs" / "compare_first"
    (study / "config.yaml").write_text((study / "pretrained_seed0" / "config.yaml").read_text())
    run(tmp_path, "second", written=3)
    assert offered(monkeypatch, tmp_path, *options) == "first"
    (study / "comparison.json").write_text("{}")
    assert offered(monkeypatch, tmp_path, *options) == "second"
