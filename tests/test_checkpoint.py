"""Checkpoints: whole or absent, verified, unable to run code."""

import errno
import hashlib
import json
import os
import pickle
import random
from pathlib import Path

import pytest
import tiny
import torch

from ssvit.options import OptionError, UserError
from ssvit.training import checkpoint
from ssvit.training.checkpoint import CheckpointError

FIRST_EDITION = Path(__file__).parent / "fixtures" / "first_edition" / "outputs"
STATES = {"model": {"weight": torch.arange(6.0).view(2, 3)}, "optimizer": {"weight/step": torch.tensor(3.0)}}


@pytest.fixture
def three(tmp_path):
    for step in (1, 2, 3):
        checkpoint.save(tmp_path, step, STATES, {"encoder": {}})
    return tmp_path


def test_what_is_saved_comes_back(tmp_path):
    path = checkpoint.save(tmp_path, 7, STATES, {"encoder": {"width": 4}, "data": "abc"})
    manifest, states = checkpoint.load(path)
    assert path.name == "step_00000007"
    assert (manifest["step"], manifest["encoder"], manifest["data"]) == (7, {"width": 4}, "abc")
    assert torch.equal(states["model"]["weight"], STATES["model"]["weight"])
    assert states["optimizer"]["weight/step"].shape == ()


def test_three_are_kept_and_leftovers_removed(three):
    for step in (4, 5):
        checkpoint.save(three, step, STATES, {})
    assert sorted(path.name for path in three.iterdir()) == [f"step_{step:08d}" for step in (3, 4, 5)]
    (three / ".step_00000006.part").mkdir()
    assert checkpoint.newest(three, pytest.fail)[0]["step"] == 5
    assert not (three / ".step_00000006.part").exists()


def test_any_flipped_bit_is_noticed_and_the_one_before_taken(three):
    chance = random.Random(0)
    for file in ("model.safetensors", "optimizer.safetensors", "manifest.json"):
        path = three / "step_00000003" / file
        whole = path.read_bytes()
        for _ in range(50):
            damaged = bytearray(whole)
            damaged[chance.randrange(len(damaged))] ^= 1 << chance.randrange(8)
            path.write_bytes(damaged)
            warnings = []
            assert checkpoint.newest(three, warnings.append)[0]["step"] == 2
            assert len(warnings) == 1
            assert "step_00000003" in warnings[0]
        path.write_bytes(whole)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", "5", '{"schema": 1, "sha256": {}}', '{"seal": 1}'])
def test_a_damaged_manifest_is_noticed(three, text):
    (three / "step_00000003" / "manifest.json").write_text(text)
    warnings = []
    assert checkpoint.newest(three, warnings.append)[0]["step"] == 2
    assert "step_00000003" in warnings[0]


def test_when_none_is_usable_the_run_is_refused(three):
    for path in three.iterdir():
        (path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"none of its 3 checkpoints is usable.*overwrite=true"):
        checkpoint.newest(three, lambda warning: None)
    assert checkpoint.newest(three / "elsewhere", pytest.fail) is None


def rewrite(folder, manifest):
    """As one would who wants to be believed."""
    manifest.pop("seal")
    (folder / "manifest.json").write_text(json.dumps({**manifest, "seal": checkpoint.seal(manifest)}))


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("exploded",)


def test_a_pickle_in_a_checkpoint_does_not_run(three, monkeypatch):
    monkeypatch.chdir(three)
    folder = three / "step_00000003"
    for file in ("model.safetensors", "optimizer.safetensors"):
        data = pickle.dumps(Bomb())
        (folder / file).write_bytes(data)
        manifest = json.loads((folder / "manifest.json").read_text())
        manifest["sha256"][file] = hashlib.sha256(data).hexdigest()
        rewrite(folder, manifest)
        with pytest.raises(CheckpointError, match="is not a safetensors file"):
            checkpoint.load(folder)
    assert not (three / "exploded").exists()


