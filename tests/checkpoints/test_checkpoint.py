"""Checkpoints are complete or absent, verified, and execute no code."""

import errno
import hashlib
import json
import os
import pickle
import random
import shutil
from pathlib import Path

import pytest
import tiny
import torch

from ssvit.checkpoints import storage
from ssvit.checkpoints.checkpoint import Checkpoint
from ssvit.checkpoints.manifest import CheckpointError, read_manifest
from ssvit.data.batch import Batch
from ssvit.engine import atomic_io
from ssvit.errors import OptionError, UserError
from ssvit.exchange.files import ForeignError
from ssvit.loading.encoder import load_classifier, load_encoder
from ssvit.loading.options import LoadEncoder

STORED = Path(__file__).parents[1] / "fixtures" / "outputs"
STATES = {"model": {"weight": torch.arange(6.0).view(2, 3)}, "optimizer": {"weight/step": torch.tensor(3.0)}}


@pytest.fixture
def three(tmp_path):
    for step in (1, 2, 3):
        storage.save(tmp_path, step, STATES, {"encoder": {}})
    return tmp_path


def names(run):
    return sorted(path.name for path in run.iterdir())


def steps(*numbers):
    return [f"step_{number:08d}" for number in numbers]


def test_a_saved_checkpoint_is_read_back(tmp_path):
    path = storage.save(tmp_path, 7, STATES, {"encoder": {"width": 4}, "data": "abc"})
    manifest, states = read_manifest(path), storage.load(Checkpoint.open(path))
    assert path.name == "step_00000007"
    assert (manifest["step"], manifest["encoder"], manifest["data"]) == (7, {"width": 4}, "abc")
    assert torch.equal(states["model"]["weight"], STATES["model"]["weight"])
    assert states["optimizer"]["weight/step"].shape == ()


def test_three_are_kept_and_leftovers_removed(three):
    for step in (4, 5):
        storage.save(three, step, STATES, {})
    assert names(three) == steps(3, 4, 5)
    (three / ".step_00000006.part").mkdir()
    assert storage.newest(three, pytest.fail)[0].step == 5
    assert not (three / ".step_00000006.part").exists()


def test_an_old_checkpoint_is_deleted_when_the_new_one_and_then_its_own_renaming_are_durable(three, monkeypatch):
    done = []

    def record(owner, name, describe):
        call = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, **more: done.append(describe(*args)) or call(*args, **more))

    record(os, "fsync", lambda descriptor: f"fsync {os.path.basename(os.readlink(f'/proc/self/fd/{descriptor}'))}")
    record(Path, "rename", lambda path, target: f"rename {target.name}")
    record(shutil, "rmtree", lambda path: f"delete {path.name}")
    storage.save(three, 4, STATES, {})
    assert done == [
        "fsync model.safetensors", "fsync optimizer.safetensors", "fsync manifest.json", "fsync .step_00000004.part",
        "rename step_00000004", f"fsync {three.name}",
        "rename .step_00000001.old", f"fsync {three.name}", "delete .step_00000001.old",
    ]  # fmt: skip


