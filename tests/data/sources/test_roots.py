"""Several folders are one data set: classes of one name are one, and the parts of each folder serve as in one alone."""

import pickle
from pathlib import Path

import pytest
import torch
from PIL import Image

from ssvit.data.sources import datasets, datasets_options
from ssvit.data.sources.base import Source
from ssvit.options import OptionError


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def put(folder: Path, *greys: int) -> None:
    folder.mkdir(parents=True)
    for grey in greys:
        Image.new("RGB", (6, 6), (grey,) * 3).save(folder / f"{grey:03d}.png")


def content(source: Source | None) -> dict[int, str]:
    """The class of each image, by its grey."""
    assert source is not None
    assert source.labels is not None
    return {int(source.read(i)[0, 0, 0]): source.classes[source.labels[i]] for i in range(len(source))}


def test_classes_are_united_by_name(place: Path) -> None:
    put(place / "A/cat", 1, 2)
    put(place / "A/dog", 3, 4)
    put(place / "B/ant", 5, 6)
    put(place / "B/dog", 7, 8)
    data = datasets.folder(datasets_options.Folder(root=["A", "B"], held_out=0.25))
    assert data.classes == ("ant", "cat", "dog")
    assert data.told == "A/, B/ 6 images to train on, 2 others to measure on (data.held_out=0.25)"
    expected = {1: "cat", 2: "cat", 3: "dog", 4: "dog", 5: "ant", 6: "ant", 7: "dog", 8: "dog"}
    assert content(data.train) | content(data.test) == expected
    whole = data.train.whole
    assert [whole.name(i) for i in (0, 3, 4, 7)] == ["A/cat/001.png", "A/dog/004.png", "B/ant/005.png", "B/dog/008.png"]
    assert content(pickle.loads(pickle.dumps(whole)).take(torch.tensor([6, 0]))) == {7: "dog", 1: "cat"}


def test_held_out_parts_of_each_folder_serve(place: Path) -> None:
    put(place / "A/train/cat", 1, 2)
    put(place / "A/val/cat", 3)
    put(place / "B/train/ant", 4)
    put(place / "B/valid/ant", 5)
    put(place / "C/ant", 6)
    data = datasets.folder(datasets_options.Folder(root=["A", "B", "C"]))
    assert content(data.train) == {1: "cat", 2: "cat", 4: "ant", 6: "ant"}
    assert content(data.validation) == {3: "cat", 5: "ant"}
    assert data.validation is not None
    assert data.validation.classes == data.classes == ("ant", "cat")
    assert data.told == "train/, C/ 4 images to train on; val/, valid/ 2 to measure on"


def test_a_folder_without_classes_makes_all_unlabelled(place: Path) -> None:
    put(place / "A/cat", 1, 2)
    put(place / "B", 3)
    data = datasets.folder(datasets_options.Folder(root=["A", "B"]))
    assert (data.classes, data.train.labels) == ((), None)


def test_the_fingerprint_is_that_of_the_folders(place: Path) -> None:
    put(place / "A/cat", 1, 2)
    put(place / "B/cat", 3)
    put(place / "C/cat", 3, 4)

    def fingerprint(*roots: str) -> str:
        return datasets.folder(datasets_options.Folder(root=list(roots))).train.whole.fingerprint

    assert len({fingerprint("A", "B"), fingerprint("B", "A"), fingerprint("A", "C"), fingerprint("A", "B", "C")}) == 4
    one = datasets.folder(datasets_options.Folder(root=["A"], held_out=0.5))
    assert one.train.fingerprint == datasets.folder(datasets_options.Folder(root="A", held_out=0.5)).train.fingerprint
    (place / "elsewhere").mkdir()
    before = fingerprint("A", "B")
    (place / "B").rename(place / "elsewhere/B")
    assert fingerprint("A", "elsewhere/B") == before


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"root": []}, r"root=\[\]: must name a folder of images"),
        ({"root": ["A", "none"]}, "root=none: no such folder"),
        ({"root": ["A", "A/cat"]}, "root=.*: .*/A and .*/A/cat share images"),
        ({"root": ["A", "B"], "masks": "A"}, "masks=A: must be null with several folders in data.root"),
        ({"root": ["A", "B"], "test": "final"}, "test=final: must be auto, null, or the name of a folder in A"),
    ],
)
def test_what_is_wrong_is_one_line(place: Path, given: dict[str, object], line: str) -> None:
    put(place / "A/cat", 1, 2)
    put(place / "B/cat", 3)
    with pytest.raises(OptionError, match=f"^{line}"):
        datasets.folder(datasets_options.Folder(**given))
