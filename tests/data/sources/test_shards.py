"""Images in shards are those of the tar files, in any layout of WebDataset's, and a batch is a function of the step."""

import io
import json
import os
import tarfile
from collections.abc import Mapping
from pathlib import Path

import fsspec
import pytest
import torch
from test_source_contract import picture, pixels

from ssvit.data.sources import datasets, datasets_options, shards
from ssvit.data.sources.base import Data, Unreadable
from ssvit.data.sources.shard_folder import ending, splits
from ssvit.options import OptionError, UserError

AUTO: dict[str, str | None] = dict.fromkeys(("train", "validation", "test"), "auto")


def tar(path: Path, members: Mapping[str, bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as file:
        for name, content in members.items():
            about = tarfile.TarInfo(name)
            about.size = len(content)
            file.addfile(about, io.BytesIO(content))
    return path


def several(root: Path, count: int = 40, each: int = 16) -> list[bytes]:
    """Shards of numbered images with the class of their number modulo 3."""
    images = [picture(i) for i in range(count)]
    for start in range(0, count, each):
        members = {}
        for i in range(start, min(start + each, count)):
            members |= {f"{i:05d}.cls": b"%d" % (i % 3), f"{i:05d}.png": images[i]}
        tar(root / f"{start // each:04d}.tar", members)
    return images


@pytest.mark.parametrize(
    ("name", "parted"),
    [
        ("a/1.jpg", ("a/1", "jpg")),
        ("1.cls", ("1", "cls")),
        ("a.b/1.seg.PNG", ("a.b/1", "seg.png")),
        ("a/README", ("a/README", "")),
        (".hidden", ("", "hidden")),
    ],
)
def test_the_first_dot_of_a_name_parts_key_and_ending(name: str, parted: tuple[str, str]) -> None:
    assert ending(name) == parted


@pytest.mark.parametrize(
    ("classes", "labels"),
    [
        ((b"10", b"9", b"9\n"), ("9", "10")),
        ((b"cat", b"10", b"9"), ("10", "9", "cat")),
        ((b"1", b"", b"2"), ()),
    ],
)
def test_classes_that_are_numbers_count_as_such(
    tmp_path: Path, classes: tuple[bytes, ...], labels: tuple[str, ...]
) -> None:
    members = {}
    for i, name in enumerate(classes):
        members |= {f"{i}.jpg": picture(i, "JPEG"), f"{i}.cls": name}
    tar(tmp_path / "a.tar", members)
    found = shards.find(str(tmp_path), ["a.tar"])
    assert found.classes == labels
    assert (found.labels is None) == (not labels)
    if found.labels is not None:
        assert [found.classes[label] for label in found.labels] == [name.decode().strip() for name in classes]


def test_layouts_of_others(tmp_path: Path) -> None:
    """JSON before or behind the image, captions, other files, folders, a second image, upper case, long names."""
    long = "f/" * 90 + "x" * 60
    tar(
        tmp_path / "a.tar",
        {
            "a/1.json": json.dumps({"label": 4}).encode(), "a/1.JPG": picture(1, "JPEG"), "a/1.txt": b"a caption",
            "a/2.png": picture(2), "a/2.json": json.dumps({"class_name": "7"}).encode(),
            "a/3.json": b"{broken", "README": b"no sample",
            "a/4.image.webp": picture(4, "WEBP"), "a/4.cls.txt": b"5", "a/4.seg.png": picture(40),
            "._a/5": b"", f"{long}.png": picture(6), f"{long}.cls": b"4",
        },
    )  # fmt: skip
    found = shards.find(str(tmp_path), ["a.tar"])
    assert [found.index.name(i) for i in range(len(found))] == ["a/1.JPG", "a/2.png", "a/4.image.webp", f"{long}.png"]
    assert found.labels is not None
    assert [found.classes[label] for label in found.labels] == ["4", "7", "5", "4"]
    assert torch.equal(found.read(3), pixels(picture(6)))


def test_the_names_of_shards_say_what_they_are_for(tmp_path: Path) -> None:
    root = tmp_path / "words"
    names = ["set-test-0.tar", "set-train-0.tar", "set-train-1.tar", "set-val-0.tar"]
    for place, name in enumerate(names):
        tar(root / name, {"1.png": picture(place)})
    assert splits(str(root), AUTO) == (tuple(names[1:3]), (names[3],), (names[0],))
    assert splits(str(root), AUTO | {"train": "set-train-1*"}).train == (names[2],)
    assert splits(str(root), {"train": "*", "validation": None, "test": None}).train == tuple(names)
    with pytest.raises(OptionError, match=r"validation=set-train-0\*: "):
        splits(str(root), AUTO | {"validation": "set-train-0*"})
    root = tmp_path / "folders"
    for place, name in enumerate(("train/0.tar", "train/1.tar", "valid/0.tar")):
        tar(root / name, {"1.png": picture(place)})
    assert splits(str(root), AUTO) == (("train/0.tar", "train/1.tar"), ("valid/0.tar",), ())
    data = datasets.shards(datasets_options.Shards(root=str(root)))
    assert (len(data.train), data.validation and len(data.validation), data.test) == (2, 1, None)
    assert data.told == "2 shards: 2 images to train on; 1 shards: 1 to measure on"
    for wrong, right in ((tmp_path / "absent", "no such folder"), (tmp_path / "words/x", "no such"), (7, "no such")):
        with pytest.raises(OptionError, match=right):
            datasets.shards(datasets_options.Shards(root=str(wrong) if isinstance(wrong, Path) else wrong))
    (tmp_path / "empty").mkdir()
    with pytest.raises(OptionError, match=r"holds no shard \(a file ending in .tar\)"):
        datasets.shards(datasets_options.Shards(root=str(tmp_path / "empty")))


def test_a_folder_of_shards_says_how_it_is_read(tmp_path: Path) -> None:
    for name in ("0.tar", "train/0.tar"):
        tar(tmp_path / name.partition(".")[0] / name, {"1.png": picture(0)})
        with pytest.raises(OptionError, match=r"holds shards, which data=shards data.root=PATH reads"):
            datasets.folder(datasets_options.Folder(root=str(tmp_path / name.partition(".")[0])))


def test_what_is_wrong_with_a_shard_is_one_line(tmp_path: Path) -> None:
    several(tmp_path / "good", 3)
    content = (tmp_path / "good/0000.tar").read_bytes()
    damaged = bytearray(content)
    damaged[1024 * 2 + 5] ^= 1  # in the header of the second sample
    for name, data in (("zipped", b"\x1f\x8b" + content), ("cut", content[:1800]), ("damaged", damaged)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.tar").write_bytes(data)
        with pytest.raises(UserError, match=r"a\.tar: is no uncompressed tar file, or a damaged one") as caught:
            datasets.shards(datasets_options.Shards(root=str(tmp_path / name)))
        assert "\n" not in str(caught.value)
    tar(tmp_path / "none/a.tar", {"1.txt": b"x"})
    with pytest.raises(UserError, match="its shards hold no image"):
        datasets.shards(datasets_options.Shards(root=str(tmp_path / "none")))
    found = shards.find(str(tmp_path / "good"), ["0000.tar"])
    os.truncate(tmp_path / "good/0000.tar", 100)
    with pytest.raises(Unreadable, match=r"0000\.tar/00001\.png: .*0000\.tar ends before it"):
        found.read(1)


def test_an_index_is_made_anew_when_a_shard_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []
    scan = shards.scan
    monkeypatch.setattr(shards, "scan", lambda given: looks.append(1) or scan(given))
    several(tmp_path / "set", 6, each=3)
    first = shards.find(str(tmp_path / "set"), ["0000.tar", "0001.tar"])
    assert shards.find(str(tmp_path / "set"), ["0000.tar", "0001.tar"]).fingerprint == first.fingerprint
    assert len(looks) == 1
    assert shards.find(str(tmp_path / "set"), ["0001.tar"]).fingerprint != first.fingerprint
    tar(tmp_path / "set/0001.tar", {"9.png": picture(9)})
    assert len(shards.find(str(tmp_path / "set"), ["0000.tar", "0001.tar"])) == 4
    assert len(looks) == 3


def in_memory(folder: Path, address: str) -> str:
    """The files of a folder at an address of fsspec's file system in memory."""
    system, top = fsspec.url_to_fs(address)
    if system.exists(top):
        system.rm(top, recursive=True)
    for path in folder.rglob("*"):
        if path.is_file():
            system.pipe_file(f"{top}/{path.relative_to(folder)}", path.read_bytes())
    return address


def equal(one: Data, other: Data) -> bool:
    return one.train.fingerprint == other.train.fingerprint and all(
        torch.equal(one.train.read(i), other.train.read(i)) for i in range(len(one.train))
    )


def test_an_object_store_is_copied_whole_where_it_has_no_index(tmp_path: Path) -> None:
    several(tmp_path / "set")
    address = in_memory(tmp_path / "set", "memory://bucket/set")
    for _ in range(2):
        found = datasets.shards(datasets_options.Shards(root=address, cache=str(tmp_path / "copies")))
        assert equal(found, datasets.shards(datasets_options.Shards(root=str(tmp_path / "set"))))
    assert sorted(path.name for path in (tmp_path / "copies").rglob("*.tar")) == ["0000.tar", "0001.tar", "0002.tar"]


def test_an_address_that_nothing_serves_is_one_line() -> None:
    with pytest.raises(OptionError, match=r"^root=nosuch://a/b: Protocol not known: nosuch"):
        datasets.shards(datasets_options.Shards(root="nosuch://a/b"))
    with pytest.raises(OptionError, match=r"^root=memory://nothing/here: holds no shard"):
        datasets.shards(datasets_options.Shards(root="memory://nothing/here"))
    assert shards._TRIES > 1
