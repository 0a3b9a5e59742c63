"""checkpoint=newest selects a finished result, never a control run; a run that has started keeps its checkpoint."""

import json
import os
from pathlib import Path

import pytest
import yaml

from ssvit.checkpoints.checkpoint import FINETUNE, PRETRAIN
from ssvit.config.command_line import CommandLine
from ssvit.engine.atomic_io import sealed
from ssvit.errors import UserError
from ssvit.loading import finding, pretrained

STORED = Path(__file__).parents[1] / "fixtures" / "outputs" / "masked_patch_shapes"
TUNED = {"stage": FINETUNE}
SCRATCH = {**TUNED, "start": "scratch"}
RATE = {**TUNED, "sweep": "table4"}
ARMS = {
    "compare/pretrained_seed0": {**TUNED, "compare": "scratch"},
    "compare/scratch_seed0": {**SCRATCH, "compare": "scratch"},
}


def run(folder: Path, name: str, *, written: int, stage: str = PRETRAIN, step: int = 6, start: str = "", **config):
    """Write the folder of a run with one checkpoint, whose manifest has a time in seconds."""
    path = folder / "outputs" / name / f"step_{step:08d}"
    path.mkdir(parents=True, exist_ok=True)
    manifest = json.loads((STORED / "step_00000006" / "manifest.json").read_text())
    (path / "manifest.json").write_bytes(sealed({**manifest, "step": step, "stage": stage, "start": start}))
    os.utime(path / "manifest.json", (written, written))
    values = yaml.safe_load((STORED / "config.yaml").read_text()) | {"checkpoint": "newest", **config}
    (path.parent / "config.yaml").write_text(yaml.safe_dump(values))
    return path


def newest(folder: Path, stage: str) -> str:
    lines = []
    checkpoint = finding.find_checkpoint("newest", outputs=str(folder / "outputs"), stage=stage, say=lines.append)
    assert str(checkpoint.path) in lines[0]
    return checkpoint.name


@pytest.mark.parametrize(
    ("stage", "runs", "selected"),
    [
        (PRETRAIN, {"first": {}, "second": {}, "third": {"step": 4}, "tuned": TUNED}, "second"),
        (FINETUNE, ARMS, "pretrained_seed0"),
        (FINETUNE, {"scratch": SCRATCH}, "scratch"),
        (FINETUNE, {"tuned": TUNED, "scratch": SCRATCH}, "tuned"),
        (FINETUNE, {"t/chosen": {**RATE, "development": None}, "t/lr": {**RATE, "development": 0.1}}, "chosen"),
        (FINETUNE, {"tuned": TUNED, "tuned/half": {**TUNED, "development": 0.5}}, "tuned"),
        (FINETUNE, {"compare/scratch_seed0": ARMS["compare/scratch_seed0"], "first": {}}, None),
    ],
)
def test_the_last_finished_result_is_selected(tmp_path, stage, runs, selected):
    for written, (name, facts) in enumerate(runs.items()):
        run(tmp_path, name, written=written, **facts)
    if selected is not None:
        assert newest(tmp_path, stage) == selected
        return
    with pytest.raises(UserError, match=rf"^checkpoint=newest: .*\b{stage}\b"):
        newest(tmp_path, stage)


def test_unreadable_runs_are_skipped(tmp_path):
    run(tmp_path, "good", written=1)
    (run(tmp_path, "damaged", written=2) / "manifest.json").write_text("{")
    (run(tmp_path, "foreign", written=3).parent / "config.yaml").write_text("data: {_target_: os.mkdir}")
    assert newest(tmp_path, PRETRAIN) == "good"


def selected(monkeypatch, folder: Path, *options: str) -> str:
    """Return the run whose checkpoint ssvit finetune would start from with these options."""
    monkeypatch.chdir(folder)
    line = CommandLine(options)
    pretrained.select_checkpoint_again(line)
    return Path(line.start.groups["encoder"]["path"]).parent.name


def test_a_started_run_keeps_its_checkpoint(tmp_path, monkeypatch):
    options = ("recipe.steps=6", "recipe.lr=0.1")
    first = run(tmp_path, "first", written=1)
    assert selected(monkeypatch, tmp_path, *options) == "first"
    started = {"stage": FINETUNE, "encoder": {"path": str(first)}, "command": CommandLine(options).identity}
    run(tmp_path, "tuned", written=2, step=3, **started)
    run(tmp_path, "second", written=3)
    for arguments, expected in (
        (options, "first"), (reversed(options), "first"), (["recipe.steps=7"], "second"),
        ([*options, "overwrite=true"], "second"), (["name=tuned"], "first"),
    ):  # fmt: skip
        assert selected(monkeypatch, tmp_path, *arguments) == expected
    run(tmp_path, "tuned", written=4, step=6, **started)  # once finished, the same command selects the newest again
    assert selected(monkeypatch, tmp_path, *options) == "second"
    assert selected(monkeypatch, tmp_path, "name=tuned") == "first"


def test_a_comparison_keeps_its_checkpoint_until_it_is_complete(tmp_path, monkeypatch):
    first, options = run(tmp_path, "first", written=1), ("compare=scratch",)
    started = {"encoder": {"path": str(first)}, "command": CommandLine(options).identity, "compare": "scratch"}
    run(tmp_path, "study/pretrained_seed0", written=2, stage=FINETUNE, **started)
    study = tmp_path / "outputs" / "study"
    (study / "config.yaml").write_text((study / "pretrained_seed0" / "config.yaml").read_text())
    run(tmp_path, "second", written=3)
    assert selected(monkeypatch, tmp_path, *options) == "first"
    (study / "comparison.json").write_text("{}")
    assert selected(monkeypatch, tmp_path, *options) == "second"