def test_a_failed_deletion_is_repeated_later(three, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(storage, "complete", lambda folder: full())
        assert storage.save(three, 4, STATES, {}).is_dir()
    storage.save(three, 5, STATES, {})
    assert names(three) == steps(3, 4, 5)


def test_a_renamed_checkpoint_is_not_used_and_gives_way(three):
    (three / "step_00000001").rename(three / "step_00000099")
    warnings = []
    assert storage.newest(three, warnings.append)[0].step == 3
    (warning,) = warnings
    assert "step_00000099: " in warning
    storage.set_aside_after(three, 3)
    assert names(three) == ["aside_step_00000099", *steps(2, 3)]
    storage.save(three, 99, STATES, {})
    assert storage.newest(three, pytest.fail)[0].step == 99


def test_a_file_with_the_name_of_a_checkpoint_is_renamed_when_the_name_is_needed(three):
    for name in ("step_00000004", "step_00000055"):
        (three / name).write_text("the user's own")
    assert storage.newest(three, pytest.fail)[0].step == 3
    storage.save(three, 4, STATES, {})
    assert storage.newest(three, pytest.fail)[0].step == 4
    assert (three / "aside_step_00000004").read_text() == (three / "step_00000055").read_text() == "the user's own"


def test_a_renamed_entry_replaces_no_other(three):
    for text in ("one", "two", "three"):
        (three / "step_00000009").mkdir()
        (three / "step_00000009" / text).touch()
        storage.set_aside_after(three, 3)
    names = ["aside_step_00000009", "aside_step_00000009_2", "aside_step_00000009_3"]
    assert [os.listdir(three / name) for name in names] == [["one"], ["two"], ["three"]]


def test_an_unreadable_folder_is_not_an_empty_one(three, monkeypatch):
    monkeypatch.setattr(os, "listdir", lambda *_: full())
    with pytest.raises(CheckpointError, match=f"^{three}: "):
        storage.newest(three, pytest.fail)


def falls_back(run: Path) -> str:
    """Return the only warning of a run whose newest checkpoint is damaged, so that the previous one is used."""
    warnings = []
    assert storage.newest(run, warnings.append)[0].step == 2
    (warning,) = warnings
    return warning


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors", "manifest.json"])
def test_any_flipped_bit_is_detected_and_the_previous_checkpoint_used(three, file):
    chance, path = random.Random(0), three / "step_00000003" / file
    whole = path.read_bytes()
    for _ in range(50):
        damaged = bytearray(whole)
        damaged[chance.randrange(len(damaged))] ^= 1 << chance.randrange(8)
        path.write_bytes(damaged)
        assert "step_00000003" in falls_back(three)
    path.unlink()
    os.mkfifo(path)  # is not waited for
    assert "not a regular file" in falls_back(three)


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "{}", "5", '{"schema": 1, "sha256": {}}', '{"seal": 1}', "[" * 100_000, '{"seal":' * 100_000,
     '{"seal": ' + "9" * 100_000 + "}", {"step": "3"}, {"step": -3}, {"step": 3.0}, {"step": True}, {"step": None},
     {"sha256": {}}, {"sha256": [1]}, {"sha256": {"optimizer.safetensors": ""}},
     {"sha256": {"model.safetensors": "", "a\0.safetensors": ""}},
     {"sha256": {"model.safetensors": "", "../model.safetensors": ""}}],
    ids=range(20),
)  # fmt: skip
def test_a_damaged_manifest_is_detected_even_with_a_valid_checksum(three, content):
    file = three / "step_00000003" / "manifest.json"
    if isinstance(content, dict):
        content = atomic_io.sealed(json.loads(file.read_text()) | content).decode()
    file.write_text(content)
    assert "step_00000003/manifest.json: " in falls_back(three)


def test_the_size_of_a_manifest_is_bounded(three, monkeypatch):
    monkeypatch.setattr(atomic_io, "MANIFEST_BYTES", 1000)
    with open(three / "step_00000003" / "manifest.json", "r+b") as file:
        file.truncate(1 << 40)
    with pytest.raises(CheckpointError, match=r"manifest\.json: "):
        storage.load(Checkpoint.open(three / "step_00000003"))
    with pytest.raises(CheckpointError, match="bytes"):
        storage.save(three, 4, STATES, {"classes": ["a name"] * 100})
    assert storage.newest(three, lambda warning: None)[0].step == 2


def test_a_run_without_a_usable_checkpoint_is_an_error(three):
    for path in three.iterdir():
        (path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="overwrite=true"):
        storage.newest(three, lambda warning: None)
    assert storage.newest(three / "elsewhere", pytest.fail) is None