def test_a_manifest_cannot_name_files_elsewhere(three):
    folder = three / "step_00000003"
    (three / "secret.safetensors").write_bytes(b"")
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["sha256"]["../secret.safetensors"] = hashlib.sha256(b"").hexdigest()
    rewrite(folder, manifest)
    with pytest.raises(CheckpointError, match="cannot be read"):
        checkpoint.load(folder)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_never_saved(three, value):
    with pytest.raises(CheckpointError, match="weight of the model is not finite"):
        checkpoint.save(three, 4, {"model": {"weight": torch.tensor([1.0, value])}}, {})
    assert not list(three.glob("*4*"))


@pytest.mark.parametrize("broken", ["fsync", "rename", "write"])
def test_a_full_disk_leaves_the_checkpoints_before(three, monkeypatch, broken):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        if broken == "fsync":
            patch.setattr(os, "fsync", full)
        elif broken == "rename":
            patch.setattr("pathlib.Path.rename", full)
        else:
            patch.setattr(checkpoint, "write", full)
        with pytest.raises(CheckpointError, match="No space left on device") as error:
            checkpoint.save(three, 4, STATES, {})
    assert "\n" not in str(error.value)
    assert sorted(path.name for path in three.iterdir()) == [f"step_{step:08d}" for step in (1, 2, 3)]
    assert checkpoint.newest(three, pytest.fail)[0]["step"] == 3


def test_damaged_checkpoints_are_set_aside_not_overwritten(tmp_path, capsys):
    tiny.train(tmp_path, steps=12, save_every=3)
    weights = tmp_path / "step_00000012" / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    tiny.train(tmp_path, steps=12, save_every=3)
    assert "falling back" in capsys.readouterr().out
    assert weights.read_bytes() == whole
    assert (tmp_path / "damaged_step_00000012").is_dir()


def test_an_encoder_is_loaded_whole_or_not_at_all(tmp_path):
    _, objective = tiny.train(tmp_path, steps=4, warmup=1, ema=0.0)
    path = tmp_path / "step_00000004"
    encoder = checkpoint.load_encoder(path)
    for name, tensor in objective.encoder.state_dict().items():
        assert torch.equal(encoder.state_dict()[name], tensor)
    manifest, states = checkpoint.load(path)
    del states["model"]["encoder.patch.bias"]
    other = checkpoint.save(tmp_path, 5, states, {"encoder": manifest["encoder"]})
    with pytest.raises(CheckpointError, match=r"patch\.bias"):
        checkpoint.load_encoder(other)


def test_a_run_stands_for_its_newest_checkpoint(tmp_path):
    tiny.train(tmp_path, steps=4, warmup=1, save_every=2, ema=0.0)
    newest, older = (checkpoint.load_encoder(tmp_path / f"step_0000000{step}").state_dict() for step in (4, 2))
    for path in (tmp_path, str(tmp_path)):
        found = checkpoint.load_encoder(path).state_dict()
        assert all(torch.equal(found[name], newest[name]) for name in newest)
    assert not torch.equal(found["patch.weight"], older["patch.weight"])
    (tmp_path / "empty").mkdir()
    for path, said in ((tmp_path / "empty", "holds no checkpoint"), (tmp_path / "none", "no such folder")):
        for load in (checkpoint.load_encoder, checkpoint.load_classifier):
            with pytest.raises(OptionError, match=said):
                load(path)


@torch.no_grad()
def test_a_loaded_classifier_answers_images_alone():
    classifier = checkpoint.load_classifier(FIRST_EDITION / "finetune_masked_patch_synthetic")
    images = tiny.pictures(3)
    assert classifier(images).shape == (3, 10)
    assert torch.equal(classifier(images), classifier.logits(images))
    assert set(classifier(images, torch.tensor([0, 1, 2]), None)) == {"loss", "accuracy"}
    with pytest.raises(UserError, match="needs labels"):
        classifier.train()(images)
