"""A store of features is complete or unchanged, verified to the byte, of one encoder, and unable to run code."""

import errno
import json
import os
import pickle
import socket
from hashlib import sha256
from itertools import count
from pathlib import Path

import pytest
import safetensors.torch
import torch

from ssvit.errors import UserError
from ssvit.retrieval.options import PART_FILES, encoder_of
from ssvit.retrieval.store import SCHEMA, Store, StoreError, writing

ENCODER, OTHER = "seal 12ab, mean of layer 3", "seal 34cd, mean of layer 3"


def images(count: int, start: int = 0) -> tuple[list[str], list[str | None], torch.Tensor]:
    """Names, classes and features as `Store.add` takes them."""
    rows = range(start, start + count)
    features = [torch.randn(5, generator=torch.Generator().manual_seed(row)) for row in rows]
    return (
        [f"pictures/{row}.jpg" for row in rows],
        [("cat", "dog", None)[row % 3] for row in rows],
        torch.stack(features),
    )


def make(folder: Path, *counts: int) -> Store:
    """A store of as many parts as there are counts."""
    with writing(folder):
        store = Store.open(folder, ENCODER, create=True)
        for count in counts:
            store.add(*images(count, len(store)))
    return store


def content(store: Store) -> tuple:
    return store.names, store.classes, store.features.tolist(), store.row_of


def refused(folder: Path) -> str:
    """The message of a store that cannot be opened, which is one line with the folder."""
    with pytest.raises(StoreError) as error:
        Store.open(folder, ENCODER)
    assert str(folder) in str(error.value)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_reopened_store_has_the_added_images_in_any_number_of_parts(tmp_path):
    whole, grown = make(tmp_path / "whole", 15), make(tmp_path / "grown", 4, 1, 7, 3)
    assert len(list((tmp_path / "grown").glob(PART_FILES))) == 4
    names, classes, features = images(15)
    assert content(whole) == (names, classes, features.tolist(), {name: row for row, name in enumerate(names)})
    assert content(whole) == content(grown) == content(Store.open(tmp_path / "grown", ENCODER))
    assert encoder_of(tmp_path / "grown") == ENCODER
    assert encoder_of(tmp_path) == ""


def test_names_may_have_any_bytes(tmp_path):
    odd = ["a b.jpg", "ü/雨.jpg", os.fsdecode(b"\xff\xfe.jpg"), "new\nline\0"]
    make(tmp_path / "store").add(odd, odd, images(4)[2])
    store = Store.open(tmp_path / "store", ENCODER)
    assert (store.names, store.classes) == (odd, odd)


def test_images_are_replaced_and_removed_by_name(tmp_path):
    names, classes, features = images(9)
    store = make(tmp_path / "store", 4, 2)
    store.add(names[1:3], classes[5:7], features[6:8], contents=["x", "y"])
    store.add(names[8:], classes[8:], features[8:], removed=[names[0], names[2], "another"])
    store.add([], [], features[:0], removed=[names[5]])
    rows = [(3, 3, ""), (4, 4, ""), (1, 6, "x"), (8, 8, "")]  # of names, and of features, and contents
    for kept in (store, Store.open(tmp_path / "store", ENCODER)):
        assert kept.names == [names[name] for name, *_ in rows]
        assert kept.features.tolist() == [features[row].tolist() for _, row, _ in rows]
        assert (kept.contents, kept.classes[2]) == ([content for *_, content in rows], classes[5])
        assert kept.row_of == {name: row for row, name in enumerate(kept.names)}
    store.add(names[5:6], classes[5:6], features[5:6])
    assert Store.open(tmp_path / "store", ENCODER).names == [*kept.names, names[5]]


@pytest.mark.parametrize("value", [0.0, torch.nan, torch.inf])
def test_a_vector_without_direction_changes_nothing(tmp_path, value):
    store = make(tmp_path / "store", 6)
    with pytest.raises(UserError, match=r"\bb\b"):
        store.add(["a", "b", "c"], [None] * 3, images(3)[2].index_fill(0, torch.tensor(1), value))
    assert content(Store.open(tmp_path / "store", ENCODER)) == content(store)


def test_a_store_of_another_encoder_and_a_folder_of_other_files_are_refused(tmp_path):
    make(tmp_path / "store", 2)
    with pytest.raises(StoreError, match=f"{ENCODER}.*{OTHER}"):
        Store.open(tmp_path / "store", OTHER)
    (tmp_path / "other").mkdir()
    refused(tmp_path / "other")
    (tmp_path / "other" / "a.txt").touch()
    with pytest.raises(StoreError):
        Store.open(tmp_path / "other", ENCODER, create=True)


