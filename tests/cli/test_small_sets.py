"""Fine-tuning on fewer images than the default batch size, and the messages on images without labels."""

from pathlib import Path

import pytest
import torch
from command import TINY, tiny_options
from composing import composed, untrained
from images import picture, put, put_grey

from ssvit.cli import finetune
from ssvit.data.sources.base import missing_labels
from ssvit.data.sources.memory import Memory
from ssvit.errors import OptionError, UserError


def photos(folder: Path, count: int) -> str:
    for number in range(count):
        put_grey(folder / "ab"[number % 2] / f"{number}.png", number)
    return f"data.root={folder}"


def batch_size(*options: str) -> int:
    config = composed("checkpoint=scratch", "data=folder", "encoder=small", *options, tool="finetune").config
    return finetune.complete(config).options.recipe.batch_size


@pytest.mark.parametrize(
    ("count", "options", "expected"),
    [
        (60, (), 54),
        (140, (), 126),
        (150, (), 128),
        (60, ("subset.images=20",), 20),
        (60, ("development=0.5",), 27),
        (60, ("recipe.accumulate=4",), 52),
        (60, ("recipe.batch_size=16",), 16),
    ],
)
def test_the_default_batch_has_at_most_the_training_images(tmp_path, count, options, expected):
    assert batch_size(photos(tmp_path / "photos", count), "preset=null", *options) == expected


def test_a_typed_batch_size_is_not_changed(tmp_path):
    with pytest.raises(OptionError, match="batch_size=128"):
        batch_size(photos(tmp_path / "photos", 60), "recipe.batch_size=128")


def test_a_batch_of_more_images_than_the_set_is_named_as_typed(tmp_path, call):
    """One of the 8 images is held out."""
    images = ("data=folder", photos(tmp_path / "photos", 8), "data.image_size=16")
    with pytest.raises(UserError, match=r"^recipe\.batch_size=8: "):
        call("pretrain", *tiny_options("data"), *images, "recipe.batch_size=8")


def test_images_of_a_single_class_are_one_line(tmp_path, call):
    for number in range(16):
        put(tmp_path / "cats" / "cat" / f"{number}.png", picture(number))
    run = untrained(tmp_path / "run", *TINY)
    with pytest.raises(UserError, match=r"cat$"):
        call("finetune", f"checkpoint={run}", f"data={tmp_path}/cats", "data.image_size=16", "compare=null")


def test_a_message_on_missing_labels_names_the_split():
    bare, labelled = Memory(torch.zeros(3, 1, 2, 2)), Memory(torch.zeros(3, 1, 2, 2), [0, 1, 0], "ab")
    assert missing_labels(labelled, validation=labelled, test=None) == ""
    for name in ("validation", "test"):
        assert missing_labels(labelled, **{name: bare}).startswith(f"data.{name}: ")
    message = missing_labels(bare, test=bare)
    assert message
    assert not message.startswith("data.")
