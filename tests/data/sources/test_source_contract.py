"""The contract of every source of images, tested with one set of numbered pictures in every format."""

import io
import pickle
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import datasets as hub
import numpy as np
import pytest
import torch
from command import error_of
from images import class_names, picture, pixels, put, put_tar
from PIL import Image

from ssvit.data.augment.options import InceptionCrop
from ssvit.data.loader import Loader
from ssvit.data.sources import datasets
from ssvit.data.sources.base import Data, Source, Unreadable
from ssvit.data.sources.datasets_options import Csv, Folder, HuggingFace, Shards
from ssvit.data.sources.files import Files
from ssvit.data.sources.huggingface import hugging_face
from ssvit.data.sources.memory import Memory
from ssvit.errors import UserError

CLASSES = ("ant", "bee", "cat")
PARTS: Mapping[str, Sequence[int]] = {"train": range(12), "val": range(12, 15), "test": range(15, 18)}
Bodies = Mapping[int, bytes]


def name(number: int) -> str:
    """Return a name from the class and the index of a picture: sorting by name keeps the order of the numbers."""
    return f"{CLASSES[number % 3]}/{number:02d}.png"


def tree(root: Path, parts: Mapping[str, Sequence[int]], bodies: Bodies) -> None:
    for part, numbers in parts.items():
        for number in numbers:
            put(root / part / name(number), bodies[number])


def folder(root: Path, parts: Mapping[str, Sequence[int]], bodies: Bodies, **options: Any) -> Data:
    tree(root, parts, bodies)
    return datasets.folder(Folder(root=str(root), **options))


def csv(root: Path, parts: Mapping[str, Sequence[int]], bodies: Bodies, **options: Any) -> Data:
    rows = ["path,label,split"]
    for part, numbers in parts.items():
        for number in numbers:
            put(root / name(number), bodies[number])
            rows.append(f"{name(number)},{CLASSES[number % 3]},{part}")
    put(root / "t.csv", "\n".join(rows).encode())
    return datasets.csv(Csv(table=str(root / "t.csv"), **options))


def write_shards(root: Path, parts: Mapping[str, Sequence[int]], bodies: Bodies) -> None:
    for part, numbers in parts.items():
        for start in range(0, len(numbers), 5):
            members = {}
            for number in numbers[start : start + 5]:
                members |= {f"{number:02d}.cls": CLASSES[number % 3].encode(), f"{number:02d}.png": bodies[number]}
            put_tar(root / part / f"{start:02d}.tar", members)


def shards(root: Path, parts: Mapping[str, Sequence[int]], bodies: Bodies, **options: Any) -> Data:
    write_shards(root, parts, bodies)
    return datasets.shards(Shards(root=str(root), **options))


def saved(root: Path, parts: Mapping[str, Sequence[int]], bodies: Bodies, **options: Any) -> Data:
    features = hub.Features({"image": hub.Image(), "label": hub.ClassLabel(names=list(CLASSES))})
    kinds = {}
    for part, numbers in parts.items():
        images = [{"bytes": bodies[n], "path": None} for n in numbers]
        columns = {"image": images, "label": [n % 3 for n in numbers]}
        kinds[part] = hub.Dataset.from_dict(columns, features=features)
    hub.DatasetDict(kinds).save_to_disk(str(root / "saved"))
    return hugging_face(HuggingFace(root=str(root / "saved"), **options))


class Case(NamedTuple):
    """A kind of source, and how it orders a part of pictures."""

    make: Callable[..., Data]
    order: Callable[[int], Any] = lambda number: number

    def ordered(self, numbers: Sequence[int]) -> list[int]:
        return sorted(numbers, key=lambda number: (self.order(number), number))


CASES = {
    "folder": Case(folder, lambda n: n % 3), "csv": Case(csv), "shards": Case(shards), "huggingface": Case(saved),
}  # fmt: skip
every = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
BODIES = {number: picture(number) for number in range(18)}


hub.disable_progress_bars()


def assert_holds(source: Source | None, numbers: Sequence[int], bodies: Bodies = BODIES) -> None:
    """A source has the numbered pictures, in their order, with their classes."""
    assert source is not None
    assert class_names(source) == [CLASSES[n % 3] for n in numbers]
    for place, number in enumerate(numbers):
        image = source.read(place)
        assert (image.dtype, image.equal(pixels(bodies[number]))) == (torch.uint8, True)
        assert (source.values(place) == image.numpy()).all()
    assert len({source.name(place) for place in range(len(source))}) == len(source)


