"""Shards contain the images of the tar files, in every layout of WebDataset."""

import json
import os
from pathlib import Path

import pytest
import torch
from command import error_of
from images import class_names, picture, pixels, put_tar

from ssvit.data.sources import datasets, shards
from ssvit.data.sources.base import Unreadable
from ssvit.data.sources.datasets_options import Folder, Shards
from ssvit.data.sources.shard_folder import ending, splits
from ssvit.errors import OptionError, UserError

AUTO: dict[str, str | None] = dict.fromkeys(("train", "validation", "test"), "auto")


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("a/1.jpg", ("a/1", "jpg")), ("1.cls", ("1", "cls")), ("a.b/1.seg.PNG", ("a.b/1", "seg.png")),
        ("a/README", ("a/README", "")), (".hidden", ("", "hidden")), ("22.05.jpg", ("22.05", "jpg")),
        ("a/v1.5.1.seg.png", ("a/v1.5.1", "seg.png")), ("3.", ("3.", "")), ("b.0/1 2.3.CLS", ("b.0/1 2.3", "cls")),
    ],
)  # fmt: skip
def test_the_first_dot_before_a_letter_separates_key_and_suffix(name, parts):
    assert ending(name) == parts


@pytest.mark.parametrize(
    ("labels", "classes"),
    [
        ((b"10", b"9", b"9\n"), ("9", "10")),
        ((b"1", b"01", b"001"), ("001", "01", "1")),
        ((b"cat", b"10", b"9"), ("10", "9", "cat")),
        ((b"1", b"", b"2"), ()),
    ],
)
def test_classes_that_are_numbers_are_sorted_as_numbers(tmp_path, labels, classes):
    members = {}
    for i, name in enumerate(labels):
        members |= {f"{i}.jpg": picture(i, "JPEG"), f"{i}.cls": name}
    put_tar(tmp_path / "a.tar", members)
    found = shards.open_shards(str(tmp_path), ["a.tar"])
    assert found.classes == classes
    assert (found.labels is None) == (not classes)
    assert not classes or class_names(found) == [name.decode().strip() for name in labels]


def test_layouts_of_other_programs(tmp_path):
    """JSON before or behind the image, captions, other files, folders, a second image, upper case, long names."""
    long = "f/" * 90 + "x" * 60
    put_tar(
        tmp_path / "a.tar",
        {
            "a/1.json": json.dumps({"label": 4}).encode(), "a/1.JPG": picture(1, "JPEG"), "a/1.txt": b"a caption",
            "a/2.png": picture(2), "a/2.json": json.dumps({"class_name": "7"}).encode(),
            "a/3.json": b"{broken", "README": b"no sample",
            "a/4.image.webp": picture(4, "WEBP"), "a/4.cls.txt": b"5", "a/4.seg.png": picture(40),
            "._a/5": b"", f"{long}.png": picture(6), f"{long}.cls": b"4",
        },
    )  # fmt: skip
    found = shards.open_shards(str(tmp_path), ["a.tar"])
    names = ["a/1.JPG", "a/2.png", "a/4.image.webp", f"{long}.png"]
    assert [found.inner_name(i) for i in range(len(found))] == names
    assert class_names(found) == ["4", "7", "5", "4"]
    assert torch.equal(found.read(3), pixels(picture(6)))


def test_names_with_dots_are_images_of_their_own(tmp_path):
    members = {}
    for i in range(4):
        members |= {f"22.{i:02d}.jpg": picture(i, "JPEG"), f"22.{i:02d}.cls": b"ab"[i % 2 :][:1]}
    members |= {f"7.{i}.png": picture(i) for i in range(2)} | {"7.json": b'{"label": "c"}'}
    put_tar(tmp_path / "a.tar", members)
    found = shards.open_shards(str(tmp_path), ["a.tar"])
    assert [found.inner_name(i) for i in range(6)] == [name for name in members if name.endswith(("jpg", "png"))]
    assert class_names(found) == ["a", "b", "a", "b", "c", "c"]


@pytest.mark.parametrize("order", [("jpg", "cls"), ("cls", "jpg")])
def test_classes_may_be_apart_from_the_images(tmp_path, order):
    kinds = {
        "jpg": {f"{i}.jpg": picture(i, "JPEG") for i in range(3)},
        "cls": {f"{i}.cls": b"cab"[i:][:1] for i in (2, 0, 1)},
    }
    put_tar(tmp_path / "a.tar", kinds[order[0]] | kinds[order[1]])
    found = shards.open_shards(str(tmp_path), ["a.tar"])
    assert class_names(found) == ["c", "a", "b"]


def test_the_fingerprint_covers_labels_that_names_do_not_contain(tmp_path):
    def fingerprint(folder: str, *labels: bytes) -> str:
        members = {}
        for number, label in enumerate(labels):
            members |= {f"{folder}{number}.jpg": picture(number, "JPEG"), f"{folder}{number}.cls": label}
        put_tar(tmp_path / "a.tar", members)
        return shards.open_shards(str(tmp_path), ["a.tar"]).fingerprint

    assert fingerprint("", b"x", b"y") == fingerprint("", b"x", b"y") != fingerprint("", b"y", b"x")
    assert fingerprint("x/", b"x", b"x") != fingerprint("x/", b"y", b"x")


