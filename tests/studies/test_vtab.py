"""Tasks of VTAB-1k: the lists of a made folder, and the table of 19 tasks against plain means."""

import json
import math

import numpy as np
import pytest
import yaml
from command import error_of
from PIL import Image

from ssvit.cli.vtab import command
from ssvit.data.sources import datasets, datasets_options, vtab
from ssvit.options import UserError

SIZES = {"train800": 8, "val200": 4, "test": 5}


@pytest.fixture
def root(tmp_path):
    """A task of three classes with lists as the public copies have them; a name has a space."""
    task = tmp_path / "svhn"
    lines = {}
    for part, size in SIZES.items():
        (task / "images" / part).mkdir(parents=True)
        lines[part] = [f"images/{part}/{number} of {size}.png {number % 3}\n" for number in range(size)]
        for number in range(size):
            pixels = np.full((6, 4, 3), 10 * size + number, np.uint8)
            Image.fromarray(pixels).save(task / "images" / part / f"{number} of {size}.png")
        (task / f"{part}.txt").write_text("".join(lines[part]))
    (task / "train800val200.txt").write_text("".join(lines["train800"] + lines["val200"]))
    return tmp_path


def test_each_list_is_a_part_with_its_labels(root):
    data = datasets.vtab(datasets_options.Vtab(root=str(root), task="svhn"))
    assert data.classes == ("0", "1", "2")
    for source, size in ((data.train, 8), (data.validation, 4), (data.test, 5)):
        assert source.labels.tolist() == [number % 3 for number in range(size)]
        assert [source.read(number).unique().tolist() for number in range(size)] == [
            [10 * size + number] for number in range(size)
        ]
    assert (len(data.watched), len(data.reported[1])) == (4, 5)
    everything = datasets.vtab(datasets_options.Vtab(root=str(root), task="svhn", all_images=True))
    assert (len(everything.train), everything.validation, len(everything.test)) == (12, None, 5)
    assert everything.reported[0] == "test"


def test_the_fingerprint_covers_the_labels(root):
    before = datasets.vtab(datasets_options.Vtab(root=str(root), task="svhn")).train.fingerprint
    path = root / "svhn" / "train800.txt"
    path.write_text(path.read_text().replace("png 1", "png 2", 1))
    assert datasets.vtab(datasets_options.Vtab(root=str(root), task="svhn")).train.fingerprint != before


def test_there_are_19_tasks_in_three_groups():
    assert {name: len(tasks) for name, tasks in vtab.GROUPS.items()} == {
        "natural": 7, "specialised": 4, "structured": 8,
    }  # fmt: skip
    assert len(set(vtab.NAMES)) == 19


@pytest.mark.parametrize(("task", "name"), [("mnist", "task"), ("cifar", "root")])
def test_what_is_not_there_is_named(root, task, name):
    assert error_of(datasets_options.Vtab, root=str(root), task=task).name == name


@pytest.mark.parametrize(("line", "message"), [
    ("images/train800/x.png", "line 1: must be `path label`"),
    ("images/train800/x.png -1", "line 1: must be `path label`"),
    ("images/train800/x.png 1", "there is no file .*x.png"),
    ("", "contains no path of an image"),
])  # fmt: skip
def test_a_damaged_list_is_refused(root, line, message):
    (root / "svhn" / "train800.txt").write_text(line)
    with pytest.raises(UserError, match=message):
        datasets.vtab(datasets_options.Vtab(root=str(root), task="svhn"))


def test_a_list_that_is_absent_is_named(root):
    (root / "svhn" / "val200.txt").unlink()
    error = error_of(datasets_options.Vtab, root=str(root), task="svhn")
    assert error.name == "root"
    assert "svhn/val200.txt" in str(error)


