"""The store of features: whole or as it was, verified to the byte, of one encoder, unable to run code."""

import errno
import hashlib
import json
import os
import pickle
import shutil
import socket
import statistics
from pathlib import Path

import pytest
import safetensors.torch
import torch

from ssvit import atomic_io
from ssvit.options import UserError
from ssvit.retrieval.store import Store, StoreError, writing

ENCODER, OTHER = "seal 12ab, mean of layer 3", "seal 34cd, mean of layer 3"
FILES = ["manifest.json", "part_00000000.safetensors", "part_00000001.safetensors"]


def vectors(count: int, start: int = 0, width: int = 5) -> torch.Tensor:
    rows = range(start, start + count)
    return torch.stack([torch.randn(width, generator=torch.Generator().manual_seed(row)) for row in rows])


def images(count: int, start: int = 0) -> tuple[list[str], list[str | None], torch.Tensor]:
    """Names, classes and features as `Store.add` takes them."""
    rows = range(start, start + count)
    return (
        [f"pictures/{row}.jpg" for row in rows],
        [("cat", "dog", None)[row % 3] for row in rows],
        vectors(count, start),
    )


def make(folder: Path, *counts: int, standardize: bool = False) -> Store:
    """A store of as many parts as there are counts, by default two, of six images and of two."""
    with writing(folder):
        store = Store.create(folder, ENCODER, standardize=standardize)
        for count in counts or (6, 2):
            store.add(*images(count, len(store)))
    return store


def content(store: Store) -> tuple:
    return store.features.tolist(), store.names, store.classes, store.encoder, store.standardize


def test_a_reopened_store_holds_what_was_added_in_any_number_of_parts(tmp_path):
    whole, grown = make(tmp_path / "whole", 15), make(tmp_path / "grown", 4, 1, 7, 3)
    assert len(list((tmp_path / "grown").glob("*.safetensors"))) == 4
    assert (whole.names, whole.classes, whole.features.tolist()) == tuple(
        of.tolist() if isinstance(of, torch.Tensor) else of for of in images(15)
    )
    assert content(whole) == content(grown) == content(Store.open(tmp_path / "grown", encoder=ENCODER))
    assert len(whole) == 15
    assert whole.places == {name: row for row, name in enumerate(whole.names)}
    assert whole.absent(["new", *whole.names[3:], "other"]) == ["new", "other"]


@pytest.mark.parametrize("standardize", [False, True])
def test_features_are_compared_by_direction_and_standardised_over_the_images_of_the_store(tmp_path, standardize):
    columns = torch.tensor([1.0, 50, 1, 1, 0]), torch.tensor([0.0, 0, 9, 0, 4])
    names, classes, features = images(8)
    features = features * columns[0] + columns[1]
    with writing(tmp_path / "store"):
        store = Store.create(tmp_path / "store", ENCODER, standardize=standardize)
        store.add(names[:6], classes[:6], features[:6])
        store.add(names[6:], classes[6:], features[6:])
    queries = vectors(3, 100)
    for row, given in zip(Store.open(tmp_path / "store").directions(queries).tolist(), queries.tolist(), strict=True):
        scaled = given
        if standardize:
            moments = [(statistics.fmean(column), statistics.pstdev(column)) for column in features.T.tolist()]
            pairs = zip(given, moments, strict=True)
            scaled = [(x - mean) / deviation if deviation else 0 for x, (mean, deviation) in pairs]
        length = sum(x * x for x in scaled) ** 0.5
        assert row == pytest.approx([x / length for x in scaled], abs=1e-6)


def test_images_that_do_not_differ_cannot_be_standardised(tmp_path):
    store = make(tmp_path / "store", 1, standardize=True)
    with pytest.raises(StoreError, match="standardize=false"):
        store.directions(store.features)


def test_names_may_be_of_any_bytes(tmp_path):
    odd = ["a b.jpg", "ü/雨.jpg", os.fsdecode(b"\xff\xfe.jpg"), "new\nline\0"]
    with writing(tmp_path / "store"):
        Store.create(tmp_path / "store", ENCODER).add(odd, odd, vectors(4))
    store = Store.open(tmp_path / "store")
    assert (store.names, store.classes) == (odd, odd)


def with_row(value: float) -> torch.Tensor:
    return vectors(3, 8).index_fill(0, torch.tensor(1), value)


