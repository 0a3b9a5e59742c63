"""Checkpoints: whole or absent, verified, unable to run code."""

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

from ssvit import atomic_io
from ssvit.checkpoints import storage
from ssvit.checkpoints.checkpoint import Checkpoint
from ssvit.checkpoints.manifest import CheckpointError, complete, read
from ssvit.data.batch import Batch
from ssvit.loading import encoder as loading
from ssvit.loading import encoder_options as loading_options
from ssvit.options import OptionError, UserError

STORED = Path(__file__).parents[1] / "fixtures" / "outputs"
STATES = {"model": {"weight": torch.arange(6.0).view(2, 3)}, "optimizer": {"weight/step": torch.tensor(3.0)}}


@pytest.fixture
def three(tmp_path):
    for step in (1, 2, 3):
        storage.save(tmp_path, step, STATES, {"encoder": {}})
    return tmp_path


def test_what_is_saved_comes_back(tmp_path):
    path = storage.save(tmp_path, 7, STATES, {"encoder": {"width": 4}, "data": "abc"})
    manifest, states = read(path), storage.load(Checkpoint.open(path))
    assert path.name == "step_00000007"
    assert (manifest["step"], manifest["encoder"], manifest["data"]) == (7, {"width": 4}, "abc")
    assert torch.equal(states["model"]["weight"], STATES["model"]["weight"])
    assert states["optimizer"]["weight/step"].shape == ()


def test_three_are_kept_and_leftovers_removed(three):
    for step in (4, 5):
        storage.save(three, step, STATES, {})
    assert sorted(path.name for path in three.iterdir()) == [f"step_{step:08d}" for step in (3, 4, 5)]
    (three / ".step_00000006.part").mkdir()
    assert storage.newest(three, pytest.fail)[0].step == 5
    assert not (three / ".step_00000006.part").exists()


class Killed(BaseException):
    """No handler of the code under test may catch it, as none catches SIGKILL."""


@pytest.mark.parametrize("deleted", range(4))
def test_killed_while_an_old_checkpoint_is_deleted_no_half_of_it_is_left_as_one(three, monkeypatch, deleted):
    (three / ".step_00000001.old").mkdir()  # of a process that was killed before
    (three / ".step_00000001.old" / "model.safetensors").write_bytes(b"half")

    def killed(folder, **_):
        for path in sorted(folder.iterdir())[:deleted]:
            path.unlink()
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", killed)
        with pytest.raises(Killed):
            storage.save(three, 4, STATES, {})
    for path in three.glob("step_*"):
        storage.load(Checkpoint.open(path))
    assert storage.newest(three, pytest.fail)[0].step == 4
    assert all(path.name.startswith("step_") for path in three.iterdir())
    storage.save(three, 5, STATES, {})
    assert sorted(path.name for path in three.iterdir()) == [f"step_{step:08d}" for step in (3, 4, 5)]


def test_an_old_checkpoint_is_deleted_when_the_new_one_and_then_its_own_renaming_are_durable(three, monkeypatch):
    done = []

    def noted(owner, name, what):
        call = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, **options: done.append(what(*args)) or call(*args, **options))

    noted(os, "fsync", lambda descriptor: f"fsync {os.path.basename(os.readlink(f'/proc/self/fd/{descriptor}'))}")
    noted(Path, "rename", lambda path, target: f"rename {target.name}")
    noted(shutil, "rmtree", lambda path: f"delete {path.name}")
    storage.save(three, 4, STATES, {})
    assert done == [
        "fsync model.safetensors", "fsync optimizer.safetensors", "fsync manifest.json", "fsync .step_00000004.part",
        "rename step_00000004", f"fsync {three.name}",
        "rename .step_00000001.old", f"fsync {three.name}", "delete .step_00000001.old",
    ]  # fmt: skip


