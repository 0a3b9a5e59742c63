"""The store of vectors: whole or as it was, verified to the byte, of one encoder, unable to run code."""

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
import torch

from ssvit import atomic_io
from ssvit.options import UserError
from ssvit.retrieval import store as module
from ssvit.retrieval.store import Store, StoreError, unit

ENCODER, OTHER = "seal 12ab, mean of layer 3", "seal 34cd, mean of layer 3"
CLASSES = ("cat", "dog")


def vectors(count: int, start: int = 0, width: int = 5) -> torch.Tensor:
    return torch.stack(
        [torch.randn(width, generator=torch.Generator().manual_seed(i)) for i in range(start, start + count)]
    )


def names(count: int, start: int = 0) -> list[str]:
    return [f"pictures/{i}.jpg" for i in range(start, start + count)]


def make(folder: Path, count: int = 6) -> Store:
    return Store.create(
        folder, vectors(count), names(count), torch.arange(count) % 2, CLASSES, encoder=ENCODER
    )  # fmt: skip


def content(store: Store) -> tuple:
    return store.vectors.tolist(), store.names, store.labels.tolist(), store.classes, store.encoder, store.width


def test_what_is_put_in_comes_back_of_length_one(tmp_path):
    made = make(tmp_path / "store")
    opened = Store.open(tmp_path / "store", encoder=ENCODER)
    assert content(opened) == content(made)
    wanted = vectors(6).double()
    wanted = wanted / (wanted * wanted).sum(1, keepdim=True) ** 0.5
    assert torch.equal(opened.vectors, wanted.float())
    assert (opened.names, opened.labels.tolist(), opened.classes) == (names(6), [0, 1, 0, 1, 0, 1], CLASSES)
    assert (len(opened), opened.width, opened.encoder) == (6, 5, ENCODER)


def test_reopened_after_many_adds_it_is_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_SHARD", 3 * 4 * 5)  # three vectors
    grown = make(tmp_path / "grown", 4)
    for start, count in ((4, 1), (5, 7), (12, 3)):
        grown.add(vectors(count, start), names(count, start), torch.arange(start, start + count) % 2)
    assert len(list((tmp_path / "grown").glob("*.safetensors"))) == 2 + 1 + 3 + 1
    monkeypatch.undo()
    whole = make(tmp_path / "whole", 15)
    assert content(grown) == content(whole)
    assert content(Store.open(tmp_path / "grown")) == content(whole)


def test_a_vector_is_scaled_alike_whatever_its_size_and_company(monkeypatch):
    some = vectors(50, width=7)
    together = unit(some)
    monkeypatch.setattr(module, "_BLOCK", 3)
    assert torch.equal(unit(some), together)
    for scale in (2.0**-140, 2.0**100):
        assert torch.equal(unit(some.double() * scale), together)
    assert torch.equal(unit(some.bfloat16()), unit(some.bfloat16().float()))


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
def test_a_vector_without_direction_is_named(tmp_path, value):
    some = vectors(6)
    some[3] = value
    with pytest.raises(UserError, match=r"pictures/3\.jpg has no direction"):
        Store.create(tmp_path / "store", some, names(6), encoder=ENCODER)
    assert not list(tmp_path.iterdir())


def test_standardised_features_are_those_of_the_first_images(tmp_path):
    some, later = vectors(6) * torch.tensor([1.0, 50, 1, 1, 0]) + torch.tensor([0.0, 0, 9, 0, 4]), vectors(3, start=6)
    store = Store.create(tmp_path / "store", some, names(6), encoder=ENCODER, standardize=True)
    store.add(later, names(3, start=6))
    columns = list(zip(*some.tolist(), strict=True))
    means = [statistics.fmean(column) for column in columns]
    deviations = [statistics.pstdev(column) for column in columns]
    for row, given in zip(
        Store.open(tmp_path / "store").vectors.tolist(), [*some.tolist(), *later.tolist()], strict=True
    ):
        scaled = [(x - m) / d if d else 0 for x, m, d in zip(given, means, deviations, strict=True)]
        length = sum(x * x for x in scaled) ** 0.5
        assert row == pytest.approx([x / length for x in scaled], abs=1e-6)
    assert torch.equal(Store.open(tmp_path / "store").directions(later, names(3)), store.vectors[6:])