def test_damage_of_any_byte_is_detected(tmp_path):
    make(tmp_path / "store", 2, 1)
    first, second = sorted((tmp_path / "store").iterdir())
    data = first.read_bytes()
    damaged = [data[:at] + bytes([data[at] ^ (1 << at % 8)]) + data[at + 1 :] for at in range(len(data))]
    for changed in (*damaged, b"", data[:1], data[:-1], data.replace(b" ", b"\t")):
        if changed != data:
            first.write_bytes(changed)
            refused(tmp_path / "store")
    first.unlink()
    assert "part 0" in refused(tmp_path / "store")
    first.write_bytes(data)
    second.rename(second.with_name(second.name.replace("00000001", "00000002")))
    assert "part 1" in refused(tmp_path / "store")
    first.unlink()
    os.mkfifo(first)  # is not waited for
    assert "not a regular file" in refused(tmp_path / "store")


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("exploded",)


def part(features: torch.Tensor | None = None, **changes: object) -> bytes:
    """A part of two images with some changes."""
    names, classes, two = images(2)
    values = {"schema": SCHEMA, "encoder": ENCODER, "names": names, "classes": classes, **changes}
    texts = {name: value if name == "raw" else json.dumps(value) for name, value in values.items()}
    return safetensors.torch.save({"features": two if features is None else features}, texts)


@pytest.mark.parametrize(
    "data",
    [
        pickle.dumps(Bomb()), b"", part(names=["a"]), part(classes=["b"]), part(names=["a", 3]), part(names=3),
        part(contents=["x"]), part(removed=[3]),
        part(classes=[None, 3]), part(names=["a", "a"]), part(schema=SCHEMA + 1), part(schema=None), part(encoder=None),
        part(raw="[" * 100_000), part(raw="{"), part(images(2)[2].double()), part(images(2)[2][0]),
        safetensors.torch.save({"features": images(2)[2]}), safetensors.torch.save({"other": images(2)[2]}, {"a": "1"}),
    ],
    ids=count(),  # the bytes of metadata are in random order
)  # fmt: skip
def test_a_hostile_part_is_refused_and_runs_nothing(tmp_path, monkeypatch, data):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / f"part_00000000_{sha256(data).hexdigest()}.safetensors").write_bytes(data)
    refused(tmp_path / "store")
    assert not (tmp_path / "exploded").exists()


class Killed(BaseException):
    """No handler of the code under test may catch it, as none catches SIGKILL."""


FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(("failure", "error"), [(Killed(), Killed), (FULL, StoreError)], ids=["killed", "disk full"])
@pytest.mark.parametrize(
    ("call", "added"), [("os.fsync", 0), ("pathlib.Path.replace", 0), ("ssvit.retrieval.store.synchronise", 3)]
)
def test_an_interrupted_add_leaves_the_old_store_or_the_new_one_and_can_be_repeated(
    tmp_path, monkeypatch, failure, error, call, added
):
    def fail(*arguments):
        raise failure

    store, after = make(tmp_path / "store", 6), content(make(tmp_path / "after", 6, 3))
    with monkeypatch.context() as patch:
        patch.setattr(call, fail)
        with pytest.raises(error):
            store.add(*images(3, 6))
    opened = Store.open(tmp_path / "store", ENCODER)
    assert len(opened) == 6 + added
    if not added:
        opened.add(*images(3, 6))
    assert content(Store.open(tmp_path / "store", ENCODER)) == after


def test_a_second_writer_is_refused_with_the_process_that_writes(tmp_path):
    make(tmp_path / "store", 2)
    (tmp_path / "store" / "lock").write_text("process 1 on another host")  # of a process that was killed
    with writing(tmp_path / "store"), pytest.raises(StoreError) as error, writing(tmp_path / "store"):
        pass
    assert f" {os.getpid()} " in str(error.value)
    assert socket.gethostname() in str(error.value)
    assert [path.name for path in (tmp_path / "store").glob("*")] == [
        path.name for path in (tmp_path / "store").glob(PART_FILES)
    ]
    with writing(tmp_path / "nothing" / "written"):
        pass
    assert not (tmp_path / "nothing" / "written").exists()
