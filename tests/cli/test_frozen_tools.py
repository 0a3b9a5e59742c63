"""ssvit few-shot, linear-probe and knn: they measure the checkpoint's features and the baselines."""

import json
import shutil
from pathlib import Path

import pytest
import tiny
import torch
from command import TINY
from composing import untrained
from PIL import Image

from ssvit.checkpoints import manifest
from ssvit.cli import find_command
from ssvit.data.augment.options import CenterCrop
from ssvit.data.sources import shapes_options
from ssvit.data.sources.shapes import shapes
from ssvit.engine.randomness import key
from ssvit.errors import UserError
from ssvit.evaluation.features import Features, Frozen, Pixels, extract
from ssvit.evaluation.options import FeatureSpec
from ssvit.evaluation.probes.options import Knn, Ridge, Sgd
from ssvit.models.vit_options import ViT

ROOT = Path(__file__).parents[2]
ROWS = ["layer1_patch_mean", "layer2_patch_mean", "random_layer1_patch_mean", "random_layer2_patch_mean", "pixels"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A tiny run, whose weights are not the random ones that it is compared with."""
    folder = tmp_path_factory.mktemp("outputs") / "masked_patch_shapes"
    return untrained(folder, *TINY, "encoder.dropout=0.1", seed=1).parent


@pytest.fixture
def measured(run, tmp_path):
    """Run a tool's main function in this process: measured("knn", "k=[1]") -> its numbers as JSON."""

    def measure(tool, *options):
        options = (f"outputs={run.parent}", f"cache={tmp_path}/features", f"output={tmp_path}/numbers.json",
                   "precision=32", *options)  # fmt: skip
        find_command(tool.replace("_", "-")).call(options)
        return json.loads((tmp_path / "numbers.json").read_text())

    return measure


@pytest.fixture(scope="module")
def expected(run):
    """The features that the tools must measure, read in one go: (train, test), each with labels."""
    path = run / "step_00000006"
    trained = tiny.loaded(path).train()  # as training has it
    torch.manual_seed(key(0, "weights"))
    untrained = ViT(**manifest.read_manifest(path)["encoder"]).build()
    assert not torch.equal(trained.patch.weight, untrained.patch.weight)
    data = shapes(shapes_options.Shapes(image_size=16, images=64, held_out_images=32))
    asked = [FeatureSpec(1), FeatureSpec(2)]
    found = []
    for source in (data.train, data.test):
        values = {}
        for prefix, encoder in (("", trained), ("random_", untrained)):
            features = extract(Frozen(encoder, asked, identity="x"), source, CenterCrop(size=16, resize=None).build())
            values |= {f"{prefix}{name}": value for name, value in features.values.items()}
        values |= extract(Pixels(), source, CenterCrop(size=16, resize=None).build()).values
        found.append((values, source.labels))
    assert list(found[0][0]) == ROWS
    return found


def both(expected, name):
    """The training and the test features of that name."""
    return (Features(values[name], labels, tuple(map(str, range(10)))) for values, labels in expected)


def test_few_shot_measures_the_features_and_the_baselines(measured, expected, capsys):
    report = measured("few_shot", "features.layer=all", "shots=[1,3,all]", "seeds=2", "l2=[1,1024]")
    assert list(report["numbers"]) == ROWS
    printed = capsys.readouterr().out
    for name, scores in report["numbers"].items():
        reference = Ridge(shots=[1, 3, "all"], seeds=2, l2=[1, 1024]).build()(*both(expected, name)).scores
        assert [score["shots"] for score in scores] == [1, 3, "all"]
        assert [score["mean"] for score in scores] == list(reference.values())
        (line,) = [line for line in printed.splitlines() if line.startswith(f"{name} ")]
        assert f"{100 * scores[-1]['mean']:.1f}" in line
    assert report["best"] in printed
    assert (report["checkpoint"][-13:], report["train_images"], report["test_images"]) == ("step_00000006", 64, 32)


def test_knn_measures_the_features_and_chooses_by_the_training_images(measured, expected):
    report = measured("knn", "features.layer=all", "k=[5,1]", "temperature=null")
    for name, numbers in report["numbers"].items():
        right = Knn(temperature=None, k=[1, 5]).build()(*both(expected, name)).numbers["test"]
        assert numbers["test"] == {str(k): value for k, value in right.items()}
        assert ("leave_one_out" in numbers) == (name != "pixels")  # alone, it is not chosen
    left_out = {name: max(report["numbers"][name]["leave_one_out"].values()) for name in ROWS[:2]}
    assert left_out[report["best"]] == max(left_out.values())


def test_linear_probe_by_either_method(measured, expected, tmp_path):
    report = measured("linear_probe", "features.layer=all", "sgd.epochs=2", "sgd.learning_rates=[0.01,0.1]")
    probe = Sgd(epochs=2, learning_rates=[0.01, 0.1]).build()
    for name, numbers in report["numbers"].items():
        right = probe(*both(expected, name)).numbers
        assert numbers["test"] == right["test"]
        assert numbers["validation_grid"] == right["validation_grid"]
    validation = {name: report["numbers"][name]["validation"] for name in ROWS[:2]}
    assert validation[report["best"]] == max(validation.values())
    report = measured("linear_probe", "method=logistic", "logistic.l2s=[0.1]", "baselines=false", "features.layer=1",
                      "train_images=40", "test_images=20")  # fmt: skip
    assert list(report["numbers"]) == ROWS[:1]
    assert (report["train_images"], report["test_images"]) == (40, 20)


def test_features_are_computed_once_for_all_tools(measured, tmp_path, monkeypatch):
    first = measured("knn", "k=[1]", "precision=bf16")
    assert len(list((tmp_path / "features").iterdir())) == 6
    original = Frozen.__call__

    def fail_for_many(function, images):
        """Compute the features of a few images, by which the estimate times the encoder."""
        return original(function, images) if len(images) <= 16 else pytest.fail("computed again")

    monkeypatch.setattr(Frozen, "__call__", fail_for_many)
    assert measured("knn", "k=[1]", "precision=bf16") == first
    measured("few_shot", "shots=[1]", "precision=bf16")
    monkeypatch.undo()
    measured("few_shot", "shots=[1]", "baselines=false")
    assert len(list((tmp_path / "features").iterdir())) == 8  # other numbers in float32
    measured("few_shot", "shots=[1]", "baselines=false", "cache=null", "features.pooling=both", "features.norm=before")
    assert len(list((tmp_path / "features").iterdir())) == 8


def folder_of(path, count=3, **classes):
    for part in ("train", "val"):
        for name in classes[part]:
            (path / part / name).mkdir(parents=True)
            for number in range(count):
                Image.new("RGB", (16, 16), (80 * number, 0, 0)).save(path / part / name / f"{number}.png")
    return ("data=folder", f"data.root={path}", "data.image_size=16", "workers=0")


@pytest.mark.parametrize(
    ("command", "options", "classes", "count", "line"),
    [
        ("knn", (), ("ab", "ac"), 3, r"\bc\b.*\b2\b"),
        ("knn", (), ([""], [""]), 3, r"\blabels\b"),
        ("knn", ("k=[6]",), ("ab", "ab"), 3, r"^k=6: .*\b5\b"),
        ("linear_probe", (), ("ab", "ab"), 1, r"^held_out=0\.1: "),
    ],
)
def test_images_that_cannot_be_measured_are_reported_before_features_are_read(
    measured, tmp_path, monkeypatch, command, options, classes, count, line
):
    monkeypatch.setattr(Frozen, "__call__", lambda *call: pytest.fail("read"))
    train, val = classes
    with pytest.raises(UserError, match=line):
        measured(command, *folder_of(tmp_path / "set", count, train=train, val=val), *options)


def test_test_images_are_measured_on_where_there_are_any(measured, tmp_path):
    own = folder_of(tmp_path / "set", train="ab", val="ab")
    report = measured("knn", *own, "k=[5]", "baselines=false")
    assert (report["measured_on"], report["test_images"], report["chance"]) == ("validation", 6, 0.5)
    shutil.copytree(tmp_path / "set" / "val", tmp_path / "set" / "test")
    (tmp_path / "set" / "test" / "a" / "0.png").unlink()
    report = measured("knn", *own, "k=[5]", "baselines=false")
    assert (report["measured_on"], report["test_images"], report["chance"]) == ("test", 5, 0.6)


def test_as_a_command(run, tool, tmp_path):
    done = tool("knn", f"checkpoint={run}", "k=[1,3]", "baselines=true", f"output={tmp_path}/knn.json")
    assert done.stderr == ""
    assert str(run / "step_00000006") in done.stdout
    assert list(json.loads((tmp_path / "knn.json").read_text())["numbers"]) == [ROWS[1], ROWS[3], ROWS[4]]
    assert (tmp_path / "outputs" / "features").is_dir()