def test_what_cannot_be_deleted_now_is_deleted_later(three, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(storage, "complete", lambda folder: full())
        assert storage.save(three, 4, STATES, {}).is_dir()
    storage.save(three, 5, STATES, {})
    assert sorted(path.name for path in three.iterdir()) == [f"step_{step:08d}" for step in (3, 4, 5)]


def test_the_manifest_tells_the_step_whatever_the_name(three):
    """A checkpoint that has been given a later name is not the newest, is told of, and is in nobody's way."""
    (three / "step_00000001").rename(three / "step_00000099")
    assert [path.name for path in complete(three)] == ["step_00000099", "step_00000002", "step_00000003"]
    warnings = []
    assert storage.newest(three, warnings.append)[0].step == 3
    (warning,) = warnings
    assert "step_00000099: is the checkpoint of step 1" in warning
    storage.set_aside_after(three, 3)
    assert {path.name for path in three.iterdir()} == {"aside_step_00000099", "step_00000002", "step_00000003"}
    for step in (98, 99):
        storage.save(three, step, STATES, {})
    assert storage.newest(three, pytest.fail)[0].step == 99
    assert [path.name for path in complete(three)] == [f"step_{step:08d}" for step in (3, 98, 99)]


def test_an_earlier_name_does_not_hide_the_newest_nor_have_it_deleted(three):
    (three / "step_00000003").rename(three / "step_00000000")
    warnings = []
    assert storage.newest(three, warnings.append)[0].step == 3
    assert len(warnings) == 1
    storage.save(three, 4, STATES, {})
    assert [path.name for path in complete(three)] == [f"step_{step:08d}" for step in (2, 0, 4)]


def test_of_two_of_the_same_step_the_one_named_by_it_is_taken(three):
    shutil.copytree(three / "step_00000003", three / "step_00000007")
    assert complete(three)[-1].name == "step_00000003"


def test_a_file_named_as_a_checkpoint_is_passed_over_and_kept(tmp_path, capsys):
    """At the start of a run, between its checkpoints and where its next one goes."""
    tiny.train(tmp_path / "whole")
    run = tmp_path / "run"
    run.mkdir()
    for name in ("step_00000003", "step_00000055"):
        (run / name).write_text("the user's own")
    tiny.train(run)
    told = capsys.readouterr().out
    assert told.count("warning: ") == 2
    assert "step_00000055: is no folder, so no checkpoint; it is passed over" in told
    for name in ("step_00000009", "step_00000012"):
        shutil.rmtree(run / name)
    (run / "step_00000009").write_text("the user's second")
    tiny.train(run)
    assert (run / "aside_step_00000003").read_text() == (run / "aside_step_00000055").read_text() == "the user's own"
    assert (run / "aside_step_00000009").read_text() == "the user's second"
    assert read(complete(run)[-1])["sha256"] == read(tmp_path / "whole" / "step_00000012")["sha256"]


def test_nothing_that_was_set_aside_is_written_over(three):
    for text in ("one", "two", "three"):
        (three / "step_00000009").write_text(text)
        storage.set_aside_after(three, 3)
    names = ["aside_step_00000009", "aside_step_00000009_2", "aside_step_00000009_3"]
    assert [(three / name).read_text() for name in names] == ["one", "two", "three"]


def test_a_folder_that_cannot_be_read_is_no_new_run(three, monkeypatch):
    monkeypatch.setattr(os, "listdir", lambda *_: full())
    with pytest.raises(CheckpointError, match="cannot be read"):
        storage.newest(three, pytest.fail)


def falls_back(run: Path) -> str:
    """The only warning of a run whose newest checkpoint is damaged, so that the one before it is taken."""
    warnings = []
    assert storage.newest(run, warnings.append)[0].step == 2
    (warning,) = warnings
    return warning


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors", "manifest.json"])
def test_any_flipped_bit_is_noticed_and_the_one_before_taken(three, file):
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
def test_a_damaged_manifest_is_noticed_though_its_seal_may_be_right(three, content):
    path = three / "step_00000003"
    if isinstance(content, str):
        (path / "manifest.json").write_text(content)
    else:
        rewrite(path, json.loads((path / "manifest.json").read_text()) | content)
    assert "step_00000003/manifest.json: is damaged; falling back" in falls_back(three)


def test_a_manifest_without_end_is_read_no_further_than_any_could_be(three, monkeypatch):
    monkeypatch.setattr(atomic_io, "MANIFEST_BYTES", 1000)
    with open(three / "step_00000003" / "manifest.json", "r+b") as file:
        file.truncate(1 << 40)
    with pytest.raises(CheckpointError, match=r"manifest\.json: is damaged"):
        storage.load(Checkpoint.open(three / "step_00000003"))
    with pytest.raises(CheckpointError, match=r"a manifest of .* bytes could not be read again"):
        storage.save(three, 4, STATES, {"classes": ["a name"] * 100})
    assert storage.newest(three, lambda warning: None)[0].step == 2


def test_when_none_is_usable_the_run_is_refused(three):
    for path in three.iterdir():
        (path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"none of its 3 checkpoints is usable.*overwrite=true"):
        storage.newest(three, lambda warning: None)
    assert storage.newest(three / "elsewhere", pytest.fail) is None


def rewrite(folder, manifest):
    """As one would who wants to be believed."""
    (folder / "manifest.json").write_bytes(atomic_io.sealed(manifest))


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
            storage.load(Checkpoint.open(folder))
    assert not (three / "exploded").exists()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_never_saved(three, value):
    with pytest.raises(CheckpointError, match="weight of the model is not finite"):
        storage.save(three, 4, {"model": {"weight": torch.tensor([1.0, value])}}, {})
    assert not list(three.glob("*4*"))


def full(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("broken", ["fsync", "rename", "write"])
def test_a_full_disk_leaves_the_checkpoints_before(three, monkeypatch, broken):
    with monkeypatch.context() as patch:
        if broken == "fsync":
            patch.setattr(os, "fsync", full)
        elif broken == "rename":
            patch.setattr("pathlib.Path.rename", full)
        else:
            patch.setattr(storage, "write", full)
        with pytest.raises(CheckpointError, match="No space left on device") as error:
            storage.save(three, 4, STATES, {})
    assert "\n" not in str(error.value)
    named = three / "step_00000004" / "model.safetensors" if broken == "fsync" else three / "step_00000004"
    assert str(error.value).startswith(f"{named}: cannot be written")
    assert sorted(path.name for path in three.iterdir()) == [f"step_{step:08d}" for step in (1, 2, 3)]
    assert storage.newest(three, pytest.fail)[0].step == 3


def test_damaged_checkpoints_are_set_aside_not_overwritten(tmp_path, capsys):
    tiny.train(tmp_path, steps=12, save_every=3)
    weights = tmp_path / "step_00000012" / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    tiny.train(tmp_path, steps=12, save_every=3)
    assert "falling back" in capsys.readouterr().out
    assert weights.read_bytes() == whole
    assert (tmp_path / "aside_step_00000012").is_dir()


def test_an_encoder_is_loaded_whole_or_not_at_all(tmp_path):
    _, objective = tiny.train(tmp_path, steps=4, warmup=1, ema=0.0)
    path = tmp_path / "step_00000004"
    encoder = loading.load_encoder(loading_options.LoadEncoder(path=path))
    for name, tensor in objective.encoder.state_dict().items():
        assert torch.equal(encoder.state_dict()[name], tensor)
    manifest, states = read(path), storage.load(Checkpoint.open(path))
    del states["model"]["encoder.patch.bias"]
    other = storage.save(tmp_path, 5, states, {"encoder": manifest["encoder"]})
    with pytest.raises(CheckpointError, match=r"patch\.bias"):
        loading.load_encoder(loading_options.LoadEncoder(path=other))


def test_the_encoder_is_the_module_that_the_manifest_names(tmp_path):
    student, teacher = tiny.model(seed=1).encoder, tiny.model(seed=2).encoder
    weights = {
        f"{name}.{key}": value
        for name, encoder in (("encoder", student), ("teacher.module.encoder", teacher))
        for key, value in encoder.state_dict().items()
    }
    for step, (told, right) in enumerate([({}, student), ({"backbone": "teacher.module.encoder"}, teacher)]):
        path = storage.save(tmp_path, step, {"model": weights}, {"encoder": student.arguments, **told})
        for name, value in loading.load_encoder(loading_options.LoadEncoder(path=path)).state_dict().items():
            assert value.equal(right.state_dict()[name])
    for wrong in ("head", "", None, 3):
        path = storage.save(tmp_path, 9, {"model": weights}, {"encoder": student.arguments, "backbone": wrong})
        with pytest.raises(CheckpointError, match="its encoder cannot be built"):
            loading.load_encoder(loading_options.LoadEncoder(path=path))


def test_a_run_stands_for_its_newest_checkpoint(tmp_path):
    tiny.train(tmp_path, steps=4, warmup=1, save_every=2, ema=0.0)
    newest, older = (
        loading.load_encoder(loading_options.LoadEncoder(path=tmp_path / f"step_0000000{step}")).state_dict()
        for step in (4, 2)
    )
    for path in (tmp_path, str(tmp_path)):
        found = loading.load_encoder(loading_options.LoadEncoder(path=path)).state_dict()
        assert all(torch.equal(found[name], newest[name]) for name in newest)
    assert not torch.equal(found["patch.weight"], older["patch.weight"])
    (tmp_path / "empty").mkdir()
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / "model.safetensors").touch()
    for name, said in (
        ("empty", r"\(a folder step_…\)$"),
        ("export", "its file model.safetensors"),
        ("none", "no such"),
    ):
        path = tmp_path / name
        for load in (loading.load_encoder, loading.load_classifier):
            with pytest.raises(OptionError, match=said):
                load(loading_options.LoadEncoder(path=path))


@torch.no_grad()
def test_a_loaded_classifier_answers_images_alone():
    classifier = loading.load_classifier(loading_options.LoadEncoder(path=STORED / "finetune_masked_patch_synthetic"))
    images = tiny.pictures(3)
    assert classifier(images).shape == (3, 10)
    assert torch.equal(classifier(images), classifier.logits(images))
    assert set(classifier(Batch.of(images, torch.tensor([0, 1, 2])))) == {"loss", "accuracy"}
    with pytest.raises(UserError, match="needs labels"):
        classifier.train()(images)