def finished(folder, task, accuracy, *, path="outputs/run", all_images=True, images=100, steps=2):
    """A run's folder with its last test after step 2, and a line that a killed process left."""
    folder.mkdir(parents=True)
    config = {
        "schema": 1, "choices": {"data": "vtab"}, "data": {"task": task, "all_images": all_images},
        "encoder": {"path": path}, "recipe": {"steps": steps},
    }  # fmt: skip
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    rows = [
        {"step": 1, "test/accuracy": 0.0, "test/images": images, "test/accuracy_constant": 0.1},
        {"step": 2, "test/accuracy": accuracy, "test/images": images, "test/accuracy_constant": 0.1},
    ]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)) + '\n{"step": 4, "te')


def test_the_table_has_all_runs_their_means_and_what_is_absent(tmp_path, capsys):
    outputs = tmp_path / "outputs"
    accuracies = {"cifar": 0.5, "svhn": 0.7, "eurosat": 0.9, "clevr_count": 0.35}
    for task, accuracy in accuracies.items():
        finished(outputs / task, task, accuracy)
    finished(outputs / "again", "cifar", 0.6)
    finished(outputs / "scratch", "svhn", 0.2, path=None, all_images=False)
    (outputs / "other").mkdir()
    (outputs / "other" / "config.yaml").write_text("schema: 1\nchoices: {data: cifar10}\ndata: {root: x}\n")
    (outputs / "other" / "metrics.jsonl").write_text('{"test/accuracy": 1.0}\n')
    command.call([f"outputs={outputs}", f"output={tmp_path}/table.json"])
    text = capsys.readouterr().out
    assert "| test accuracy (%) | chance | outputs/run | random weights (800 images) |" in text
    assert f"| cifar | 10.0 | 55.0 ± {100 * np.std([0.5, 0.6], ddof=1):.1f} (2 runs) | absent |" in text
    errors = [100 * math.sqrt(p * (1 - p) / 100) for p in (0.7, 0.2)]
    assert f"| svhn | 10.0 | 70.0 ± {errors[0]:.1f} | 20.0 ± {errors[1]:.1f} |" in text
    natural, every = 100 * (0.55 + 0.7) / 2, 100 * (0.55 + 0.7 + 0.9 + 0.35) / 4
    assert f"| **natural**, mean |  | **{natural:.1f}** | **20.0** |" in text
    assert "| **specialised**, mean |  | **90.0** | absent |" in text
    assert f"| **all 19**, mean |  | **{every:.1f}** |" in text
    assert "outputs/run: 15 of 19 tasks are absent: caltech101, dtd," in text
    written = json.loads((tmp_path / "table.json").read_text())["outputs/run"]
    assert written["means"]["all 19"] == pytest.approx(every / 100)
    assert set(written["runs"]) == set(accuracies)
    command.call([str(outputs / "svhn"), f"output={tmp_path}/table.md"])
    assert "18 of 19 tasks are absent" in (tmp_path / "table.md").read_text()


def test_runs_that_are_not_finished_are_named_and_left_out(tmp_path, capsys):
    outputs = tmp_path / "outputs"
    finished(outputs / "a", "cifar", 0.5)
    finished(outputs / "b", "svhn", 0.7, steps=3)
    finished(outputs / "c", "dtd", 0.6)
    finished(outputs / "d", "eurosat", 0.9, all_images=False, steps=4)  # whose test images are measured at the end
    (outputs / "d" / "metrics.jsonl").write_text(json.dumps({"step": 2, "validation/accuracy": 0.9}) + "\n")
    command.call([f"outputs={outputs}"])
    text = capsys.readouterr().out
    assert "| **all 19**, mean |  | **55.0** |" in text
    left_out = f"svhn ({outputs}/b, step 2 of 3), eurosat ({outputs}/d, step 2 of 4)"
    assert text.rstrip().endswith(f"not finished, so excluded: {left_out}")
    with pytest.raises(UserError, match=r"not finished, so excluded: svhn \("):
        command.call([str(outputs / "b")])


def test_without_runs_there_is_no_table(tmp_path):
    with pytest.raises(UserError, match="no run has a test accuracy on a task of VTAB-1k"):
        command.call([f"outputs={tmp_path}"])
    with pytest.raises(UserError, match="must be the folder of a run"):
        command.call([str(tmp_path)])