def test_a_store_of_plain_features_is_as_before(tmp_path):
    make(tmp_path / "store")
    manifest = json.loads((tmp_path / "store" / "manifest.json").read_text())
    assert manifest["schema"] == 1
    assert "standard" not in manifest


def test_images_that_cannot_be_standardised_are_told(tmp_path):
    with pytest.raises(UserError, match="only images that differ can be standardised"):
        Store.create(tmp_path / "store", vectors(1), names(1), encoder=ENCODER, standardize=True)
    some = vectors(6)
    some[3] = float("nan")
    with pytest.raises(UserError, match=r"pictures/3\.jpg has no direction"):
        Store.create(tmp_path / "store", some, names(6), encoder=ENCODER, standardize=True)
    assert not list(tmp_path.iterdir())


def test_labels_may_be_unknown_and_names_odd(tmp_path):
    odd = ["a b.jpg", "ü/雨.jpg", os.fsdecode(b"\xff\xfe.jpg")]
    store = Store.create(tmp_path / "store", vectors(3), odd, encoder=ENCODER)
    assert store.labels.tolist() == [-1, -1, -1]
    assert store.classes == ()
    assert Store.open(tmp_path / "store").names == odd
    assert store.places(["ü/雨.jpg", "none"]).tolist() == [1, -1]


def test_added_classes_are_matched_by_name(tmp_path):
    store = make(tmp_path / "store")
    store.add(vectors(4, 6), names(4, 6), [0, 1, 2, -1], ("ant", "dog", "cat"))
    assert store.classes == ("cat", "dog", "ant")
    assert store.labels[6:].tolist() == [2, 1, 0, -1]
    assert content(Store.open(tmp_path / "store")) == content(store)


def test_an_image_that_is_there_already_is_refused_and_the_absent_are_told(tmp_path):
    store = make(tmp_path / "store")
    before = (tmp_path / "store" / "manifest.json").read_bytes()
    with pytest.raises(StoreError, match=r"holds 2 of the 5 images already, such as pictures/4\.jpg"):
        store.add(vectors(5, 4), names(5, 4))
    assert (tmp_path / "store" / "manifest.json").read_bytes() == before
    assert store.absent(names(5, 4)) == [2, 3, 4]
    store.add(vectors(3, 6), names(3, 6))
    assert store.absent(names(5, 4)) == []
    assert store.names == names(9)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"names": names(5)}, "6 vectors, 5 names and 6 labels do not belong together"),
        ({"labels": [0, 1]}, "6 vectors, 6 names and 2 labels"),
        ({"labels": [0, 1, 2, 0, 0, 0]}, r"label 2 is outside of \[0, 2\)"),
        ({"labels": [0, -2, 1, 0, 0, 0]}, "label -2 is outside"),
        ({"classes": ("cat", "cat")}, "two classes have the same name"),
        ({"names": [*names(5), "pictures/2.jpg"]}, r"pictures/2\.jpg is given twice"),
        ({"names": [*names(5), ""]}, "cannot be named ''"),
        ({"vectors": vectors(6)[:0]}, "no vectors"),
    ],
)
def test_what_a_store_cannot_hold_is_refused(tmp_path, changes, message):
    given = {"vectors": vectors(6), "names": names(6), "labels": [0] * 6, "classes": CLASSES, **changes}
    with pytest.raises(UserError, match=message) as error:
        Store.create(tmp_path / "store", **given, encoder=ENCODER)
    assert "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())


def test_another_width_and_an_occupied_folder_are_refused(tmp_path):
    store = make(tmp_path / "store")
    with pytest.raises(UserError, match="width 5, not 4"):
        store.add(vectors(1, 9, width=4), ["new"])
    with pytest.raises(StoreError, match="holds something already"):
        make(tmp_path / "store")
    assert content(Store.open(tmp_path / "store")) == content(store)


def test_another_encoder_is_refused_and_both_are_named(tmp_path):
    make(tmp_path / "store")
    with pytest.raises(StoreError) as error:
        Store.open(tmp_path / "store", encoder=OTHER)
    assert ENCODER in str(error.value)
    assert OTHER in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("file", ["manifest.json", "vectors_00000000.safetensors", "vectors_00000001.safetensors"])
def test_damage_of_any_byte_is_noticed(tmp_path, file):
    store = make(tmp_path / "store")
    store.add(vectors(2, 6), names(2, 6))
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


