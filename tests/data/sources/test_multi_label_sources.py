"""Images of several classes or none: tables, subsets, batches and shards."""

from pathlib import Path

import pytest
import torch
from images import put, put_grey
from torch import Tensor

from ssvit.data.augment.options import CenterCrop
from ssvit.data.loader import Loader
from ssvit.data.sources import datasets, datasets_options
from ssvit.data.sources.base import class_text, subset
from ssvit.data.sources.datasets_options import Pack
from ssvit.data.sources.memory import Memory
from ssvit.data.sources.packing import pack
from ssvit.errors import UserError

CLASSES = ("cat", "dog", "owl", "yak")


TAGS = ("cat|dog", "", "owl", "dog | cat|owl", "dog", "cat", "yak|dog", "owl|dog", "cat", "yak")


def table(folder: Path) -> Path:
    """Write a CSV file of ten images of different greys, with tags in one column."""
    rows = ["path,tags,split"]
    for i, tags in enumerate(TAGS):
        put_grey(folder / f"{i}.png", i, (20, 16 + i))
        rows.append(f"{i}.png,{tags},{'test' if i in (4, 7) else 'train'}")
    return put(folder / "t.csv", "\n".join(rows).encode())


def expected(*places: int) -> Tensor:
    return torch.tensor([[name in TAGS[i] for name in CLASSES] for i in places])


def test_tables_have_several_classes_in_a_cell(tmp_path):
    path = str(table(tmp_path))
    data = datasets.csv(datasets_options.Csv(table=path, label="tags", separator="|"))
    assert data.classes == CLASSES
    assert data.train.labels.equal(expected(0, 1, 2, 3, 5, 6, 8, 9))
    assert data.test.labels.equal(expected(4, 7))
    assert class_text(data.train.labels[3], CLASSES) == "cat|dog|owl"


def test_wrong_tables_are_refused_in_one_line(tmp_path):
    path = str(table(tmp_path))
    for options, words in (
        ({"label": "tags", "separator": ";"}, "separator=;: "),
        ({"label": None, "separator": "|"}, "separator=|: "),
    ):
        with pytest.raises(UserError, match=words.replace("|", r"\|")):
            datasets.csv(datasets_options.Csv(table=path, **options))
    Path(path).write_text("path,label,split\n0.png,a|b,train\n1.png,a,train\n2.png,c,test\n")
    with pytest.raises(UserError, match=r"\bc\b.*\b2\b"):
        datasets.csv(datasets_options.Csv(table=path, separator="|"))


def test_parts_sets_and_batches_keep_the_rows(tmp_path):
    source = datasets.csv(
        datasets_options.Csv(table=str(table(tmp_path)), label="tags", separator="|", split=None, held_out=0.1)
    ).train
    order = torch.tensor([3, 0, 2])
    assert source.take(order).labels.equal(source.labels[order])
    memory = Memory(
        torch.stack([CenterCrop(size=8).build()([source.read(i)])[0] for i in range(9)]), source.labels, CLASSES
    )
    for one in (source, memory):
        loader = Loader(source=one, transform=CenterCrop(size=8).build(), seed=0, batch_size=4)
        for batch in loader.batches(0, 3):
            number = batch.images[:, 0, 0, 0].long()  # the grey of an image is its number in the table
            assert batch.labels.dtype == torch.bool
            assert batch.labels.equal(expected(*number.tolist()))
    with pytest.raises(UserError, match=r"\b9\b.*\b4\b"):
        Memory(memory.in_memory, source.labels[:, :3], CLASSES)


def test_a_balanced_subset_takes_the_classes_by_turns():
    labels = torch.zeros(400, 4, dtype=torch.bool)
    labels[:, 0] = True
    labels[::20, 1], labels[5::40, 2], labels[7, 3] = True, True, True
    labels[9::50] = False
    source = Memory(torch.zeros(400, 1, 2, 2, dtype=torch.uint8), labels, CLASSES)
    few = subset(source, images=31).labels
    assert (few.sum(0)[1:] >= torch.tensor([7, 7, 1])).all()
    assert (~few.any(1)).sum() >= 7


def test_shards_keep_several_classes(tmp_path):
    data = datasets.csv(datasets_options.Csv(table=str(table(tmp_path)), label="tags", separator="|"))
    output = str(tmp_path / "shards")
    pack(data, tmp_path / "shards", Pack(output=output, workers=1), lambda done, total: None)
    read = datasets.shards(datasets_options.Shards(root=str(tmp_path / "shards")))
    assert read.classes == CLASSES
    assert read.train.labels.equal(data.train.labels)
    assert read.test.labels.equal(data.test.labels)