@every
def test_images_labels_and_order_are_those_that_were_written(tmp_path, case):
    data = case.make(tmp_path / "set", PARTS, BODIES)
    assert data.classes == CLASSES
    for source, numbers in zip((data.train, data.validation, data.test), PARTS.values(), strict=True):
        ordered = case.ordered(numbers)
        assert_holds(source, ordered)
        chosen = torch.tensor([2, 0, 1])
        assert source is not None
        copy = pickle.loads(pickle.dumps(source)).take(chosen)
        assert_holds(copy, [ordered[place] for place in chosen])
        assert_holds(copy.take(torch.tensor([1])), ordered[:1])
        assert copy.name(0) == source.name(2)


@every
def test_batches_are_those_of_the_same_files_for_any_number_of_workers(tmp_path, case):
    data = case.make(tmp_path / "set", PARTS, BODIES)
    ordered = case.ordered(PARTS["train"])
    files = [str(put(tmp_path / f"{place:02d}.png", BODIES[n])) for place, n in enumerate(ordered)]
    reference = Files(files, [n % 3 for n in ordered], CLASSES)

    def batches(source: Source, first: int, workers: int = 0) -> list[torch.Tensor]:
        crop = InceptionCrop(size=6).build()
        loader = Loader(source=source, transform=crop, seed=1, batch_size=4, workers=workers, order="bijection")
        return [tensor for batch in loader.batches(first, 6) for tensor in batch.tensors]

    expected = batches(reference, 0)
    assert all(map(torch.equal, expected, batches(data.train, 0, workers=1)))
    assert all(map(torch.equal, expected[4 * 4 :], batches(data.train, 4)))


@every
def test_the_fingerprint_tells_images_and_order_and_not_the_place(tmp_path, case):
    one, other = (case.make(tmp_path / place, PARTS, BODIES).train for place in ("here", "there"))
    longer = case.make(tmp_path / "longer", PARTS, BODIES | {4: BODIES[4] + b"0"}).train
    turned = one.take(torch.arange(11, -1, -1))
    assert one.fingerprint == other.fingerprint == pickle.loads(pickle.dumps(one)).fingerprint
    assert len({one.fingerprint, longer.fingerprint, turned.fingerprint, one.take(torch.arange(6)).fingerprint}) == 4


@every
def test_equal_names_and_sizes_with_other_contents_are_other_images(tmp_path, case):
    """A change of any length in a small file counts, and one of a seventh of a large file."""
    for place, size in (("small", 0), ("large", 200_000)):
        bodies = {number: body + bytes(size) for number, body in BODIES.items()}
        body = bytearray(bodies[4])
        if size:
            body[100_000:129_000] = bytes(range(250)) * 116
        else:
            body[-1] ^= 1
        one, other, changed = (
            case.make(tmp_path / place / folder, PARTS, of_folder).train
            for folder, of_folder in (("one", bodies), ("other", bodies), ("changed", bodies | {4: bytes(body)}))
        )
        assert one.fingerprint == other.fingerprint == changed.fingerprint
        assert one.contents == other.contents != changed.contents
        (row,) = (row for row, number in enumerate(case.ordered(PARTS["train"])) if number == 4)
        differing = [i for i in range(len(one)) if one.content(i) != changed.content(i)]
        assert differing == [row]
        assert one.take(torch.tensor([row])).content(0) == one.content(row)


@every
def test_a_damaged_image_is_named_and_replaced(tmp_path, case):
    data = case.make(tmp_path / "set", PARTS, BODIES | {4: b"no image"})
    ordered = case.ordered(PARTS["train"])
    place = ordered.index(4)
    with pytest.raises(Unreadable) as caught:
        data.train.read(place)
    assert str(caught.value).startswith(f"{data.train.name(place)}: ")
    loader = Loader(source=data.train, transform=InceptionCrop(size=6).build(), seed=1, batch_size=12)
    with pytest.raises(UserError, match=r"\b1 of 12\b"):
        list(loader.batches(0, 1))
    assert list(loader.unreadable) == [data.train.name(place)]


@every
def test_images_of_many_channels_are_read_exactly(tmp_path, case):
    arrays = {n: np.random.default_rng(n).integers(0, 4000, (5, 8, 7), np.uint16) for n in BODIES}
    bodies = {}
    for number, array in arrays.items():
        np.save(file := io.BytesIO(), array)
        bodies[number] = file.getvalue()
    source = case.make(tmp_path / "set", PARTS, bodies, channels=5, range=[0, 4000]).train
    for place, number in enumerate(case.ordered(PARTS["train"])):
        assert (source.values(place) == arrays[number]).all()
        assert source.read(place).equal(torch.from_numpy(arrays[number] / np.float32(4000)))


