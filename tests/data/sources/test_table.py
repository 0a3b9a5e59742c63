"""data=csv: a table names the images, their labels and their splits; what is wrong in it is told in one line."""

import os
import pickle
from pathlib import Path

import pytest
import torch
from PIL import Image

from ssvit.data.augment.crop import InceptionCrop
from ssvit.data.loader import Loader
from ssvit.data.sources import datasets, datasets_options, index
from ssvit.data.sources.base import Source
from ssvit.data.sources.files import Files
from ssvit.options import OptionError, UserError

NAMES = [f"{'abc'[i % 3]}/{i:02d}.png" for i in range(12)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Twelve images, each of its own grey."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for i, name in enumerate(NAMES):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        Image.new("RGB", (9, 8 + i), (i, i, i)).save(tmp_path / name)
    return tmp_path


def table(path: Path, *rows: str) -> str:
    path.write_text("".join(f"{row}\n" for row in rows))
    return str(path)


def greys(source: Source | None) -> list[int]:
    return [] if source is None else [int(source.read(i)[0, 0, 0]) for i in range(len(source))]


def labels(source: Source | None) -> list[str]:
    assert source is not None
    assert source.labels is not None
    return [source.classes[label] for label in source.labels]


def test_rows_have_labels_and_splits_in_their_order(folder: Path) -> None:
    kinds = ["train"] * 7 + ["valid"] * 2 + ["test"] * 3
    order = torch.randperm(12, generator=torch.Generator().manual_seed(0)).tolist()
    path = table(folder / "t.csv", "path,label,split", *(f"{NAMES[i]},c{i % 2},{kinds[i]}" for i in order))
    data = datasets.csv(datasets_options.Csv(table=path))
    for source, kind in ((data.train, "train"), (data.validation, "valid"), (data.test, "test")):
        own = [i for i in order if kinds[i] == kind]
        assert greys(source) == own
        assert labels(source) == [f"c{i % 2}" for i in own]
    told = "train: 7 images to train on; valid: 2 for choices; test: 3 for the reported figure"
    assert (data.classes, data.told) == (("c0", "c1"), told)
    swapped = datasets.csv(datasets_options.Csv(table=path, train="valid", validation="train", test=None))
    assert (len(swapped.train), len(swapped.watched), swapped.test) == (2, 7, None)
    every = datasets.csv(datasets_options.Csv(table=path, train=None, validation=None))
    assert (len(every.train), every.validation, len(every.watched)) == (9, None, 3)


def test_columns_have_names_of_their_own(folder: Path) -> None:
    """A TSV file with a byte order mark, quotes, spaces, an absolute path, numbers for classes and folds."""
    (folder / "elsewhere").mkdir()
    text = f'\ufeffid\tspecies\t"file name"\tfold\r\n1\t10\t{folder / NAMES[4]}\t0\r\n\r\n2\t9\t "{NAMES[5]}"\t0\r\n'
    (folder / "elsewhere/t.tsv").write_text(f"{text}3\t9\t{NAMES[6]}\t1\r\n", newline="")
    given = {"table": str(folder / "elsewhere/t.tsv"), "root": str(folder), "path": "file name", "split": "fold"}
    data = datasets.csv(datasets_options.Csv(**given, label="species", train=0, test=1))
    assert (greys(data.train), labels(data.train), greys(data.test)) == ([4, 5], ["10", "9"], [6])
    assert data.classes == ("9", "10")
    plain = datasets.csv(datasets_options.Csv(**given, train=0, test=1))
    assert (plain.train.labels, plain.classes) == (None, ())


def test_without_splits_a_tenth_is_held_out(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table(folder / "t.csv", "path", *NAMES)
    monkeypatch.chdir(folder)
    data = datasets.csv(datasets_options.Csv(table="t.csv", held_out=0.25))
    assert sorted(greys(data.train) + greys(data.test)) == list(range(12))
    assert data.told == "t.csv: 9 images to train on, 3 others to measure on (data.held_out=0.25)"


def test_the_fingerprint_covers_names_labels_and_sizes_or_contents(folder: Path) -> None:
    rows = [f"{name},c{i % 2}" for i, name in enumerate(NAMES)]

    def fingerprint(rows: list[str] = rows, **given: object) -> str:
        return datasets.csv(
            datasets_options.Csv(table=table(folder / "t.csv", "path,label", *rows), **given)
        ).train.fingerprint

    first, content = fingerprint(), fingerprint(verify="content")
    assert len({first, content, fingerprint(rows[::-1]), fingerprint([row[:-1] + "c" for row in rows])}) == 4
    renamed = [row.replace(",c", ",d") for row in rows]
    assert fingerprint(renamed) != first
    (folder / "other").mkdir()
    os.rename(folder / "a", folder / "other/a")
    os.rename(folder / "b", folder / "other/b")
    os.rename(folder / "c", folder / "other/c")
    assert fingerprint(root=str(folder / "other")) == first
    for name in NAMES:  # of the same size
        data = bytearray((folder / "other" / name).read_bytes())
        data[-1] ^= 1
        (folder / "other" / name).write_bytes(data)
    assert fingerprint(root=str(folder / "other")) == first
    assert fingerprint(root=str(folder / "other"), verify="content") != content
    (folder / "other" / NAMES[3]).write_bytes(b"longer" * 1000)
    assert fingerprint(root=str(folder / "other")) != first


def test_a_large_table_is_listed_once_until_it_changes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets, "KEPT_FROM", 3)
    path = table(folder / "t.csv", "path,label", *(f"{name},{i % 2}" for i, name in enumerate(NAMES)))
    made = []
    of = index.Index.of.__func__
    monkeypatch.setattr(index.Index, "of", classmethod(lambda *given, **more: made.append(1) or of(*given, **more)))
    first, again = (datasets.csv(datasets_options.Csv(table=path)) for _ in range(2))
    assert (len(made), first.train.fingerprint) == (1, again.train.fingerprint)
    assert (greys(first.train), labels(first.test)) == (greys(again.train), labels(again.test))
    table(folder / "t.csv", "path,label", *(f"{name},{i % 2}" for i, name in enumerate(NAMES[:6])))
    assert len(datasets.csv(datasets_options.Csv(table=path, held_out=0.5)).train) == 3
    assert len(made) == 2


def test_a_batch_is_that_of_the_same_files(folder: Path) -> None:
    data = datasets.csv(
        datasets_options.Csv(
            table=table(folder / "t.csv", "path,split", *(f"{name},train" for name in NAMES), f"{NAMES[0]},test")
        )
    )
    files = Files([str(folder / name) for name in NAMES])

    def batches(source: Source, first: int, workers: int = 0) -> list[torch.Tensor]:
        loader = Loader(source=source, transform=InceptionCrop(size=6), seed=1, batch_size=4, workers=workers)
        return [batch.images for batch in loader.batches(first, 6)]

    expected = batches(files, 0)
    assert all(map(torch.equal, expected, batches(pickle.loads(pickle.dumps(data.train)), 0, workers=1)))
    assert all(map(torch.equal, expected[4:], batches(data.train, 4)))


@pytest.mark.parametrize(
    ("text", "given", "line"),
    [
        ("file,label\n", {}, "path=path: must be a column of TABLE, which has file, label"),
        ("", {}, "path=path: must be a column of TABLE, which has none"),
        ("path\na/00.png\n", {"label": "kind"}, "label=kind: must be a column of TABLE, which has path"),
        ("path\na/00.png\n", {"split": "fold"}, "split=fold: must be a column of TABLE, which has path"),
        ("path\n", {}, "table=TABLE: names no image"),
        ("path,split\na/00.png,train\na/03.png,tset\n", {},
         "TABLE, line 3: split=tset: must be one of train, val, validation, valid, test, or the value of data.train, "
         "data.validation or data.test"),
        ("path,split\na/00.png,train\n", {"test": "new"}, "test=new: must be auto, null, or a split in TABLE: train"),
        ("path\na/00.png\n", {"test": "new"}, "test=new: data.split must name the column of splits"),
        ("path,split\na/00.png,train\n", {"test": "train"},
         "test=train: must be another split than data.train; null for none"),
        ("path,split\na/00.png,test\n", {}, "train=auto: must name the split to train on: TABLE has test"),
        ("path,split\na/00.png,test\n", {"train": None}, "train=null: must name the split to train on: TABLE has test"),
        ("path\nz.png\n", {}, "root=null: FOLDER has no file z.png, which line 2 of TABLE names"),
        ("path\na/00.png\nz.png\n", {}, "TABLE, line 3: there is no file FOLDER/z.png"),
        ("path\na/00.png\n", {"root": "nowhere"}, "root=nowhere: no such folder; null for that of the table"),
        ("path,label\na/00.png,x\na/03.png,\n", {},
         "TABLE, line 3: has no label: give each row one, or set data.label=null"),
        ("path,label\n,x\n", {}, "TABLE, line 2: has no path"),
        ("path,label\na/00.png\n", {}, "TABLE, line 2: has 1 columns, and the first line 2"),
        ('path\n"a/00.png\n', {}, "TABLE, line 2: is no line of CSV: unexpected end of data"),
        ("path\n\udcff\n", {}, "TABLE: is no text in UTF-8"),
        ("path,label,split\na/00.png,x,train\na/03.png,y,test\n", {},
         "TABLE: the class y is not among the 1 that are trained on"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_one_line(folder: Path, text: str, given: dict[str, object], line: str) -> None:
    path = folder / "t.csv"
    path.write_text(text, errors="surrogateescape")
    with pytest.raises(UserError) as caught:
        datasets.csv(datasets_options.Csv(table=str(path), **given))
    assert str(caught.value) == line.replace("TABLE", str(path)).replace("FOLDER", str(folder))


@pytest.mark.parametrize(
    ("name", "right"), [("absent.csv", "no such file"), (".", "this is a folder"), (7, "no such file")]
)
def test_a_table_must_be_a_file(folder: Path, name: object, right: str) -> None:
    with pytest.raises(OptionError, match=right):
        datasets.csv(datasets_options.Csv(table=str(folder / name) if isinstance(name, str) else name))
