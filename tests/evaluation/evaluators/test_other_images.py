"""A classifier is measured on other labelled images: numbers against plain loops over its probabilities."""

import json
from pathlib import Path

import numpy as np
import pytest
from images import picture, put

import ssvit
from ssvit.cli import find_command
from ssvit.errors import Failure, UserError

CLASSIFIER = Path(__file__).parents[2] / "fixtures" / "outputs" / "finetune_masked_patch_shapes"


@pytest.fixture
def classifier():
    return ssvit.load_classifier(CLASSIFIER, precision=32)


def measured(folder: Path, *options: str) -> dict[str, float]:
    """Return the metrics that the command writes."""
    output = f"output={folder}/report"
    find_command("predict").call(
        [f"checkpoint={CLASSIFIER}", "precision=32", f"labelled={folder}/images", output, *options]
    )
    assert (folder / "report" / "confusion.png").stat().st_size > 1000
    assert (folder / "report" / "classes.csv").is_file()
    return json.loads((folder / "report" / "metrics.json").read_text())


def album(folder: Path, names, *, first: int = 0) -> list[tuple[str, Path]]:
    """Write three images into a subfolder of each name; return the name and the path of each."""
    named = [(name, f"{number}{letter}.png") for number, name in enumerate(names) for letter in "abc"]
    for number, (name, file) in enumerate(named):
        put(folder / name / file, picture(first + number, size=(20, 20)))
    return [(name, folder / name / file) for name, file in named]


def probabilities(classifier, images) -> np.ndarray:
    return classifier.probabilities([path for _, path in images]).double().numpy()


def test_metrics_are_those_of_the_probabilities_and_unknown_images_are_ranked(classifier, tmp_path):
    classes = classifier.classes
    images = album(tmp_path / "images", classes[:4])
    others = album(tmp_path / "others", ["x"], first=50) + album(tmp_path / "images", ["no class"], first=70)
    metrics = measured(tmp_path, str(tmp_path / "others"))
    shown = probabilities(classifier, images)
    correct = np.array([classes[row.argmax()] == name for row, (name, _) in zip(shown, images, strict=True)])
    assert metrics["accuracy"] == pytest.approx(correct.mean())
    assert metrics["accuracy_per_class"] == pytest.approx(correct.reshape(4, 3).mean(1).mean())
    truth = np.array([[name == other for other in classes] for name, _ in images])
    assert metrics["brier"] == pytest.approx(np.square(shown - truth).sum(1).mean(), abs=1e-5)
    pairs = np.subtract.outer(shown.max(1), probabilities(classifier, others).max(1))
    assert metrics["auroc"] == pytest.approx((pairs > 0).mean() + (pairs == 0).mean() / 2)
    assert (metrics["images"], metrics["unknown"]) == (12, 6)


def test_folders_may_be_numbers_or_groups_of_classes(classifier, tmp_path):
    classes = classifier.classes
    images = album(tmp_path / "numbers" / "images", [str(number) for number in range(len(classes))])
    shown = probabilities(classifier, images)
    right = [row.argmax() == int(name) for row, (name, _) in zip(shown, images, strict=True)]
    assert measured(tmp_path / "numbers")["accuracy"] == pytest.approx(np.mean(right))
    images = album(tmp_path / "groups" / "images", ["low", "high"])
    names = {name: "low" if number < 4 else "high" for number, name in enumerate(classes[:8])}
    (tmp_path / "names.json").write_text(json.dumps(names))
    sums = [(row[:4].sum(), row[4:8].sum(), *row[8:]) for row in probabilities(classifier, images)]
    right = [("low", "high", *classes[8:])[np.argmax(row)] == name for row, (name, _) in zip(sums, images, strict=True)]
    metrics = measured(tmp_path / "groups", f"class_names={tmp_path}/names.json")
    assert metrics["accuracy"] == pytest.approx(np.mean(right))
    assert metrics["loss"] == pytest.approx(np.mean([-np.log(row[number // 3]) for number, row in enumerate(sums)]))


def test_unreadable_images_are_named_and_the_others_are_measured(classifier, tmp_path, capsys):
    damaged = [put(tmp_path / "images" / name / "0.png", b"no image") for name in (classifier.classes[0], "no class")]
    for names, count in (((), None), (classifier.classes[:2], r"\b2 of 8\b")):
        album(tmp_path / "images", names)
        with pytest.raises(Failure, match=count) as failure:
            measured(tmp_path)
        assert failure.value.status == 1
        printed = capsys.readouterr().out
        assert all(printed.count(str(path)) == 1 for path in damaged)
    assert json.loads((tmp_path / "report" / "metrics.json").read_text())["images"] == 6


def test_mistakes_are_named(tmp_path):
    album(tmp_path / "images", ["x", "y"])
    with pytest.raises(UserError, match=r"^labelled=x: "):
        measured(tmp_path)
    for name in ({"nothing": "x"}, {"square": 3}, {"square": ["x", "y"]}):
        (tmp_path / "names.json").write_text(json.dumps(name))
        with pytest.raises(UserError, match=r"^class_names=.*names\.json: "):
            measured(tmp_path, f"class_names={tmp_path}/names.json")