def rewrite(folder: Path, **changes) -> None:
    """As one would who wants to be believed."""
    manifest = {**json.loads((folder / "manifest.json").read_text()), **changes}
    (folder / "manifest.json").write_bytes(atomic_io.sealed(manifest))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "is damaged"),
        ("{", "is damaged"),
        ("[" * 100_000, "is damaged"),
        ('{"schema": 1, "step": 3}', "is no store of image vectors"),
    ],
)
def test_a_foreign_manifest_is_refused(tmp_path, text, message):
    make(tmp_path / "store")
    (tmp_path / "store" / "manifest.json").write_text(text)
    with pytest.raises(StoreError, match=message):
        Store.open(tmp_path / "store")


def test_a_manifest_without_end_and_pipes_are_not_waited_for(tmp_path, monkeypatch):
    store = make(tmp_path / "store")
    shard = tmp_path / "store" / "vectors_00000000.safetensors"
    shard.unlink()
    os.mkfifo(shard)
    with pytest.raises(StoreError, match=r"vectors_00000000\.safetensors: cannot be read \(not a regular file\)"):
        Store.open(tmp_path / "store")
    monkeypatch.setattr(atomic_io, "MANIFEST_BYTES", 1000)
    with pytest.raises(StoreError, match=r"a manifest of \d+ bytes could not be read again\); what it held is whole"):
        store.add(vectors(1, 6), names(1, 6), [0], ["a name" * 1000])
    with open(tmp_path / "store" / "manifest.json", "r+b") as file:
        file.truncate(1 << 40)
    with pytest.raises(StoreError, match=r"manifest\.json: is damaged"):
        Store.open(tmp_path / "store")
    (tmp_path / "store" / "manifest.json").unlink()
    os.mkfifo(tmp_path / "store" / "manifest.json")
    with pytest.raises(StoreError, match=r"no readable manifest\.json \(not a regular file\)"):
        Store.open(tmp_path / "store")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema": 3}, "has schema 3"),
        ({"width": 6}, "does not hold what the manifest says"),
        ({"classes": ["cat"]}, "does not hold what the manifest says"),
        ({"shards": []}, "is damaged"),
        ({"shards": [{"file": "manifest.json"}]}, "is damaged"),
        ({"shards": 3}, "is damaged"),
        ({"encoder": None}, "is damaged"),
        ({"standard": {"mean": [0.0] * 5}}, "is damaged"),
        ({"standard": {"mean": [0.0] * 5, "scale": [1.0]}}, "is damaged"),
        ({"standard": 3}, "is damaged"),
    ],
)
def test_a_manifest_that_says_what_is_not_so_is_refused(tmp_path, changes, message):
    make(tmp_path / "store")
    rewrite(tmp_path / "store", **changes)
    with pytest.raises(StoreError, match=message):
        Store.open(tmp_path / "store")


def test_a_manifest_cannot_name_files_elsewhere(tmp_path):
    make(tmp_path / "store")
    shard = tmp_path / "store" / "vectors_00000000.safetensors"
    entry = {"file": "../elsewhere.safetensors", "count": 6, "sha256": hashlib.sha256(shard.read_bytes()).hexdigest()}
    shard.rename(tmp_path / "elsewhere.safetensors")
    rewrite(tmp_path / "store", shards=[entry])
    with pytest.raises(StoreError, match="is damaged"):
        Store.open(tmp_path / "store")


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("exploded",)


def test_a_pickle_in_a_store_does_not_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "store")
    data = pickle.dumps(Bomb())
    (tmp_path / "store" / "vectors_00000000.safetensors").write_bytes(data)
    entry = {"file": "vectors_00000000.safetensors", "count": 6, "sha256": hashlib.sha256(data).hexdigest()}
    rewrite(tmp_path / "store", shards=[entry])
    with pytest.raises(StoreError, match="is not a shard of vectors"):
        Store.open(tmp_path / "store")
    assert not (tmp_path / "exploded").exists()


class Killed(BaseException):
    """No handler of the code under test may catch it, as none catches SIGKILL."""


