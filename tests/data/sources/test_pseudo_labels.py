"""Pseudo-labels: which are chosen, and that the table of a teacher trains a student (Noisy Student)."""

import csv
from pathlib import Path

import pytest

from ssvit.cli.predict import command as predict
from ssvit.data.sources import datasets
from ssvit.data.sources.datasets_options import Csv
from ssvit.data.sources.pseudo_labels import PseudoLabel, select, table_of
from ssvit.data.sources.table import Columns, rows
from ssvit.options import Failure, OptionError

LABELS = [PseudoLabel(f"{place}.png", label, probability) for place, (label, probability) in enumerate(
    [("cat", 0.9), ("dog", 0.4), ("cat", 0.7), ("cat", 0.95), ("dog", 0.8), ("cat", 0.7)]
)]  # fmt: skip


def paths(found):
    return [one.path for one in found]


def test_the_surest_of_each_class_are_chosen_in_their_order():
    assert paths(select(LABELS, confidence=0, per_class=None)) == paths(LABELS)
    assert paths(select(LABELS, confidence=0.7, per_class=None)) == ["0.png", "2.png", "3.png", "4.png", "5.png"]
    assert paths(select(LABELS, confidence=0.5, per_class=3)) == ["0.png", "2.png", "3.png", "4.png"]
    assert select(LABELS, confidence=1, per_class=None) == []


def test_labelled_rows_come_first_with_their_splits_and_every_path_is_found_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own").mkdir()
    table = tmp_path / "own" / "labels.csv"
    table.write_text('path,label,split\na.png,"cat, large",train\nsub/b.png,dog,test\n')
    (tmp_path / "all.csv").write_bytes(table_of(LABELS[:1], str(table)))
    found = list(rows(str(tmp_path / "all.csv"), Columns("path", "label", "split")))
    assert [(row.path, row.label, row.split) for row in found] == [
        (str(tmp_path / "own" / "a.png"), "cat, large", "train"),
        (str(tmp_path / "own" / "sub" / "b.png"), "dog", "test"),
        (str(tmp_path / "0.png"), "cat", "train"),
    ]
    table.write_text("path,class\na.png,cat\n")
    with pytest.raises(OptionError, match=r"labelled=.*: must have a column `label`"):
        table_of([], str(table))


STORED = Path(__file__).parents[2] / "fixtures"
RUN = STORED / "outputs" / "finetune_masked_patch_synthetic"


def test_predictions_extend_a_table_of_labelled_images(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pictures = sorted(map(str, (STORED / "pictures").iterdir()))
    Path("labels.csv").write_text(f"path,label,split\n{pictures[0]},disc,train\n{pictures[1]},disc,test\n")
    options = ["output=all.csv", "labelled=labels.csv", "confidence=0", "per_class=1"]
    predict.call([f"checkpoint={RUN}", *options, *pictures[2:]])
    with open("all.csv") as file:
        found = list(csv.DictReader(file))
    assert 1 <= len({row["label"] for row in found[2:]}) == len(found) - 2
    assert all(0 < float(row["probability"]) <= 1 for row in found[2:])
    data = datasets.csv(Csv(table="all.csv"))
    assert (len(data.train), len(data.test)) == (len(found) - 1, 1)


@pytest.mark.parametrize("output", ["all.csv", "answers.json"])
def test_only_files_of_the_command_are_overwritten(tmp_path, monkeypatch, output):
    monkeypatch.chdir(tmp_path)
    command = [f"checkpoint={RUN}", f"output={output}", str(STORED / "pictures")]
    for mine in ('["mine"]\n', "path,label\n1.png,cat\n"):
        Path(output).write_text(mine)
        with pytest.raises(Failure, match=f"^output={output}: "):
            predict.call(command)
        assert Path(output).read_text() == mine
    Path(output).write_text("")  # as mktemp leaves it
    predict.call(command)
    first = Path(output).read_bytes()
    predict.call([*command, "top=1"] if output.endswith("json") else [*command, "confidence=1"])
    assert 0 < len(Path(output).read_bytes()) < len(first)
    predict.call(command)
    assert Path(output).read_bytes() == first
