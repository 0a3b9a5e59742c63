"""data=huggingface: sets of the library `datasets` from disk and from its cache, without a network."""

import os
import sys
from pathlib import Path

import datasets as hub
import pytest
import torch
from command import error_of
from images import picture, pixels, put

from ssvit.data.sources import huggingface
from ssvit.data.sources.base import Source, Unreadable
from ssvit.data.sources.datasets_options import HuggingFace as HuggingFaceOptions
from ssvit.data.sources.huggingface import HubImages, hugging_face
from ssvit.errors import UserError

CLASSES = hub.ClassLabel(names=["ant", "bee", "cat"])


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    """The library reads its cache's place when it is imported, and the options read it when they look."""
    hub.disable_progress_bars()
    cache = tmp_path / "cache"
    monkeypatch.setenv("HF_DATASETS_CACHE", str(cache))
    monkeypatch.setattr(hub.config, "HF_DATASETS_CACHE", cache)
    return cache


def table(of: range, kind: object = CLASSES, *, images: list | None = None, labels: list | None = None):
    """Numbered images with the class of their number modulo 3."""
    images = images or [{"bytes": picture(i), "path": None} for i in of]
    labels = labels or [str(i % 3) if kind == hub.Value("string") else i % 3 for i in of]
    features = hub.Features({"image": hub.Image(), "label": kind})
    return hub.Dataset.from_dict({"image": images, "label": labels}, features=features)


def numbers(source: Source | None, of: range) -> bool:
    """Return whether a source has the numbered images in order, with their classes."""
    assert source is not None
    assert source.labels is not None
    return all(
        torch.equal(source.read(place), pixels(picture(i))) for place, i in enumerate(of)
    ) and source.labels.tolist() == [i % 3 for i in of]


def test_sets_of_the_cache_and_folders_of_parquet(tmp_path, cache):
    (tmp_path / "Pictures").mkdir()
    for name, of in (("train", range(6)), ("test", range(6, 9))):
        table(of).to_parquet(tmp_path / "Pictures" / f"{name}-00000-of-00001.parquet")
    data = hugging_face(HuggingFaceOptions(root=str(tmp_path / "Pictures")))
    assert numbers(data.train, range(6))
    os.rename(cache / "pictures", cache / "somebody___pictures")  # the format of the cache of the Hub
    cached = hugging_face(HuggingFaceOptions(root="somebody/Pictures"))
    assert numbers(cached.train, range(6))
    assert numbers(cached.test, range(6, 9))
    assert cached.train.fingerprint == data.train.fingerprint
    capitals = hub.DatasetDict({"Training": table(range(6)), "Testing": table(range(6, 9))})
    capitals.save_to_disk(tmp_path / "capitals")
    saved = hugging_face(HuggingFaceOptions(root=str(tmp_path / "capitals")))
    assert numbers(saved.train, range(6))
    assert numbers(saved.test, range(6, 9))


@pytest.mark.parametrize(
    ("label", "classes"),
    [(hub.Value("string"), ("0", "1", "2")), (hub.Value("int64"), ("0", "1", "2")), (CLASSES, tuple(CLASSES.names))],
)
def test_labels_are_classes_names_or_numbers(tmp_path, label, classes):
    parts = hub.DatasetDict(train=table(range(7), label), test=table(range(5, 6), label))
    parts.save_to_disk(str(tmp_path / "saved"))
    data = hugging_face(HuggingFaceOptions(root=str(tmp_path / "saved")))
    assert data.classes == classes
    assert numbers(data.train, range(7))
    assert numbers(data.test, range(5, 6))


def lists(of: range, kind: object) -> list:
    """Return the classes of each number: ant if 2 divides it, bee if 3 does, cat if 4 does."""
    numbers = [[k for k in range(3) if i % (k + 2) == 0] for i in of]
    if kind == hub.Value("string"):
        return [[CLASSES.names[k] for k in row] for row in numbers]
    return [[k + 8 for k in row] for row in numbers] if kind == hub.Value("int64") else numbers


@pytest.mark.parametrize(
    ("kind", "classes"),
    [(CLASSES, tuple(CLASSES.names)), (hub.Value("string"), ("ant", "bee", "cat")),
     (hub.Value("int64"), ("8", "9", "10"))],
)  # fmt: skip
def test_lists_are_several_classes_or_none(tmp_path, kind, classes):
    def part(of: range, labels: list | None = None):
        return table(of, hub.Sequence(kind), labels=labels or lists(of, kind))

    hub.DatasetDict(train=part(range(9)), test=part(range(5, 8))).save_to_disk(str(tmp_path / "saved"))
    data = hugging_face(HuggingFaceOptions(root=str(tmp_path / "saved"), label="label"))
    assert data.classes == classes
    for source, of in ((data.train, range(9)), (data.test, range(5, 8))):
        assert source is not None
        assert source.labels is not None
        assert source.labels.dtype == torch.bool
        assert source.labels.tolist() == [[i % 2 == 0, i % 3 == 0, i % 4 == 0] for i in of]
    assert (
        hugging_face(HuggingFaceOptions(root=str(tmp_path / "saved"))).train.labels is None
    )  # a run that did not name it keeps its set
    few = [None, *lists(range(1, 3), kind)]
    hub.DatasetDict(train=part(range(9)), test=part(range(3), few)).save_to_disk(str(tmp_path / "few"))
    assert hugging_face(HuggingFaceOptions(root=str(tmp_path / "few"), label="label")).validation_or_test.labels is None
    if not isinstance(kind, hub.ClassLabel):
        other = [[7 if kind.dtype == "int64" else "wasp"]]
        hub.DatasetDict(train=part(range(9)), test=part(range(1), other)).save_to_disk(str(tmp_path / "other"))
        with pytest.raises(UserError, match=r"other/test: .*\b(7|wasp)\b.*\b3\b"):
            hugging_face(HuggingFaceOptions(root=str(tmp_path / "other"), label="label"))