@pytest.mark.parametrize(
    ("names", "classes", "features", "message"),
    [
        (["a", "b"], [None] * 3, vectors(3), "3 vectors, 2 names and 3 classes"),
        (["a", "b", "c"], [None], vectors(3), "3 vectors, 3 names and 1 classes"),
        (["a", "b", "a"], [None] * 3, vectors(3), "name of its own"),
        (["a", "b", "pictures/4.jpg"], [None] * 3, vectors(3), "name of its own"),
        (["a", "b", ""], [None] * 3, vectors(3), "name of its own"),
        (["a", "b", "c"], [None] * 3, vectors(3, width=4), "width 5, not 4"),
        *((["a", "b", "c"], [None] * 3, with_row(value), "image b has") for value in (0.0, torch.nan, torch.inf)),
    ],
)
def test_what_a_store_cannot_hold_is_refused_and_changes_nothing(tmp_path, names, classes, features, message):
    store = make(tmp_path / "store")
    before = content(store)
    with pytest.raises(UserError, match=message) as error:
        store.add(names, classes, features)
    assert "\n" not in str(error.value)
    assert content(Store.open(tmp_path / "store")) == content(store) == before
    assert sorted(os.listdir(tmp_path / "store")) == FILES


def test_an_occupied_folder_and_another_encoder_are_refused(tmp_path):
    make(tmp_path / "store")
    with pytest.raises(StoreError, match="holds something already"):
        make(tmp_path / "store")
    with pytest.raises(StoreError, match=f"{ENCODER}, not with {OTHER}"):
        Store.open(tmp_path / "store", encoder=OTHER)


@pytest.mark.parametrize("file", FILES)
def test_damage_of_any_byte_is_noticed(tmp_path, file):
    make(tmp_path / "store")
    path = tmp_path / "store" / file
    whole = path.read_bytes()
    for at in range(len(whole)):
        damaged = bytearray(whole)
        # Blanks for blanks too: JSON would read the same.
        damaged[at] = ord("\t") if whole[at] in b" \n" else whole[at] ^ (1 << at % 8)
        path.write_bytes(damaged)
        with pytest.raises(StoreError, match=str(tmp_path)) as error:
            Store.open(tmp_path / "store")
        assert "\n" not in str(error.value)
    for length in (0, 1, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(StoreError, match="is damaged"):
            Store.open(tmp_path / "store")
    path.unlink()
    with pytest.raises(StoreError, match="No such file"):
        Store.open(tmp_path / "store")
    os.mkfifo(path)  # is not waited for
    with pytest.raises(StoreError, match="not a regular file"):
        Store.open(tmp_path / "store")


def test_a_manifest_has_a_longest_length(tmp_path, monkeypatch):
    store = make(tmp_path / "store")
    monkeypatch.setattr(atomic_io, "MANIFEST_BYTES", 300)
    with pytest.raises(StoreError, match="what it held is whole"):
        store.add(*images(1, 8))
    with open(tmp_path / "store" / "manifest.json", "r+b") as file:
        file.truncate(1 << 40)
    with pytest.raises(StoreError, match=r"manifest\.json: is damaged"):
        Store.open(tmp_path / "store")


@pytest.mark.parametrize("text", ["[]", "{", "[" * 100_000, '{"schema": 1, "step": 3}'])
def test_a_foreign_manifest_is_refused(tmp_path, text):
    make(tmp_path / "store")
    (tmp_path / "store" / "manifest.json").write_text(text)
    with pytest.raises(StoreError, match=r"is damaged|is no store"):
        Store.open(tmp_path / "store")


def rewrite(folder: Path, part: bytes | None = None, **changes) -> None:
    """Change a manifest, and its only part, as one would who wants to be believed."""
    if part is not None:
        (folder / "part_00000000.safetensors").write_bytes(part)
        changes = {"parts": [hashlib.sha256(part).hexdigest()]}
    manifest = {**json.loads((folder / "manifest.json").read_text()), **changes}
    (folder / "manifest.json").write_bytes(atomic_io.sealed(manifest))


@pytest.mark.parametrize(
    "changes",
    [
        {"schema": 3}, {"encoder": None}, {"standardize": 1}, {"parts": []}, {"parts": 3}, {"parts": [3]},
        {"parts": ["../elsewhere"]}, {"kind": "images"},
    ],
    ids=str,
)  # fmt: skip
def test_a_manifest_that_is_not_so_is_refused(tmp_path, changes):
    make(tmp_path / "store")
    rewrite(tmp_path / "store", **changes)
    with pytest.raises(StoreError) as error:
        Store.open(tmp_path / "store")
    assert "\n" not in str(error.value)


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("exploded",)


def part(images: object, features: torch.Tensor) -> bytes:
    text = bytearray(images if isinstance(images, bytes) else json.dumps(images).encode())
    return safetensors.torch.save({"features": features, "images": torch.frombuffer(text, dtype=torch.uint8)})


@pytest.mark.parametrize(
    "data",
    [
        pickle.dumps(Bomb()), b"", part([["a"], ["b"]], vectors(2)), part([["a", "b"], ["b"]], vectors(2)),
        part([["a", 3], [None, None]], vectors(2)), part([["a", "b"], [None, 3]], vectors(2)), part(3, vectors(1)),
        part([["a", "a"], [None, None]], vectors(2)), part([["a"], [None]], vectors(1).double()),
        part([["a"], [None]], vectors(1)[0]), part(b"[" * 100_000, vectors(1)),
        safetensors.torch.save({"features": vectors(1)}),
    ],
)  # fmt: skip
def test_a_hostile_part_is_refused_and_runs_nothing(tmp_path, monkeypatch, data):
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "store", 2)
    rewrite(tmp_path / "store", data)
    with pytest.raises(StoreError) as error:
        Store.open(tmp_path / "store")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "exploded").exists()


