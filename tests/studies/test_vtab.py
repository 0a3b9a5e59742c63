"""Tasks of VTAB-1k: the lists of a made folder."""

import numpy as np
import pytest
from command import error_of
from PIL import Image

from ssvit.data.sources import datasets, datasets_options, vtab
from ssvit.errors import UserError

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
    assert (len(data.validation_or_test), len(data.test_or_validation[1])) == (4, 5)
    everything = datasets.vtab(datasets_options.Vtab(root=str(root), task="svhn", all_images=True))
    assert (len(everything.train), everything.validation, len(everything.test)) == (12, None, 5)
    assert everything.test_or_validation[0] == "test"


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
    ("images/train800/x.png", r"train800\.txt, \w+ 1: "),
    ("images/train800/x.png -1", r"train800\.txt, \w+ 1: "),
    ("images/train800/x.png 1", r"\bx\.png\b"),
    ("", r"train800\.txt: "),
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