def test_a_file_of_another_format_is_named(three):
    folder = three / "step_00000003"
    for file in ("model.safetensors", "optimizer.safetensors"):
        data = pickle.dumps(STATES)
        (folder / file).write_bytes(data)
        manifest = json.loads((folder / "manifest.json").read_text())
        manifest["sha256"][file] = hashlib.sha256(data).hexdigest()
        (folder / "manifest.json").write_bytes(atomic_io.sealed(manifest))
        with pytest.raises(CheckpointError, match=r"step_00000003/\w+\.safetensors: "):
            storage.load(Checkpoint.open(folder))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_not_saved(three, value):
    with pytest.raises(CheckpointError, match=r"\bweight\b.*\bmodel\b"):
        storage.save(three, 4, {"model": {"weight": torch.tensor([1.0, value])}}, {})
    assert not list(three.glob("*4*"))


def full(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    ("function", "file"),
    [("os.fsync", "/model.safetensors"), ("pathlib.Path.rename", ""), ("ssvit.checkpoints.storage.write", "")],
)
def test_a_full_disk_does_not_change_earlier_checkpoints(three, monkeypatch, function, file):
    with monkeypatch.context() as patch:
        patch.setattr(function, full)
        with pytest.raises(CheckpointError, match=f"^{three}/step_00000004{file}: .*No space left on device.*$"):
            storage.save(three, 4, STATES, {})
    assert names(three) == steps(1, 2, 3)
    assert storage.newest(three, pytest.fail)[0].step == 3


def test_the_encoder_is_the_module_that_the_manifest_names(tmp_path):
    student, teacher = tiny.model(seed=1).encoder, tiny.model(seed=2).encoder
    weights = {
        f"{name}.{key}": value
        for name, encoder in (("encoder", student), ("teacher.module.encoder", teacher))
        for key, value in encoder.state_dict().items()
    }
    for step, (entry, expected) in enumerate([({}, student), ({"backbone": "teacher.module.encoder"}, teacher)]):
        path = storage.save(tmp_path, step, {"model": weights}, {"encoder": student.arguments, **entry})
        for name, value in tiny.loaded(path).state_dict().items():
            assert value.equal(expected.state_dict()[name])
    del weights["encoder.patch.bias"]  # an encoder is loaded completely or not at all
    for backbone in ("encoder", "head", "", None, 3):
        path = storage.save(tmp_path, 9, {"model": weights}, {"encoder": student.arguments, "backbone": backbone})
        with pytest.raises(CheckpointError, match=f"^{path}: .*encoder"):
            tiny.loaded(path)


def test_the_folder_of_a_run_is_its_newest_checkpoint(three):
    assert [Checkpoint.open(path).step for path in (three, str(three), three / "step_00000002")] == [3, 3, 2]


@pytest.mark.parametrize("load", [load_encoder, load_classifier])
@pytest.mark.parametrize(("name", "expected"), [("empty", "step_"), ("none", "")])
def test_a_path_without_a_checkpoint_is_named(load, name, expected, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(OptionError, match=f"checkpoint={tmp_path / name}: .*{expected}"):
        load(LoadEncoder(path=tmp_path / name))


@pytest.mark.parametrize("load", [load_encoder, load_classifier])
def test_the_damaged_file_of_a_folder_is_named(load, tmp_path):
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ForeignError, match=f"{tmp_path}/model.safetensors: "):
        load(LoadEncoder(path=tmp_path))


@torch.no_grad()
def test_a_loaded_classifier_maps_images_to_logits():
    classifier = tiny.classifier(STORED / "finetune_masked_patch_shapes")
    images = tiny.pictures(3)
    assert classifier(images).shape == (3, 10)
    assert torch.equal(classifier(images), classifier.logits(images))
    assert set(classifier(Batch.of_view(images, torch.tensor([0, 1, 2])))) == {"loss", "accuracy"}
    with pytest.raises(UserError, match="labels"):
        classifier.train()(images)
