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


def test_a_folder_without_classes_makes_all_unlabelled(place: Path) -> None:
    put(place / "A/cat", 1, 2)
    put(place / "B", 3)
    data = datasets.folder(datasets_options.Folder(root=["A", "B"]))
    assert (data.classes, data.train.labels) == ((), None)


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"root": []}, r"root=\[\]: must name a folder of images"),
        ({"root": ["A", "none"]}, "root=none: no such folder"),
        ({"root": ["A", "A/cat"]}, "root=.*: .*/A and .*/A/cat share images"),
        ({"root": ["A", "B"], "masks": "A"}, "masks=A: must be null with several folders in data.root"),
        ({"root": ["A", "B"], "test": "final"}, "test=final: "),
    ],
)
def test_what_is_wrong_is_one_line(place: Path, given: dict[str, object], line: str) -> None:
    put(place / "A/cat", 1, 2)
    put(place / "B/cat", 3)
    with pytest.raises(OptionError, match=f"^{line}"):
        datasets.folder(datasets_options.Folder(**given))