def test_images_and_classes_without_a_sample_are_counted(tmp_path):
    body = picture(0, "JPEG")
    put_tar(tmp_path / "a.tar", {"1.jpg": body, "1.left.jpg": body, "2.png": picture(2), "2.npy": b"", "9.cls": b"x"})
    unused: list[str] = []
    assert len(shards.open_shards(str(tmp_path), ["a.tar"], unused=unused)) == 2
    assert sorted(unused) == ["1.left.jpg", "9"]
    assert "1.left.jpg" in datasets.shards(Shards(root=str(tmp_path), held_out=0.5)).summary


def test_splits_follow_from_the_names_of_shards(tmp_path):
    root = tmp_path / "words"
    names = ["set-test-0.tar", "set-train-0.tar", "set-train-1.tar", "set-val-0.tar"]
    for place, name in enumerate(names):
        put_tar(root / name, {"1.png": picture(place)})
    assert splits(str(root), AUTO) == (tuple(names[1:3]), (names[3],), (names[0],))
    assert splits(str(root), AUTO | {"train": "set-train-1*"}).train == (names[2],)
    assert splits(str(root), {"train": "*", "validation": None, "test": None}).train == tuple(names)
    with pytest.raises(OptionError, match=r"validation=set-train-0\*: "):
        splits(str(root), AUTO | {"validation": "set-train-0*"})
    root = tmp_path / "folders"
    for place, name in enumerate(("train/0.tar", "train/1.tar", "valid/0.tar")):
        put_tar(root / name, {"1.png": picture(place)})
    assert splits(str(root), AUTO) == (("train/0.tar", "train/1.tar"), ("valid/0.tar",), ())
    for names in (("Training/0.tar", "Testing/0.tar"), ("seg_Train-0.tar", "seg_Test-0.tar")):
        root = tmp_path / names[0]
        for place, name in enumerate(names):
            put_tar(root / name, {"1.png": picture(place)})
        assert splits(str(root), AUTO) == (names[:1], (), names[1:])


def test_a_wrong_root_is_named(tmp_path):
    (tmp_path / "empty").mkdir()
    for root in (tmp_path / "absent", tmp_path / "empty", 7, "s3://nothing/here"):
        with pytest.raises(OptionError, match=r"^root=") as caught:
            Shards(root=str(root) if isinstance(root, Path) else root)
        assert "\n" not in str(caught.value)
    for name in ("0.tar", "train/0.tar"):  # the error of data=folder names data=shards
        put_tar(tmp_path / name.partition(".")[0] / name, {"1.png": picture(0)})
        with pytest.raises(OptionError, match=r"^root=.*data=shards"):
            Folder(root=str(tmp_path / name.partition(".")[0]))


def test_labels_that_are_not_used_are_reported(tmp_path):
    members = {f"{number}.png": picture(number) for number in range(3)}
    put_tar(tmp_path / "a.tar", members | {f"{number}.cls": b"x" for number in range(2)})
    data = datasets.shards(Shards(root=str(tmp_path), held_out=0.5))
    assert data.train.labels is None
    assert "1 of 3 images" in data.summary
    assert "2.png" in data.summary


@pytest.mark.parametrize(
    ("place", "value"),
    [(0, 1), (1, "x"), (1, -1), (1, 1 << 80), (2, -1), (2, 1 << 40), (3, 3), (3, [3]), ("classes", 5), ("size", "x")],
)
def test_a_damaged_index_is_reported_in_one_line(tmp_path, place, value):
    put_tar(tmp_path / "a.tar", {"1.png": picture(1), "1.cls": b"x"})
    (row,) = shards.scan(str(tmp_path / "a.tar"), [])
    index = {"schema": shards.SCHEMA, "images": [[*row]], "size": (tmp_path / "a.tar").stat().st_size, "classes": ["x"]}
    file = shards.index_path(tmp_path / "a.tar")
    file.write_text(json.dumps(index))
    assert len(shards.open_shards(str(tmp_path), ["a.tar"])) == 1
    (index["images"][0] if isinstance(place, int) else index)[place] = value
    file.write_text(json.dumps(index))
    line = str(error_of(shards.open_shards, str(tmp_path), ["a.tar"]))
    assert line.startswith(f"{file}: ")
    assert "\n" not in line


def test_a_damaged_shard_is_reported_in_one_line(tmp_path):
    members = {}
    for i in range(3):
        members |= {f"{i:05d}.cls": b"%d" % i, f"{i:05d}.png": picture(i)}
    content = put_tar(tmp_path / "good/0000.tar", members).read_bytes()
    damaged = bytearray(content)
    damaged[1024 * 2 + 5] ^= 1  # in the header of the second sample
    put_tar(tmp_path / "none/a.tar", {"1.txt": b"x"})
    for name, data in (("zipped", b"\x1f\x8b" + content), ("cut", content[:1800]), ("damaged", damaged), ("none", b"")):
        if data:
            (tmp_path / name).mkdir()
            (tmp_path / name / "a.tar").write_bytes(data)
        with pytest.raises(UserError, match=rf"^{tmp_path}/{name}") as caught:
            datasets.shards(Shards(root=str(tmp_path / name)))
        assert "\n" not in str(caught.value)
    found = shards.open_shards(str(tmp_path / "good"), ["0000.tar"])
    os.truncate(tmp_path / "good/0000.tar", 100)
    with pytest.raises(Unreadable, match=r"0000\.tar/00001\.png: "):
        found.read(1)
