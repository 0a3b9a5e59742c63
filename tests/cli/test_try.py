"""ssvit try: it measures what the images allow, keeps it, and ends with one verdict."""

import os

import exported
import pytest
import torch
from command import error_of
from PIL import Image

import ssvit
from ssvit.engine.randomness import uniform
from ssvit.errors import UserError
from ssvit.loading.cached import cached_weights
from ssvit.studies import first_look
from ssvit.training import preset
from ssvit.training.estimate import Estimate
from ssvit.training.session import Session

PIXELS, OWN = "pixels", f"{first_look.OWN} (2 steps)"
SHORT, LONG = 100, 500  # budgets: too short for a step of 200 seconds, and for two of them


def pictures(folder, *classes, count=10):
    """Write images of 10x8 pixels, in which the colours of classes differ."""
    for number, name in enumerate(classes):
        (folder / name).mkdir(parents=True)
        for index in range(count):
            pixels = 60 * uniform(number, "pictures", torch.tensor([index]), 240).view(8, 10, 3)
            pixels[..., number] += 120
            Image.fromarray(pixels.byte().numpy()).save(folder / name / f"{index}.png")
    return folder


@pytest.fixture
def tried(tmp_path, monkeypatch):
    """A function that tries a folder with two steps of pre-training, and returns the report."""
    estimate = Estimate(steps=100, step=200.0, training=2e4, memory={})
    monkeypatch.setattr(Session, "estimate", lambda *_: estimate)
    monkeypatch.setattr(first_look, "_STEPS", 1)
    tiny = {"encoder": "mini", "encoder.width": 16, "encoder.depth": 2, "encoder.heads": 2, "encoder.patch_size": 4}
    choose = preset.choose
    monkeypatch.setattr(preset, "choose", lambda *numbers, **others: {**choose(*numbers, **others), **tiny})

    def run(folder, *, budget=SHORT, **options):
        usual = {"outputs": tmp_path / "outputs", "weights": [], "data.image_size": 16}
        return ssvit.try_images(folder, budget=budget, **{**usual, **options})

    return run


def test_all_stages_of_labelled_images(tried, tmp_path):
    folder = pictures(tmp_path / "photos", "red", "green")
    (folder / "green" / "broken.png").write_bytes(b"no image")
    weights, _ = exported.written(exported.encoder(image_size=32), tmp_path, "timm")
    result = tried(folder, budget=LONG, weights=str(weights))
    report = result.metrics
    existing = report["encoders"].keys() - {PIXELS, OWN}
    assert len(existing) == 1
    assert [row["is_existing"] for row in report["encoders"].values()] == [False, True, False]
    assert report["encoders"][PIXELS]["probes"]["ridge"]["value"] == 1
    assert report["training"]["steps"] == 2
    assert "1 of 21 sampled images" in " ".join(report["images"])
    assert {"images.png", "report.html", "report.json"} <= {file.name for file in result.folder.iterdir()}
    assert result.figures["images"] == result.folder / "images.png"
    assert str(report["verdict"]) in result.page.read_text()


def test_the_next_command_uses_the_best_encoder(tried, tmp_path, monkeypatch):
    folder = pictures(tmp_path / "photos", "red", "green")
    weights, _ = exported.written(exported.encoder(image_size=32), tmp_path, "timm")
    assert "download=true" in tried(folder, name="none").metrics["next"]
    assert f"pretrain data={folder}" in (
        following := tried(folder, name="pixels", weights=[str(weights)]).metrics["next"]
    )
    assert f"outputs={tmp_path}/outputs" in following
    monkeypatch.setattr(first_look, "Pixels", Blank)
    following = tried(folder, name="weights", weights=[str(weights)]).metrics["next"]
    assert f"finetune checkpoint={weights / 'model.safetensors'} data={folder}" in following


