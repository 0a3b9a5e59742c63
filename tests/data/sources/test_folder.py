"""Folders are read by name alone: layouts, order, splits, and one line for a root that is wrong."""

import os
import subprocess
from collections import Counter
from pathlib import Path

import pytest
from command import LIMIT, error_of
from images import picture, put

from ssvit.data.sources.datasets_options import Folder
from ssvit.data.sources.folder import check, list_images, splits
from ssvit.data.sources.splits import are_like_splits
from ssvit.errors import UserError, typed


def touch(root: Path, *names: str) -> str:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return str(root)


def test_flat_folder_has_no_classes(tmp_path):
    root = touch(tmp_path, "b.PNG", "a.jpg", "notes.txt", ".hidden.jpg")
    assert list_images(root) == [(os.path.join(root, "a.jpg"), None), (os.path.join(root, "b.PNG"), None)]


def test_a_subfolder_is_a_class_at_any_depth(tmp_path):
    root = touch(tmp_path, "dog/1.jpg", "cat/deep/er/2.jpg", "cat/1.jpg", "readme.md", ".cache/3.jpg")
    names = [(os.path.relpath(path, root), name) for path, name in list_images(root)]
    assert names == [("cat/1.jpg", "cat"), ("cat/deep/er/2.jpg", "cat"), ("dog/1.jpg", "dog")]


def test_mixed_folder_is_unlabelled(tmp_path):
    root = touch(tmp_path, "z.jpg", "cat/1.jpg")
    assert [name for _, name in list_images(root)] == [None, None]


def test_links_are_followed_but_not_in_circles(tmp_path):
    root = touch(tmp_path / "root", "cat/1.jpg")
    touch(tmp_path / "elsewhere", "2.jpg")
    (tmp_path / "root" / "dog").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "root" / "cat" / "loop").symlink_to(tmp_path / "root")
    assert [name for _, name in list_images(root)] == ["cat", "dog"]


def test_links_of_two_folders_to_each_other_end(tmp_path):
    root = touch(tmp_path, "cat/1.jpg", "dog/2.jpg")
    (tmp_path / "cat" / "link").symlink_to(tmp_path / "dog")
    (tmp_path / "dog" / "link").symlink_to(tmp_path / "cat")
    paths = [os.path.relpath(path, root) for path, _ in list_images(root)]
    assert paths == ["cat/1.jpg", "cat/link/2.jpg", "dog/2.jpg", "dog/link/1.jpg"]


ALL = ("train/a/1.jpg", "val/a/1.jpg", "test/a/1.jpg")


@pytest.mark.parametrize(
    ("classes", "expected"),
    [
        (("train_images", "test_images"), True), (("Trainset", "val2017"), True), (("train", "bus"), False),
        (("training",), False), (("trainer", "latest"), False), (("valley", "device"), False),
    ],
)  # fmt: skip
def test_classes_that_are_named_like_splits(classes, expected):
    assert are_like_splits(classes) is expected