class Countdown:
    """Every synchronising and renaming counts, and the one whose turn it is fails in place of being done."""

    def __init__(self, patch, turn: int, failure: BaseException) -> None:
        self.left = turn
        for owner, name in ((os, "fsync"), (Path, "rename")):
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
def test_an_interrupted_add_leaves_the_old_store_or_the_new(tmp_path, monkeypatch, failure):
    monkeypatch.setattr(module, "_SHARD", 2 * 4 * 5)  # two vectors
    before = content(make(tmp_path / "before"))
    shutil.copytree(tmp_path / "before", tmp_path / "after")
    Store.open(tmp_path / "after").add(vectors(3, 6), names(3, 6), [0, 1, -1])
    after = content(Store.open(tmp_path / "after"))
    seen, messages = [], []
    for turn in range(100):
        folder = tmp_path / f"store{turn}"
        shutil.copytree(tmp_path / "before", folder)
        store = Store.open(folder)
        with monkeypatch.context() as patch:
            clock = Countdown(patch, turn, failure)
            try:
                store.add(vectors(3, 6), names(3, 6), [0, 1, -1])
            except Killed:
                pass
            except StoreError as error:
                messages.append(str(error))
        if clock.left >= 0:
            break
        opened = Store.open(folder)
        seen.append(content(opened))
        assert seen[-1] in (before, after)
        if failure is FULL and seen[-1] == before:
            assert sorted(path.name for path in folder.iterdir()) == sorted(os.listdir(tmp_path / "before"))
        if missing := opened.absent(names(3, 6)):
            assert len(missing) == 3
            opened.add(vectors(3, 6), names(3, 6), [0, 1, -1])
        assert content(Store.open(folder)) == after
    # Two shards, their folder, the manifest, its rename, the folder again: of these the last comes after the rename.
    assert seen == [before] * 5 + [after]
    assert len(messages) == (len(seen) if failure is FULL else 0)
    assert all("(No space left on device); what it held is whole" in message for message in messages)


@pytest.mark.parametrize("failure", [Killed(), FULL], ids=["killed", "disk full"])
def test_an_interrupted_creation_leaves_nothing_or_all(tmp_path, monkeypatch, failure):
    whole = content(make(tmp_path / "whole"))
    messages = []
    for turn in range(100):
        folder = tmp_path / str(turn) / "store"
        with monkeypatch.context() as patch:
            clock = Countdown(patch, turn, failure)
            try:
                make(folder)
            except Killed:
                pass
            except StoreError as error:
                messages.append(str(error))
        if clock.left >= 0:
            break
        if not folder.exists():
            make(folder)
        assert content(Store.open(folder)) == whole
        assert [path.name for path in folder.parent.iterdir()] == ["store"]
    assert turn > 4
    assert len(messages) == (turn if failure is FULL else 0)
    assert all("cannot be written (No space left on device)" in message for message in messages)


def test_what_an_interrupted_add_has_left_is_removed_by_the_next(tmp_path):
    store = make(tmp_path / "store")
    for leftover in ("vectors_00000001.safetensors", "vectors_00000007.safetensors", "manifest.json.part"):
        (tmp_path / "store" / leftover).write_bytes(b"half")
    (tmp_path / "store" / "notes.txt").write_text("the user's own")
    store.add(vectors(1, 6), names(1, 6))
    assert sorted(os.listdir(tmp_path / "store")) == [
        "manifest.json", "notes.txt", "vectors_00000000.safetensors", "vectors_00000001.safetensors"
    ]  # fmt: skip


def test_two_do_not_write_at_once_nor_one_to_what_it_has_not_seen(tmp_path):
    store = make(tmp_path / "store")
    for lock, write in (
        (tmp_path / "store" / "lock", lambda: store.add(vectors(1, 6), names(1, 6))),
        (tmp_path / ".new.lock", lambda: make(tmp_path / "new")),
    ):
        with atomic_io.locked(lock, StoreError), pytest.raises(StoreError) as refused:
            write()
        assert f"process {os.getpid()} on {socket.gethostname()} " in str(refused.value)
    make(tmp_path / "new")
    Store.open(tmp_path / "store").add(vectors(1, 6), names(1, 6))
    with pytest.raises(StoreError, match="open it again"):
        store.add(vectors(1, 7), names(1, 7))
    assert Store.open(tmp_path / "store").names == names(7)
    assert not [*tmp_path.rglob("*lock")]


def test_vectors_of_one_shard_are_mapped_and_cannot_be_written_through(tmp_path):
    make(tmp_path / "store")
    store = Store.open(tmp_path / "store")
    mapped = Path("/proc/self/maps")
    if mapped.exists():
        assert str(tmp_path / "store" / "vectors_00000000.safetensors") in mapped.read_text()
    store.vectors[0] = 7
    assert content(Store.open(tmp_path / "store")) == content(make(tmp_path / "again"))
