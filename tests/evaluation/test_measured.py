"""What is kept of a set of images: sets are told apart by the content and the classes of their images."""

import json
import shutil
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from images import picture, put

from ssvit.data.sources.files import Files
from ssvit.data.sources.memory import Memory
from ssvit.engine import atomic_io
from ssvit.evaluation import measured
from ssvit.evaluation.measured import FOLDER


def keep(folder, images, part, *results):
    """Store (encoder, accuracy, method, path) one after the other, and return the last sentence."""
    for encoder, accuracy, method, path in results:
        paths = {encoder: path} if path else {}
        values = {encoder: {method: (accuracy, None)}}
        sentence, _ = measured.keep(folder, images, part, values, train_images=10, paths=paths)
    return sentence


def result(encoder, accuracy, method="ridge", path=""):
    return encoder, accuracy, method, path


def stored(folder):
    (file,) = (folder / FOLDER).iterdir()
    return json.loads(file.read_text())


def files(folder, numbers, classes=("a", "b")):
    paths = [folder / f"{number}.png" for number in numbers]
    for number, path in zip(numbers, paths, strict=True):
        put(path, picture(number, size=(8, 8)))
    return Files(paths, torch.tensor(numbers) % len(classes), classes)


@pytest.fixture
def images(tmp_path):
    return files(tmp_path / "photos", range(20))


def test_the_same_images_are_one_set_under_any_path_and_order(tmp_path, images):
    keep(tmp_path, images, "test", result("one", 0.5))
    shutil.copytree(tmp_path / "photos", tmp_path / "parent" / "photos")
    moved = files(tmp_path / "parent" / "photos", [*range(10, 20), *range(10)])
    sentence = keep(tmp_path, moved, "test", result("two", 0.25), result("three", 0.75))
    assert len(list((tmp_path / FOLDER).iterdir())) == 1
    places = [
        sentence.index(text) for text in ("three", "75.0", "20 test images", "one 50.0", "two 25.0", "chance 50.0")
    ]
    assert places == sorted(places)


@pytest.mark.parametrize(
    ("numbers", "classes", "shared"),
    [
        (range(21), ("a", "b"), 20),
        (range(5, 20), ("a", "b"), 15),
        (range(20), ("b", "a"), 0),
        (range(40, 60), ("a", "b"), 0),
    ],
)
def test_another_set_is_another_file_and_states_its_overlap(tmp_path, images, numbers, classes, shared):
    keep(tmp_path, images, "test", result("former", 0.875))
    sentence = keep(tmp_path, files(tmp_path / "others", numbers, classes), "test", result("new", 0.5))
    files_of_sets = list((tmp_path / FOLDER).iterdir())
    assert len(files_of_sets) == 2
    before, *after = sentence.partition("another set of 20 images has ")[::2]
    assert "former" not in before
    assert bool(after[0]) == (shared > 0)
    assert after[0].startswith(f"{shared} of these: former" if shared else "")


def test_of_equal_results_the_first_one_is_the_best(tmp_path, images):
    measured_before = result("one", 0.5), result("two", 0.5, "knn"), result("two", 0.25)
    assert "best so far: one" in keep(tmp_path, images, "test", *measured_before)


def test_a_checkpoint_is_named_once(tmp_path, images):
    several = result("one", 0.75, path="a"), result("one (98 px)", 0.5, path="a"), result("two", 0.5, path="b")
    sentence = keep(tmp_path, images, "test", *several)
    assert "98 px" not in sentence
    assert "two 50.0" in sentence


def test_a_result_replaces_the_former_one_of_its_checkpoint(tmp_path, images):
    keep(tmp_path, images, "test", result("run", 0.9), result("run", 0.6, path="b"), result("run", 0.5, "knn"))
    keep(tmp_path, images, "test", result("run", 0.4))
    content = stored(tmp_path)
    kept = [(row["method"], row["path"], row["accuracy"]) for row in content["results"]]
    assert kept == [("ridge", "b", 0.6), ("knn", "", 0.5), ("ridge", "", 0.4)]
    assert len(content["fingerprints"].split()) == 20


def test_baselines_of_two_architectures_are_both_kept(tmp_path, images):
    for run, accuracy in (("a", 0.5), ("b", 0.25), ("b", 0.3)):
        values = {run: {"ridge": (0.9, None)}, "random weights": {"ridge": (accuracy, None)}}
        measured.keep(tmp_path, images, "test", values, train_images=10, paths={run: run}, baselines_of=run)
    kept = [row["accuracy"] for row in stored(tmp_path)["results"] if row["encoder"] == "random weights"]
    assert kept == [0.5, 0.3]


def test_a_result_of_fewer_training_images_replaces_none_of_more_and_is_marked(tmp_path, images):
    values = {"run": {"ridge": (0.9, None)}}, {"run": {"ridge": (0.4, None)}}, {"other": {"ridge": (0.6, None)}}
    for count, accuracies in zip((20, 10, 10), values, strict=True):
        sentence, _ = measured.keep(tmp_path, images, "test", accuracies, train_images=count, paths={"run": "a"})
    assert [(row["train_images"], row["accuracy"]) for row in stored(tmp_path)["results"]] == [
        (20, 0.9), (10, 0.6), (10, 0.4),
    ]  # fmt: skip
    first, others = sentence.split("(", maxsplit=1)
    assert "run, ridge, 90.0 %, 20 training images" in first
    assert "other 60.0, ridge, 10 training images" in others


def test_commands_at_the_same_time_lose_no_result(tmp_path, images, monkeypatch):
    write = atomic_io.write_files

    def slow(*arguments):
        time.sleep(0.05)
        return write(*arguments)

    monkeypatch.setattr(atomic_io, "write_files", slow)
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda name: keep(tmp_path, images, "test", result(name, 0.5)), ("one", "two", "three")))
    assert {row["encoder"] for row in stored(tmp_path)["results"]} == {"one", "two", "three"}


def test_a_difference_is_significant_if_it_exceeds_its_error(tmp_path):
    pixels = torch.arange(1000).view(-1, 1, 1, 1).expand(-1, 3, 2, 2) % 256
    images = Memory(pixels.to(torch.uint8), torch.arange(1000) % 2, ("a", "b"))
    for second, significant in ((0.75, False), (0.5, True)):
        sentence = keep(tmp_path / str(second), images, "validation", result("one", 0.76), result("two", second))
        assert ("significantly better" in sentence, "not significantly" in sentence) == (significant, not significant)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"results": [{"x": 1}], "fingerprints": ""}', '{"results": 1}'])
def test_a_damaged_file_is_replaced(tmp_path, images, content):
    keep(tmp_path, images, "test", result("one", 0.5))
    (file,) = (tmp_path / FOLDER).iterdir()
    file.write_text(content)
    keep(tmp_path, files(tmp_path / "others", range(5)), "test", result("two", 0.5))
    keep(tmp_path, images, "test", result("three", 0.5))
    assert [row["encoder"] for row in json.loads(file.read_text())["results"]] == ["three"]


@pytest.mark.parametrize("method", ["fine-tuned", "ridge regression mAP"])
def test_map_is_named_once(tmp_path, method):
    pixels = torch.arange(9, dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 3, 2, 2)
    images = Memory(pixels, torch.eye(3, dtype=torch.bool).repeat(3, 1), ("a", "b", "c"))
    assert keep(tmp_path, images, "test", result("one", 0.5, method)).count("mAP") == 1