@every
def test_transparent_pixels_become_the_background(tmp_path, case):
    rgba = np.random.default_rng(0).integers(0, 256, (18, 6, 5, 4), dtype=np.uint8)
    bodies = {}
    for number, array in enumerate(rgba):
        file = io.BytesIO()
        Image.fromarray(array).save(file, "PNG")
        bodies[number] = file.getvalue()
    data = case.make(tmp_path / "set", PARTS, bodies, background="#ff8000")
    share = rgba[..., 3:] / 255
    expected = torch.from_numpy(rgba[..., :3] * share + np.array([255, 128, 0]) * (1 - share)).movedim(-1, 1)
    for source, numbers in ((data.train, case.ordered(PARTS["train"])), (data.test, case.ordered(PARTS["test"]))):
        for place, number in enumerate(numbers):
            assert (source.read(place) - expected[number]).abs().max() <= 1
            assert source.take(torch.tensor([place])).read(0).equal(source.read(place))
    assert "#ff8000" in data.summary


@every
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ("train", "val", "test")),
        ({"test": None}, ("train", "val", None)),
        ({"validation": None}, ("train", None, "test")),
        ({"validation": "test", "test": "val"}, ("train", "test", "val")),
        ({"train": "val", "validation": None}, ("val", None, "test")),
    ],
)
def test_splits_have_names(tmp_path, case, options, expected):
    data = case.make(tmp_path / "set", PARTS, BODIES, **options)
    for source, part in zip((data.train, data.validation, data.test), expected, strict=True):
        assert (source is None) == (part is None)
        if source is not None and part is not None:
            assert_holds(source, case.ordered(PARTS[part]))


@every
def test_of_training_images_alone_a_part_is_held_out(tmp_path, case):
    data = case.make(tmp_path / "set", {"train": range(12)}, BODIES, held_out=0.25)
    assert (len(data.train), data.validation, len(data.validation_or_test)) == (9, None, 3)
    assert "(data.held_out=0.25)" in data.summary
    both = [source.read(i) for source in (data.train, data.validation_or_test) for i in range(len(source))]
    assert sorted(image.sum().item() for image in both) == sorted(pixels(BODIES[n]).sum().item() for n in range(12))
    if case.make is saved:  # which saves to the same folder once
        again = hugging_face(HuggingFace(root=str(tmp_path / "set" / "saved"), held_out=0.25))
    else:
        again = case.make(tmp_path / "set", {"train": range(12)}, BODIES, held_out=0.25)
    assert again.validation_or_test.fingerprint == data.validation_or_test.fingerprint


@every
@pytest.mark.parametrize(
    ("options", "option"),
    [
        ({"validation": "nowhere"}, "validation"), ({"train": "nowhere"}, "train"),
        ({"validation": "train"}, "validation"), ({"test": "val"}, "test"), ({"held_out": 1.5}, "held_out"),
        ({"channels": 0}, "channels"), ({"channels": 17}, "channels"), ({"range": [1]}, "range"),
        ({"range": [2, 1]}, "range"), ({"range": [0, "x"]}, "range"), ({"range": 7}, "range"),
        ({"channels": 4, "range": [[0, 0], 1]}, "range"), ({"train": ["a"]}, "train"),
    ],
)  # fmt: skip
def test_wrong_options_are_named(tmp_path, case, options, option):
    assert error_of(case.make, tmp_path / "set", PARTS, BODIES, **options).name == option


@every
def test_a_class_that_training_lacks_is_an_error_unless_the_test_split_was_found_by_auto(tmp_path, case):
    parts = {"train": (0, 1, 3, 4), "val": (6, 7), "test": (2, 5)}  # cats in the test images alone
    data = case.make(tmp_path / "set", parts, BODIES)
    if case.make is saved:  # whose description has all classes
        assert data.classes == CLASSES
        return
    assert (data.test, data.classes) == (None, ("ant", "bee"))
    assert "cat" in data.summary
    for options in ({"test": "test"}, {"validation": "test", "test": None}, {"validation": None}):
        with pytest.raises(UserError, match=r"\bcat\b.*\b2\b"):
            case.make(tmp_path / "set", parts, BODIES, **options)


def test_a_set_in_memory_is_a_source():
    numbers = range(12)
    images = torch.stack([pixels(picture(n, size=(6, 5))) for n in numbers])
    memory = Memory(images, [n % 3 for n in numbers], CLASSES)
    assert_holds(memory, numbers, {n: picture(n, size=(6, 5)) for n in numbers})
    changed = images.clone()
    changed[4, 2, 3, 4] ^= 1
    sets = (images, changed, images.flip(0), images.view(12, 3, 5, 6))
    assert len({Memory(one).fingerprint for one in sets}) == 4
    assert Memory(images.mT.contiguous().mT).fingerprint == Memory(images).fingerprint
    for labels in ([0, -1] * 6, [0, 3] * 6, [0, 1]):
        for make, content in ((Memory, images), (Files, ["a.png"] * 12)):
            with pytest.raises(UserError, match="label"):
                make(content, labels, CLASSES)
