"""data=csv: a table names the images, their labels and their splits; a mistake in it is reported in one line."""

from pathlib import Path

import pytest
from command import error_of
from images import class_names, put_grey

from ssvit.data.sources import datasets, datasets_options
from ssvit.data.sources.base import Source

NAMES = [f"{'abc'[i % 3]}/{i:02d}.png" for i in range(12)]


@pytest.fixture
def folder(tmp_path) -> Path:
    """Write twelve images of different greys."""
    for i, name in enumerate(NAMES):
        put_grey(tmp_path / name, i)
    return tmp_path


def greys(source: Source) -> list[int]:
    return [int(source.read(i)[0, 0, 0]) for i in range(len(source))]


def test_columns_have_names_of_their_own(folder):
    """A TSV file with a byte order mark, quotes, spaces, an absolute path, numbers for classes and folds."""
    (folder / "elsewhere").mkdir()
    text = f'\ufeffid\tspecies\t"file name"\tfold\r\n1\t10\t{folder / NAMES[4]}\t0\r\n\r\n2\t9\t "{NAMES[5]}"\t0\r\n'
    (folder / "elsewhere/t.tsv").write_text(f"{text}3\t9\t{NAMES[6]}\t1\r\n", newline="")
    options = {"table": str(folder / "elsewhere/t.tsv"), "root": str(folder), "path": "file name", "split": "fold"}
    data = datasets.csv(datasets_options.Csv(**options, label="species", train=0, test=1))
    assert (greys(data.train), class_names(data.train), greys(data.test)) == ([4, 5], ["10", "9"], [6])
    assert data.classes == ("9", "10")
    plain = datasets.csv(datasets_options.Csv(**options, train=0, test=1))
    assert (plain.train.labels, plain.classes) == (None, ())
    every = datasets.csv(datasets_options.Csv(**options, train=None, test=1))  # of all other splits
    assert (greys(every.train), greys(every.test)) == ([4, 5], [6])


def test_names_of_splits_are_recognised_in_any_case(folder):
    splits = ("Train", "TRAIN", "Dev", "Testing")
    rows = "".join(f"{name},{split}\n" for name, split in zip(NAMES, splits, strict=False))
    (folder / "t.csv").write_text(f"path,split\n{rows}")
    data = datasets.csv(datasets_options.Csv(table=str(folder / "t.csv")))
    assert [greys(part) for part in (data.train, data.validation, data.test)] == [[0, 1], [2], [3]]


@pytest.mark.parametrize(
    ("text", "options", "start"),
    [
        ("file,label\n", {}, "path=path: "), ("", {}, "path=path: "),
        ("path\na/00.png\n", {"label": "kind"}, "label=kind: "),
        ("path\na/00.png\n", {"split": "fold"}, "split=fold: "), ("path\n", {}, "table=TABLE: "),
        ("path,split\na/00.png,train\na/03.png,tset\n", {}, "TABLE, line 3: split=tset: "),
        ("path,split\na/00.png,foo\na/03.png,FOO\n", {"train": "foo"}, "TABLE, line 3: split=FOO: "),
        ("path\na/00.png\n", {"test": "new"}, "test=new: "), ("path,split\na/00.png,test\n", {}, "train=auto: "),
        ("path,split\na/00.png,test\n", {"train": None}, "train=null: "), ("path\nz.png\n", {}, "root=null: "),
        ("path\na/00.png\nz.png\n", {}, "TABLE, line 3: there is no file FOLDER/z.png"),
        ("path\na/00.png\n", {"root": "nowhere"}, "root=nowhere: "),
        ("path,label\na/00.png,x\na/03.png,\n", {}, "TABLE, line 3: has no label"),
        ("path,label\n,x\n", {}, "TABLE, line 2: has no path"),
        ("path,label\na/00.png\n", {}, "TABLE, line 2: has 1 columns"), ('path\n"a/00.png\n', {}, "TABLE, line 2: "),
        ("path\n\udcff\n", {}, "TABLE: is not UTF-8 text"),
    ],
)  # fmt: skip
def test_a_mistake_in_a_table_is_reported_in_one_line(folder, text, options, start):
    path = folder / "t.csv"
    path.write_text(text, errors="surrogateescape")
    error = error_of(lambda: datasets.csv(datasets_options.Csv(table=str(path), **options)))
    assert str(error).startswith(start.replace("TABLE", str(path)).replace("FOLDER", str(folder)))


@pytest.mark.parametrize("name", ["absent.csv", ".", 7])
def test_a_table_must_be_a_file(folder, name):
    assert error_of(datasets_options.Csv, table=str(folder / name) if isinstance(name, str) else name).name == "table"
