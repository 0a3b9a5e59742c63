"""An index holds what plain lists hold, is mapped, and is made anew when a folder has changed."""

import hashlib
import os
import random
import re
from pathlib import Path

import pytest
import torch
from ranks import child, together

from ssvit.data.sources import files, folder, index
from ssvit.data.sources.files import Files, Listing, listing
from ssvit.data.sources.index import Index
from ssvit.options import UserError

LONG_AGO = 10**18  # nanoseconds since 1970


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "KEPT_FROM", 3)


def make(root: Path, *names: str) -> Path:
    """Files of various sizes; their folders were changed long ago."""
    for place, name in enumerate(names):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(bytes(place))
    for one in (root, *(path for path in root.rglob("*") if path.is_dir())):
        os.utime(one, ns=(LONG_AGO, LONG_AGO))
    return root


def test_rows_are_read_as_they_were_written(tmp_path: Path) -> None:
    generator = random.Random(0)
    odd = ("b/\udcff\n.jpg", "a/ü.png", "c d/1.jpg")
    rows = [(f"{name}{i}", generator.randrange(-1, 10**12), name[:1], (i, i**2)) for name in odd for i in range(50)]
    made = Index.of(rows, ("first", "second"), note="kept")
    made.write(tmp_path / "index")
    found = Index.read(tmp_path / "index")
    assert len(found) == len(rows)
    assert [(found.name(i), found.size(i)) for i in range(len(rows))] == [row[:2] for row in rows]
    assert (found.classes, found.facts["note"]) == (("a", "b", "c"), "kept")
    labels = found.labels(root="")
    assert labels is not None
    assert [found.classes[label] for label in labels] == [row[2] for row in rows]
    assert list(zip(found.columns["first"].tolist(), found.columns["second"].tolist(), strict=True)) == [
        row[3] for row in rows
    ]
    texts = [f"{name}\0{size}\0".encode(errors="surrogateescape") for name, size, _, _ in rows]
    assert found.fingerprint() == made.fingerprint() == hashlib.sha256(b"".join(texts)).hexdigest()
    chosen = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))[:40]
    assert found.take(chosen).fingerprint() == hashlib.sha256(b"".join(texts[i] for i in chosen)).hexdigest()
    assert found.labels(("z", "c", "b", "a"), root="")[[0, 50, 100]].tolist() == [2, 3, 1]
    with pytest.raises(UserError, match=r"^there: the class a is not among the 2 that are trained on"):
        found.labels(("b", "c"), root="there")


def test_a_row_without_a_class_leaves_none_labelled() -> None:
    assert Index.of([("a", 1, "x", ()), ("b", 1, None, ())]).labels(root="") is None
    assert len(Index.of([])) == 0


def test_a_damaged_file_is_no_index(tmp_path: Path) -> None:
    (tmp_path / "index").write_bytes(b"something else")
    with pytest.raises(ValueError, match="no index of images"):
        Index.read(tmp_path / "index")


@pytest.mark.parametrize(
    "names",
    [
        ("a/1.jpg", "a/2.jpg", "b/1.jpg", "b/c/1.jpg", "b c/1.jpg"),
        ("2.jpg", "1.jpg", "3.jpg"),
        ("only/2.jpg", "only/1.jpg", "only/3.jpg"),
        ("only/x/2.jpg", "only/x/1.jpg", "only/y/3.jpg"),
        ("3.jpg", "b/1.jpg", "a/9.jpg"),
    ],
)
def test_a_listing_is_what_a_list_of_paths_is(tmp_path: Path, names: tuple[str, ...]) -> None:
    root = str(make(tmp_path / "images", *names))
    paths = [path for path, _ in folder.list_images(root)]
    for _ in range(2):  # made, then kept
        found = listing(root)
        assert list(found) == paths
        for rows in (torch.arange(len(paths)), torch.tensor([0, 2]), torch.tensor([2, 1, 0]), torch.tensor([1])):
            assert Files(found).take(rows).fingerprint == Files([paths[i] for i in rows]).fingerprint
        assert Files(found).fingerprint == Files(paths).fingerprint
        assert Files(found, verify="content").fingerprint == Files(paths, verify="content").fingerprint
        twice = Files(found).take(torch.tensor([2, 0, 1])).take(torch.tensor([1, 0])).paths
        assert (len(twice), twice[0], twice[-1]) == (2, paths[0], paths[2])