def test_weights_of_equal_names_and_runs_are_measured_each(tried, tmp_path):
    folder = pictures(tmp_path / "photos", "red", "green")
    run = tried(folder, budget=LONG, name="first").folder / first_look._RUN
    paths = [str(run)]
    for parent, depth in (("a", 1), ("b", 2)):
        paths.append(str(exported.written(exported.encoder(image_size=32, depth=depth), tmp_path / parent, "timm")[0]))
    report = tried(folder, name="second", weights=paths, train_images=15).metrics
    existing = [row for row in report["encoders"].values() if row["is_existing"]]
    assert [str(row["path"]).startswith(path) for row, path in zip(existing, paths, strict=True)] == [True] * 3
    assert len({row["checksum"] for row in existing}) == 3
    following = tried(folder, name="third", train_images=15).metrics["next"]
    assert {"name=third", "train_images=15", "download=true"} <= {*following.split()}


class Blank(first_look.Pixels):
    """Features without information."""

    def __call__(self, images):
        return {"pixels": super().__call__(images)["pixels"] * 0}


@pytest.mark.parametrize("classes", [(".",), ("one",)], ids=["no labels", "one class"])
def test_without_two_classes_neighbours_are_shown(tried, tmp_path, classes):
    result = tried(pictures(tmp_path / "photos", *classes))
    assert [row["probes"] for row in result.metrics["encoders"].values()] == [{}]
    assert {row["sheet"] for row in result.metrics["encoders"].values()} <= result.figures.keys()


def test_drawings_that_vanish_on_black_get_white(tried, tmp_path):
    folder = tmp_path / "drawings"
    folder.mkdir()
    for index in range(8):
        image = Image.new("RGBA", (12, 12))
        image.paste((0, 0, 0, 255), (index, 2, index + 4, 8))
        image.save(folder / f"{index}.png")
    result = tried(folder)
    assert "data.background=white" in result.metrics["next"]