class Killed(BaseException):
    """No handler of the code under test may catch it, as none catches SIGKILL."""


class Countdown:
    """Every synchronising and renaming counts, and the one whose turn it is fails in place of being done."""

    def __init__(self, patch, turn: int, failure: BaseException) -> None:
        self.left = turn
        for owner, name in ((os, "fsync"), (Path, "replace")):
            patch.setattr(owner, name, self.counting(getattr(owner, name), failure))

    def counting(self, call, failure):
        def counted(*arguments):
            self.left -= 1
            if self.left == -1:
                raise failure
            return call(*arguments)

        return counted


FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("failure", [Killed(), FULL], ids=["killed", "disk full"])
@pytest.mark.parametrize("before", [0, 6])
def test_an_interrupted_add_leaves_the_old_store_or_the_new_and_can_be_repeated(tmp_path, monkeypatch, failure, before):
    if before:
        make(tmp_path / "before", before)
    after = content(make(tmp_path / "after", *[before] * bool(before), 3))
    outcomes, messages = [], []
    for turn in range(100):
        folder = tmp_path / f"store{turn}"
        if before:
            shutil.copytree(tmp_path / "before", folder)
        store = Store.open(folder) if before else Store.create(folder, ENCODER)
        with monkeypatch.context() as patch:
            clock = Countdown(patch, turn, failure)
            try:
                store.add(*images(3, before))
            except Killed:
                pass
            except StoreError as error:
                messages.append(str(error))
        if clock.left >= 0:
            break
        is_new = "manifest.json" not in os.listdir(folder)
        opened = Store.create(folder, ENCODER) if is_new else Store.open(folder)
        outcomes.append(len(opened))
        if opened.absent(images(3, before)[0]):
            opened.add(*images(3, before))
        assert content(Store.open(folder)) == after
        assert sorted(os.listdir(folder)) == FILES[: 2 + bool(before)]
    # The part, its rename, the folder, the manifest, its rename, the folder again: the last comes after the rename.
    assert outcomes == [before] * 5 + [before + 3]
    assert len(messages) == (len(outcomes) if failure is FULL else 0)
    assert all("(No space left on device); what it held is whole" in message for message in messages)


def test_two_do_not_write_at_once(tmp_path):
    make(tmp_path / "store")
    (tmp_path / "store" / "lock").write_text("process 1 on another host")  # of a process that was killed
    with writing(tmp_path / "store"), pytest.raises(StoreError) as refused, writing(tmp_path / "store"):
        pass
    assert f"process {os.getpid()} on {socket.gethostname()} " in str(refused.value)
    assert sorted(os.listdir(tmp_path / "store")) == FILES
    with writing(tmp_path / "nothing" / "written"):
        pass
    assert not (tmp_path / "nothing" / "written").exists()
