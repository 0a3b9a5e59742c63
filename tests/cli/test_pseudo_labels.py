"""Pseudo-labels: which are chosen, and that the table of a teacher is a data set for a student (Noisy Student)."""

import csv
from collections import Counter
from pathlib import Path

import pytest

from ssvit.cli import find_command
from ssvit.cli.predict import PseudoLabel, select
from ssvit.data.sources import datasets
from ssvit.data.sources.datasets_options import Csv
from ssvit.errors import Failure

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


STORED = Path(__file__).parents[1] / "fixtures"
RUN = STORED / "outputs" / "finetune_masked_patch_shapes"


def test_a_table_of_pseudo_labels_is_a_data_set(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = ["output=pseudo.csv", "confidence=0", "per_class=2"]
    find_command("predict").call([f"checkpoint={RUN}", *options, str(STORED / "pictures")])
    with open("pseudo.csv") as file:
        found = list(csv.DictReader(file))
    assert max(Counter(row["label"] for row in found).values()) == 2
    assert all(0 < float(row["probability"]) <= 1 for row in found)
    train = datasets.csv(Csv(table="pseudo.csv")).train
    assert {train.name(i) for i in range(len(train))} < {row["path"] for row in found}


OF_PREDICT = ["predict", f"checkpoint={RUN}", str(STORED / "pictures")]


@pytest.mark.parametrize(
    ("command", "output", "change"),
    [
        (OF_PREDICT, "all.csv", "confidence=1"), (OF_PREDICT, "answers.json", "top=1"),
        (["normalization", f"data={STORED / 'pictures'}"], "statistics.yaml", "data.held_out=0.5"),
    ],
)  # fmt: skip
def test_only_files_of_the_command_are_overwritten(tmp_path, monkeypatch, command, output, change):
    monkeypatch.chdir(tmp_path)
    name, *options = *command, f"output={output}"
    for mine in ('["mine"]\n', "path,label\n1.png,cat\n", "channels: 3\n"):
        Path(output).write_text(mine)
        with pytest.raises(Failure, match=f"^output={output}: "):
            find_command(name).call(options)
        assert Path(output).read_text() == mine
    Path(output).write_text("")  # as mktemp leaves it
    find_command(name).call(options)
    first = Path(output).read_bytes()
    find_command(name).call([*options, change])
    assert Path(output).read_bytes() not in (b"", first)