@pytest.mark.parametrize("missing", [None, -1])
def test_labels_that_are_not_used_are_reported(tmp_path, missing):
    table(range(3), labels=[0, missing, 2]).save_to_disk(str(tmp_path / "saved"))
    data = hugging_face(HuggingFaceOptions(root=str(tmp_path / "saved"), held_out=0.5))
    assert data.train.labels is None
    assert "1 of 3 images" in data.summary


def test_lists_as_older_versions_of_the_library_describe_them():
    text, options = hub.Value("string"), HuggingFaceOptions(root="set")
    for kind in ([text], hub.Sequence(text), hub.LargeList(text)):
        features = {"image": hub.Image(), "tags": kind}
        assert huggingface._columns(options.changed(label="tags"), features) == ("image", "tags")
        assert huggingface._columns(options, features) == ("image", None)


def test_unlabelled_test_images_are_used_only_without_validation_images(tmp_path):
    bare = table(range(3)).remove_columns("label").add_column("label", [-1] * 3).cast_column("label", CLASSES)
    parts = {"train": table(range(6)), "test": bare, "validation": table(range(6, 9))}
    hub.DatasetDict(parts).save_to_disk(str(tmp_path / "saved"))
    data = hugging_face(HuggingFaceOptions(root=str(tmp_path / "saved")))
    assert (data.test, data.validation and len(data.validation)) == (None, 3)
    data = hugging_face(HuggingFaceOptions(root=str(tmp_path / "saved"), validation=None))
    assert (data.test and len(data.test), data.validation_or_test.labels) == (3, None)


def test_the_fingerprint_covers_labels_and_sizes(tmp_path):
    """The fingerprint depends neither on the path, nor on the number of files, nor on whether images are embedded."""

    def fingerprint(images, **options: object) -> str:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        images.save_to_disk(str(folder), **options)
        return hugging_face(HuggingFaceOptions(root=str(folder), held_out=0.5)).train.source.fingerprint

    paths = [{"bytes": None, "path": str(put(tmp_path / f"{i}.png", picture(i)))} for i in range(6)]
    pointing = HubImages(table(range(6), images=paths), "image", [i % 3 for i in range(6)], CLASSES.names, called="set")
    assert numbers(pointing, range(6))
    for files in (1, 3):
        assert fingerprint(table(range(6)), num_shards=files) == pointing.fingerprint
    assert fingerprint(table(range(6), labels=[0] * 6)) != pointing.fingerprint


def test_an_unreadable_row_is_named():
    rows = [{"bytes": b"no image", "path": None}, None, {"bytes": None, "path": "/no/where.png"}]
    source = HubImages(table(range(3), images=rows), "image", called="set")
    for row, named in enumerate(("", "", "/no/where.png")):
        with pytest.raises(Unreadable, match=rf"^set/{row}: .*{named}"):
            source.read(row)
    assert source.fingerprint


@pytest.mark.parametrize(
    ("options", "start"),
    [
        ({"root": "nobody/nothing"}, "data.root=nobody/nothing: "),
        ({"root": "empty"}, "data.root=empty: "),
        ({"image": "picture"}, "image=picture: "),
        ({"label": "kind"}, "label=kind: "),
        ({"label": "image"}, "label=image: "),
        ({"image": "label"}, "image=label: "),
        ({"config": "large"}, "config=large: "),
        ({"test": "new"}, "saved/new: "),
    ],
)
def test_a_mistake_is_reported_in_one_line(tmp_path, monkeypatch, options, start):
    monkeypatch.chdir(tmp_path)
    numbered = hub.Value("int64")
    parts = hub.DatasetDict(train=table(range(6), numbered), new=table(range(3), numbered, labels=[7, 7, 7]))
    parts.save_to_disk("saved")
    (tmp_path / "empty").mkdir()
    assert str(error_of(lambda: hugging_face(HuggingFaceOptions(**{"root": "saved"} | options)))).startswith(start)


def test_a_missing_package_is_reported_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r"^root=[^\n]*\bdatasets\b[^\n]*pip install datasets[^\n]*$"):
        hugging_face(HuggingFaceOptions(root=str(tmp_path)))