@pytest.mark.parametrize(
    ("names", "options", "expected"),
    [
        (ALL, {"train": None}, (".", None, None)),  # classes that are named so
        (("train/1.jpg", "valid/1.jpg", "validation/1.jpg"), {}, ("train", "validation", None)),
        (("train/1.jpg", "val/notes.txt", "valid/1.jpg"), {}, ("train", "valid", None)),
        (("train/1.jpg", "bus/1.jpg"), {}, (".", None, None)),  # a class that is named train
        (("train/1.jpg", "bus/1.jpg"), {"train": "train"}, ("train", None, None)),
        (("a/b/1.jpg", "c/1.jpg"), {"train": "a/b", "test": "c"}, ("a/b", None, "c")),
        (ALL, {"train": "."}, "validation"),  # which shares images with it
        (ALL, {"train": None, "test": "test"}, "train"),
        (("teaching/a/1.jpg", "validation/a/1.jpg"), {}, "train"),
        (("Training/a/1.jpg", "Testing/a/1.jpg"), {}, ("Training", None, "Testing")),
        (("Train/a/1.jpg", "Test/a/1.jpg"), {}, ("Train", None, "Test")),
        (("TRAIN/a/1.jpg", "Validation/a/1.jpg", "TEST/a/1.jpg"), {}, ("TRAIN", "Validation", "TEST")),
        (("train/a/1.jpg", "dev/a/1.jpg"), {}, ("train", "dev", None)),
        (("train/a/1.jpg", "eval/a/1.jpg"), {}, ("train", "eval", None)),
        (("seg_train/a/1.jpg", "seg_test/a/1.jpg"), {}, ("seg_train", None, "seg_test")),
        (
            ("seg_train/seg_train/a/1.jpg", "seg_test/seg_test/a/1.jpg"),
            {},
            ("seg_train/seg_train", None, "seg_test/seg_test"),
        ),
        (("train/a/1.jpg", "Train/a/1.jpg", "test/a/1.jpg"), {}, ("train", None, "test")),
        (("Training/1.jpg", "bus/1.jpg"), {}, (".", None, None)),
    ],
)
def test_splits(tmp_path, names, options, expected):
    root = touch(tmp_path, *names)
    requested = {"train": "auto", "validation": "auto", "test": "auto"} | options
    if isinstance(expected, str):
        assert error_of(splits, root, requested).name == expected
    else:
        found = [tuple(os.path.relpath(folder, root) for folder in folders) for folders in splits(root, requested)]
        assert found == [(name,) if name else () for name in expected]


def test_folders_that_no_split_has_are_named(tmp_path):
    for name in ("train/a/1.png", "train/a/2.png", "test/a/1.png", "unlabeled/1.png", "notes/1.txt"):
        put(tmp_path / name, picture(1))
    assert Folder(root=str(tmp_path)).build().summary.endswith("not used: unlabeled/")
    assert "; not used" not in Folder(root=str(tmp_path), train=None).build().summary
    assert "; not used" not in Folder(root=str(tmp_path / "train")).build().summary


def test_links_to_nowhere_or_themselves_pipes_and_devices_are_passed_over(tmp_path):
    root = touch(tmp_path, "a.png")
    for name, target in (("loop.png", "loop.png"), ("nowhere.png", "absent"), ("null.png", "/dev/null")):
        (tmp_path / name).symlink_to(target)
    os.mkfifo(tmp_path / "pipe.png")
    check(root)
    others = Counter()
    assert list_images(root, others) == [(f"{root}/a.png", None)]
    assert others == {"broken links": 2}


def test_folders_may_be_nested_deeper_than_calls(tmp_path):
    depth = 1500
    here = os.open(tmp_path, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir("d", dir_fd=here)
        here, above = os.open("d", os.O_RDONLY, dir_fd=here), here
        os.close(above)
    os.close(os.open("a.png", os.O_CREAT | os.O_WRONLY, dir_fd=here))
    os.close(here)
    try:
        check(str(tmp_path))
        assert list_images(str(tmp_path)) == [(f"{tmp_path}{'/d' * depth}/a.png", "d")]
    finally:
        # Python's rmtree does not support this depth.
        subprocess.run(["rm", "-r", tmp_path / "d"], check=True, timeout=LIMIT)


def test_check_names_what_is_wrong(tmp_path):
    check(touch(tmp_path / "good", "a/b/c/1.jpeg"))
    for root in (
        str(tmp_path / "absent"),
        os.path.join(touch(tmp_path / "file", "1.jpg"), "1.jpg"),
        touch(tmp_path / "empty", "a/notes.txt"),
        "",
    ):
        assert str(error_of(check, root)).startswith(f"root={typed(root)}: ")
    with pytest.raises(UserError, match="empty"):
        list_images(str(tmp_path / "empty"))
