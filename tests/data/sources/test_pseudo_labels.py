"""Pseudo-labels: which are chosen, and that the table of a teacher trains a student (Noisy Student)."""

import csv
from pathlib import Path

import pytest
from command import TINY, one_line

from ssvit.cli.predict import command as predict
from ssvit.data.sources.pseudo_labels import PseudoLabel, chosen, written
from ssvit.data.sources.table import Columns, rows
from ssvit.options import Failure, OptionError

LABELS = [PseudoLabel(f"{place}.png", label, probability) for place, (label, probability) in enumerate(
    [("cat", 0.9), ("dog", 0.4), ("cat", 0.7), ("cat", 0.95), ("dog", 0.8), ("cat", 0.7)]
)]  # fmt: skip


def paths(found):
    return [one.path for one in found]


def test_the_surest_of_each_class_are_chosen_in_their_order():
    assert paths(chosen(LABELS, confidence=0, per_class=None)) == paths(LABELS)
    assert paths(chosen(LABELS, confidence=0.7, per_class=None)) == ["0.png", "2.png", "3.png", "4.png", "5.png"]
    assert paths(chosen(LABELS, confidence=0.5, per_class=3)) == ["0.png", "2.png", "3.png", "4.png"]
    assert chosen(LABELS, confidence=1, per_class=None) == []


def test_labelled_rows_come_first_with_their_splits_and_every_path_is_found_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own").mkdir()
    table = tmp_path / "own" / "labels.csv"
    table.write_text('path,label,split\na.png,"cat, large",train\nsub/b.png,dog,test\n')
    (tmp_path / "all.csv").write_bytes(written(LABELS[:1], str(table)))
    found = list(rows(str(tmp_path / "all.csv"), Columns("path", "label", "split")))
    assert [(row.path, row.label, row.split) for row in found] == [
        (str(tmp_path / "own" / "a.png"), "cat, large", "train"),
        (str(tmp_path / "own" / "sub" / "b.png"), "dog", "test"),
        (str(tmp_path / "0.png"), "cat", "train"),
    ]
    table.write_text("path,class\na.png,cat\n")
    with pytest.raises(OptionError, match=r"labelled=.*: must have a column `label`"):
        written([], str(table))


def test_a_teachers_table_trains_a_student(tool, tmp_path):
    from PIL import Image

    colors = {"red": (200, 30, 30), "blue": (30, 30, 200)}
    lines = ["path,label,split"]
    for place in range(16):
        label = ("red", "blue")[place % 2]
        shade = tuple(value + 2 * place for value in colors[label])
        Image.new("RGB", (16, 16), shade).save(tmp_path / f"{place}.png")
        if place < 8:
            lines.append(f"{place}.png,{label},{'test' if place < 2 else 'train'}")
    (tmp_path / "labels.csv").write_text("\n".join(lines) + "\n")
    sizes = [option for option in TINY if not option.startswith(("data.", "target.", "recipe.steps"))]
    data = ["data=csv", "data.image_size=16", "encoder.patch_size=4", "evaluator=[]", "probe=[]"]
    tool("pretrain", *sizes, *data, "data.table=labels.csv", "recipe.steps=6", "recipe.batch_size=4", "encoder=small",
         "name=pre", "objective=mae")  # fmt: skip
    short = ("recipe.steps=30", "recipe.warmup=2", "recipe.batch_size=4", "fabric.accelerator=cpu")
    tool("finetune", "checkpoint=outputs/pre", *short, "name=teacher")
    others = [f"{place}.png" for place in range(8, 16)]
    done = tool(
        "predict", "checkpoint=outputs/teacher", *others, "output=all.csv", "labelled=labels.csv", "per_class=3"
    )
    with open(tmp_path / "all.csv") as file:
        found = list(csv.DictReader(file))
    assert [row["split"] for row in found[:8]] == ["test", "test", *["train"] * 6]
    pseudo = found[8:]
    assert f"all.csv: {len(pseudo)} of 8 pictures have a pseudo-label" in done.stdout
    assert all(sum(row["label"] == label for row in pseudo) <= 3 for label in colors)
    assert all(float(row["probability"]) >= 0.5 for row in pseudo)
    student = tool("finetune", "checkpoint=outputs/pre", "data=csv", "data.table=all.csv", "data.image_size=16", *short,
                   "name=student")  # fmt: skip
    assert f"{6 + len(pseudo)} images" in student.stdout


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["labelled=none.csv", "output=a.csv"], "labelled=none.csv: no such file"),
        (["confidence=2"], "confidence=2: must be"),
        (["per_class=0"], "per_class=0: must be"),
    ],
)
def test_wrong_options_are_told_at_once(tool, options, said):
    assert said in one_line(tool("predict", "a.png", *options, status=2))


STORED = Path(__file__).parents[2] / "fixtures"


@pytest.mark.parametrize("output", ["all.csv", "answers.json"])
def test_answers_are_written_over_former_answers_alone(tmp_path, monkeypatch, output):
    monkeypatch.chdir(tmp_path)
    run = STORED / "outputs" / "finetune_masked_patch_synthetic"
    command = [f"checkpoint={run}", f"output={output}", str(STORED / "pictures")]
    for mine in ('["mine"]\n', "path,label\n1.png,cat\n"):
        Path(output).write_text(mine)
        with pytest.raises(Failure) as refused:
            predict.call(command)
        said = f"output={output}: is there, and is no file that this command has written; give another name"
        assert (str(refused.value), refused.value.status) == (said, 2)
        assert Path(output).read_text() == mine
    Path(output).write_text("")  # as mktemp leaves it
    predict.call(command)
    first = Path(output).read_bytes()
    predict.call([*command, "top=1"] if output.endswith("json") else [*command, "confidence=1"])
    assert 0 < len(Path(output).read_bytes()) < len(first)
    predict.call(command)
    assert Path(output).read_bytes() == first