def test_a_kept_index_is_used_until_a_folder_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = make(tmp_path / "images", "a/1.jpg", "a/2.jpg", "b/x/1.jpg")
    looks = []
    scan = folder.scan
    monkeypatch.setattr(folder, "scan", lambda *given: looks.append(1) or scan(*given))

    def listed() -> tuple[list[str], int]:
        looks.clear()
        return [os.path.relpath(path, root) for path in listing(str(root))], len(looks)

    three = ["a/1.jpg", "a/2.jpg", "b/x/1.jpg"]
    assert listed() == (three, 1)
    assert listed() == (three, 0)
    monkeypatch.chdir(root.parent)  # known by whatever name
    assert list(listing("images")) == [f"images/{name}" for name in three]
    (root / "b/x/2.jpg").touch()
    os.utime(root / "b/x", ns=(LONG_AGO + 1, LONG_AGO + 1))
    assert listed() == ([*three, "b/x/2.jpg"], 1)
    assert listed() == ([*three, "b/x/2.jpg"], 0)
    (root / "a/1.jpg").unlink()  # now: another change at once might leave the same time
    assert listed() == (["a/2.jpg", "b/x/1.jpg", "b/x/2.jpg"], 1)
    assert listed() == (["a/2.jpg", "b/x/1.jpg", "b/x/2.jpg"], 1)
    assert len(listing(str(root), fresh=True)) == 3


def test_few_images_leave_nothing_in_the_cache(tmp_path: Path, cache: Path) -> None:
    assert len(listing(str(make(tmp_path / "images", "1.jpg", "2.jpg")))) == 2
    assert not cache.exists()


def test_without_a_place_for_it_an_index_is_made_at_each_start(tmp_path: Path, cache: Path) -> None:
    cache.write_text("no folder")
    assert len(listing(str(make(tmp_path / "images", "1.jpg", "2.jpg", "3.jpg")))) == 3


def _listed(root: str, looks: Path, cache: Path) -> None:
    scan = folder.scan
    files.KEPT_FROM = 3
    os.environ["XDG_CACHE_HOME"] = str(cache)

    def counted(*given):  # type: ignore[no-untyped-def]
        (looks / str(os.getpid())).touch()
        return scan(*given)

    folder.scan = counted
    assert len(listing(root)) == 3


def test_of_several_processes_one_makes_the_index(tmp_path: Path, cache: Path) -> None:
    root, looks = make(tmp_path / "images", "1.jpg", "2.jpg", "3.jpg"), tmp_path / "looks"
    looks.mkdir()
    assert together(child(_listed, str(root), looks, cache) for _ in range(3)) == [0] * 3
    assert len(list(looks.iterdir())) == 1


def test_processes_share_the_pages_of_an_index(tmp_path: Path) -> None:
    """Each column lies in the mapped file, and reading it makes no private page of the process."""
    Index.of((f"{i}.jpg", i, None, ()) for i in range(200_000)).write(tmp_path / "index")
    found = Listing("root", Index.read(tmp_path / "index"))
    columns = found.entries.columns
    assert all(column.sum() > 0 for column in columns.values())
    mappings = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE)
    (mapping,) = (text for text in mappings if text.partition("\n")[0].endswith(str(tmp_path / "index")))
    start, end = (int(place, 16) for place in mapping.split()[0].split("-"))
    for column in columns.values():
        assert start <= column.data_ptr() < column.data_ptr() + column.nbytes <= end
    assert int(re.search(r"Private_Dirty: *(\d+) kB", mapping)[1]) == 0
    assert index.KEPT_FROM == 20_000