def test_an_interrupted_command_continues(tried, tmp_path, monkeypatch):
    folder = pictures(tmp_path / "photos", "red", "green")

    def stop(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as interrupted:
        interrupted.setattr(Session, "run", stop)
        assert error_of(tried, folder, budget=LONG).status == 130
    monkeypatch.setattr(first_look, "Pixels", Blank)  # would change what is measured again
    report = tried(folder, budget=LONG).metrics
    assert report["encoders"][PIXELS]["probes"]["ridge"]["value"] == 1
    assert report["training"]["steps"] == 2
    monkeypatch.setattr(Session, "run", stop)
    again = tried(folder, budget=LONG).metrics
    assert {**again, "stages": 0, "cpu_seconds": 0} == {**report, "stages": 0, "cpu_seconds": 0}
    Image.new("RGB", (10, 8)).save(folder / "red" / "more.png")
    assert error_of(tried, folder, budget=LONG).status == 130  # other images are measured anew


def test_a_much_larger_budget_trains_again_for_longer(tried, tmp_path):
    folder = pictures(tmp_path / "photos", "red", "green")
    for budget in (LONG, 3 * LONG):
        report = tried(folder, budget=budget).metrics
        steps = report["training"]["steps"]
        assert (steps > 2) == (budget > LONG)
        assert [*report["encoders"]] == list(dict.fromkeys([PIXELS, OWN, f"{first_look.OWN} ({steps} steps)"]))


def test_what_cannot_be_measured_is_one_line(tried, tmp_path):
    empty, one = tmp_path / "empty", pictures(tmp_path / "one", "red", count=1)
    empty.mkdir()
    for path in (empty, tmp_path / "missing", one / "red" / "0.png"):
        assert str(path) in str(error_of(tried, path))
    assert "one image" in str(error_of(tried, one))
    outputs = one / "red" / "0.png"
    assert str(error_of(tried, one, outputs=outputs)).startswith(f"outputs={outputs}: ")


def test_with_too_many_unreadable_files_the_next_command_lists_them(tried, tmp_path):
    folder = pictures(tmp_path / "photos", "red", "green")
    assert "stages=images" not in str(tried(folder).metrics["next"])
    (folder / "red" / "0.png").write_bytes(b"no image")
    assert "stages=images" in str(tried(folder).metrics["next"])
    assert "kept.csv" in str(tried(folder, stages="images").metrics["next"])


def test_a_stage_that_fails_does_not_stop_the_others(tried, tmp_path, capsys):
    folder = pictures(tmp_path / "photos", "red", "green")
    report = tried(folder, weights=["missing.safetensors"]).metrics
    assert [*report["encoders"]] == [PIXELS]  # the budget is too short for a step
    assert "missing.safetensors" in capsys.readouterr().out
    assert PIXELS in report["verdict"]


def test_one_training_image_has_no_neighbours(tried, tmp_path, capsys):
    for part in ("train", "test"):
        pictures(tmp_path / "photos" / part, "red", "green", count=1)
    (tmp_path / "photos" / "train" / "red" / "0.png").write_bytes(b"no image")
    tried(tmp_path / "photos")
    assert "class 1 (red)" in capsys.readouterr().out


def test_replaced_files_of_the_same_size_are_measured_again(tried, tmp_path):
    folder = pictures(tmp_path / "photos", "red", "green")
    files = [path.rename(path.with_suffix(".bmp")) for path in sorted(folder.rglob("*.png"))]
    for path in files:
        Image.open(path).save(path)
    before = tried(folder).metrics["encoders"][PIXELS]["probes"]["ridge"]["value"]
    size = files[0].stat().st_size
    for path in files:
        Image.new("RGB", (10, 8), (100, 50, 50)).save(path)
    assert files[0].stat().st_size == size
    assert tried(folder).metrics["encoders"][PIXELS]["probes"]["ridge"]["value"] < before


def test_another_precision_is_measured_again(tried, tmp_path, capsys):
    folder = pictures(tmp_path / "photos", "red", "green")
    tried(folder, precision=32)
    capsys.readouterr()
    tried(folder, precision=32)
    assert f"{tmp_path}/outputs/try_photos: " not in capsys.readouterr().out
    tried(folder, precision="bf16")
    assert f"{tmp_path}/outputs/try_photos: " in capsys.readouterr().out


def test_results_of_another_folder_are_kept(tried, tmp_path):
    folders = [pictures(tmp_path / parent / "photos", "red", "green") for parent in ("a", "b")]
    result = tried(folders[0])
    before = (result.folder / "report.json").read_bytes()
    with pytest.raises(UserError, match=r"^name=try_photos: "):
        tried(folders[1])
    assert (result.folder / "report.json").read_bytes() == before


def test_weights_in_the_caches_are_found(tmp_path, monkeypatch):
    weights, _ = exported.written(exported.encoder(image_size=32), tmp_path, "timm")
    for variable, name in (("HF_HUB_CACHE", "hub"), ("TORCH_HOME", "torch")):
        monkeypatch.setenv(variable, str(tmp_path / name))
    assert [*cached_weights()] == []
    snapshot = tmp_path / "hub" / "models--owner--name" / "snapshots" / "1"
    snapshot.parent.mkdir(parents=True)
    os.symlink(weights, snapshot)
    (tmp_path / "torch" / "hub" / "checkpoints").mkdir(parents=True)
    (tmp_path / "torch" / "hub" / "checkpoints" / "other.pth").write_bytes(b"no weights")
    assert [*cached_weights()] == [snapshot / "model.safetensors"]


@pytest.mark.parametrize("name", ["mine", "/etc", "..", "a/b"])
def test_other_files_are_not_replaced(tried, tmp_path, name):
    mine = tmp_path / "outputs" / "mine"
    (mine / "pretraining").mkdir(parents=True)
    files = [mine / "report.json", mine / "pretraining" / "thesis.txt"]
    for file in files:
        file.write_text("{}")
    with pytest.raises(UserError, match=f"^name={name}: "):
        tried(pictures(tmp_path / "photos", "red", "green"), name=name)
    assert [*tmp_path.rglob("*.json"), *tmp_path.rglob("*.txt")] == files
