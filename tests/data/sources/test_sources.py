"""Builders pair images with their labels, and report a wrong root in one line."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import tifffile
import torch
import torchvision.datasets
from images import put_grey
from PIL import Image, features

from ssvit.data.augment.options import CenterCrop
from ssvit.data.loader import Loader
from ssvit.data.sources import base_options as source_options
from ssvit.data.sources import datasets, datasets_options
from ssvit.data.sources.base import Data, Selection, Source, Unreadable, hold_out, masks, subset
from ssvit.data.sources.files import Files
from ssvit.data.sources.memory import Memory
from ssvit.errors import OptionError, UserError
from ssvit.evaluation.features import Pixels, extract


class Greys(Source):
    """Images of a user's source, which has a length and reads one image."""

    def __init__(self, count: int = 40, damaged: int | None = None, shift: int = 0) -> None:
        self.count, self.damaged, self.shift = count, damaged, shift

    def __len__(self) -> int:
        return self.count

    def read(self, index: int) -> torch.Tensor:
        if index == self.damaged:
            raise Unreadable(self.name(index), "lost")
        return torch.full((3, 4 + index % 3, 5), index + self.shift, dtype=torch.uint8)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_source_needs_a_length_and_a_way_to_read_one_image(workers):
    transform = CenterCrop(size=2).build()

    def shown(source: Source) -> tuple[list[int], dict[str, str]]:
        loader = Loader(source=source, transform=transform, seed=0, batch_size=10, workers=workers)
        return [tag for batch in loader.batches(0, 12) for tag in batch.images[:, 0, 0, 0].tolist()], loader.unreadable

    images = torch.arange(200, dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 3, 4, 5)
    chosen = torch.tensor([7, 3, 9] * 10)
    assert shown(Greys(200).take(chosen)) == shown(Memory(images).take(chosen))
    replaced, reasons = shown(Greys(120, damaged=5))
    assert (5 in replaced, reasons) == (False, {"image 5": "lost"})
    features = extract(Pixels(), Greys().take(torch.tensor([4, 2])), transform, workers=workers)
    assert (features.values["pixels"][:, 0] * 255).tolist() == [4, 2]


def test_the_fingerprint_of_a_users_source_tells_pixels_and_order():
    order = torch.tensor([1, 2])
    sources = [Greys(), Greys(shift=1), Greys(39), Greys(damaged=3)]
    sources += [Greys().take(part) for part in (order, order.flip(0))]
    assert len({source.fingerprint for source in sources}) == len(sources)
    assert Greys().fingerprint == Greys().fingerprint
    assert Greys().take(order).fingerprint == Greys().take(order).fingerprint
    assert [Greys().take(order).name(i) for i in (0, 1)] == ["image 1", "image 2"]


def test_hold_out_parts_the_set_the_same_way_each_time():
    source = Memory(torch.arange(200, dtype=torch.uint8).view(200, 1, 1, 1))
    train, kept = hold_out(source, fraction=0.1, seed=0)
    assert (len(train), len(kept)) == (180, 20)
    assert torch.equal(hold_out(source, fraction=0.1, seed=0)[1].in_memory, kept.in_memory)
    assert not torch.equal(hold_out(source, fraction=0.1, seed=1)[1].in_memory, kept.in_memory)
    assert [len(part) for part in hold_out(source.take(torch.arange(2)), fraction=0.01, seed=0)] == [1, 1]
    with pytest.raises(UserError):
        hold_out(source.take(torch.arange(1)), fraction=0.5, seed=0)


@pytest.mark.parametrize("is_multi_label", [False, True])
def test_each_class_keeps_an_image_for_training(is_multi_label):
    images = torch.arange(200, dtype=torch.uint8).view(200, 1, 1, 1)
    train, kept = hold_out(Memory(images), fraction=0.1, seed=0)
    labels = torch.zeros(200, dtype=torch.int64)
    first, *_ = places = kept.in_memory.flatten().long().tolist()
    labels[first], labels[places[-3:]], labels[train.in_memory[0].item()], labels[places[3]] = 1, 2, 3, 3
    classes = ("many", "once", "three", "two")
    if is_multi_label:
        labels = torch.nn.functional.one_hot(labels, 4).bool()
    train, kept = hold_out(Memory(images, labels, classes), fraction=0.1, seed=0)
    held = set(kept.in_memory.flatten().tolist())
    moved = set(places) - held
    assert held < set(places)
    assert first in moved
    assert len(moved) == 2  # and one of the class of three
    assert len(moved & set(places[-3:])) == 1
    assert sorted([*train.in_memory.flatten().tolist(), *held]) == list(range(200))
    unique = Memory(images, torch.arange(200), tuple(map(str, range(200))))
    assert torch.equal(hold_out(unique, fraction=0.1, seed=0)[1].labels, torch.tensor(places))


def test_validation_is_for_choices_and_test_for_the_reported_figure():
    train, validation, test = (Memory(torch.zeros(count, 1, 2, 2, dtype=torch.uint8)) for count in (3, 1, 2))
    both, one, other = (
        Data(train, *held_out, ()) for held_out in ((validation, test), (validation, None), (None, test))
    )
    assert (both.validation_or_test, both.test_or_validation) == (validation, ("test", test))
    assert (one.validation_or_test, one.test_or_validation) == (validation, ("validation", validation))
    assert (other.validation_or_test, other.test_or_validation) == (test, ("test", test))
    for development in (0.3, "validation"):  # choices use the validation images, and there are no test images
        assert both.for_development(development) == Data(train, validation, None, ())
    # With one of the two alone it serves for both, and a choice takes a part of the training images.
    chosen = one.for_development(0.3)
    assert (len(chosen.train), len(chosen.validation), chosen.test) == (2, 1, None)
    assert one.for_development("validation").validation is validation
    with pytest.raises(OptionError, match="development=validation: "):
        other.for_development("validation")


@pytest.mark.parametrize(("name", "reason"), [("test/6", "labels"), ("test/eel/6", "eel")])
def test_test_images_without_labels_are_passed_over_unless_asked_for(tmp_path, name, reason):
    for one in ("train/ant/1", "train/cat/1", "val/cat/3", name):
        put_grey(tmp_path / f"{one}.png", 1)
    data = datasets.folder(datasets_options.Folder(root=str(tmp_path)))
    assert data.test_or_validation == ("validation", data.validation)
    val, _, test = data.summary.replace(str(tmp_path), "").partition("test/")
    assert "val/ 1 " in val
    assert f" {reason}" in test
    if "eel" in name:
        with pytest.raises(UserError, match=rf"\b{reason}\b"):
            datasets.folder(datasets_options.Folder(root=str(tmp_path), test="test"))
    else:
        assert datasets.folder(datasets_options.Folder(root=str(tmp_path), test="test")).test.labels is None


def test_classes_that_are_named_like_splits_are_reported(tmp_path):
    for name in ("train_images/1", "train_images/2", "test_images/1", "test_images/2"):
        put_grey(tmp_path / f"{name}.png", 1)
    auto, classes = (
        datasets.folder(datasets_options.Folder(root=str(tmp_path), train=name)) for name in ("auto", None)
    )
    assert all(name in auto.summary for name in auto.classes)
    assert not any(name in classes.summary for name in classes.classes)
    assert auto.train.fingerprint == classes.train.fingerprint


def test_16_bit_images_without_a_range_are_reported(tmp_path):
    def summary(**options: object) -> str:
        return datasets.folder(datasets_options.Folder(root=str(tmp_path), **options)).summary

    for number in range(4):
        Image.fromarray(np.full((4, 4), 1000 * number + 91, np.uint16)).save(tmp_path / f"{number}.png")
    assert "3091" in summary()
    assert "warning" not in summary(channels=1, range=(0, 4095))
    put_grey(tmp_path / "4.png", 1)
    for options in ({}, {"channels": 1, "range": (0, 4095)}):
        assert "8-bit and 16-bit" in summary(**options)
    for number in range(4):
        (tmp_path / f"{number}.png").unlink()
    put_grey(tmp_path / "5.png", 1)
    put_grey(tmp_path / "6.jpg", 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.Encoded, "values", None)  # the headers suffice
        assert "warning" not in summary()


def test_pages_that_are_not_read_are_reported_and_read_as_channels_on_request(tmp_path):
    pages = np.random.default_rng(0).integers(0, 256, (2, 3, 6, 5), dtype=np.uint8)
    for number, stack in enumerate(pages):
        tifffile.imwrite(tmp_path / f"{number}.tif", stack, photometric="minisblack")
    first = datasets.folder(datasets_options.Folder(root=str(tmp_path)))
    assert "warning" in first.summary
    assert "first page" in first.summary
    channels = datasets.folder(datasets_options.Folder(root=str(tmp_path), range=(0, 255)))
    assert "warning" not in channels.summary
    for source in (channels.train, channels.test):
        number = int(Path(source.name(0)).stem)
        np.testing.assert_allclose(source.read(0), pages[number] / 255, atol=1e-6)
    for number, stack in enumerate(pages):
        Image.fromarray(stack[0]).save(tmp_path / f"{number}.tif")
    assert "warning" not in datasets.folder(datasets_options.Folder(root=str(tmp_path))).summary


def test_files_that_are_not_used_are_counted_by_suffix(tmp_path):
    image = Image.new("RGB", (4, 4))
    names = [f"{kind}{number}.{suffix}" for kind in "ab" for number, suffix in enumerate(("jfif", "JPE", "mpo", "jpg"))]
    for name in names:
        image.save(tmp_path / name, "JPEG")
    if features.check("avif"):
        names.append("c.avif")
        image.save(tmp_path / "c.avif")
    for name in ("d", "e", "f.heic", ".hidden"):
        (tmp_path / name).touch()
    for below in ("", "class"):  # without and with classes
        data = datasets.folder(datasets_options.Folder(root=str(tmp_path)))
        assert len(data.train) + len(data.test) == len(names)
        assert all(source.read(i).shape == (3, 4, 4) for source in (data.train, data.test) for i in range(len(source)))
        assert all(part in data.summary for part in ("3 other files", "(2)", ".heic (1)"))
        assert "hidden" not in data.summary
        if not below:
            (tmp_path / "class").mkdir()
            for path in list(tmp_path.iterdir()):
                if path.is_file():
                    path.rename(tmp_path / "class" / path.name)
    (tmp_path / "class/f.heic").unlink()
    for name in ("d", "e"):
        (tmp_path / "class" / name).unlink()
    assert "not used" not in datasets.folder(datasets_options.Folder(root=str(tmp_path))).summary


def torchvision_set(root: Path, name: str, **options: object) -> Data:
    return datasets.torchvision_set(datasets_options.TorchvisionSet(name=name, root=str(root), **options))


@pytest.mark.parametrize("name", ["cifar10", "cifar100", "stl10", "flowers102", "oxford_pets"])
def test_absent_sets_are_reported_in_one_line(tmp_path, name):
    with pytest.raises(UserError, match=rf"^data\.root={tmp_path}: [^\n]*$"):
        torchvision_set(tmp_path, name)


@pytest.mark.parametrize(("options", "wrong"), [({"name": "mnist"}, "name"), ({"split": "unlabeled"}, "split")])
def test_wrong_options_of_public_sets_are_named(tmp_path, options, wrong):
    with pytest.raises(OptionError, match=f"^{wrong}="):
        torchvision_set(tmp_path, **{"name": "cifar10"} | options)


def test_a_subset_is_balanced_and_parts_are_disjoint():
    labels = torch.arange(90) % 3
    source = Memory(torch.arange(90, dtype=torch.uint8)[:, None, None, None], labels, ("a", "b", "c"))

    def shown(**options) -> list[int]:
        taken = subset(source, **options)
        shown = taken.in_memory.flatten().tolist()
        assert taken.labels.tolist() == [labels[i] for i in shown]
        assert shown == sorted(shown)
        return shown

    halves = shown(part=(0, 0.5)), shown(part=(0.5, 1))
    assert sorted(halves[0] + halves[1]) == list(range(90))
    assert min(map(len, halves)) > 30
    assert Counter(labels[i].item() for i in shown(images=12)) == {0: 4, 1: 4, 2: 4}
    assert set(shown(images=12)) < set(shown(images=40))
    assert shown(images=12) != shown(images=12, seed=1)
    assert set(shown(images=20, part=(0, 0.5))) <= set(halves[0])
    assert shown() == list(range(90))
    unbalanced = source.take(torch.tensor([0, 1, 2, 3, 6, 9]))  # four of the first class, one of each other
    assert Counter(subset(unbalanced, images=4).labels.tolist()) == {0: 2, 1: 1, 2: 1}
    first = torch.arange(4000) % 10 == 0
    source = Memory(torch.zeros(4000, 1, 1, 1, dtype=torch.uint8), first.long(), ("a", "b"))
    shares = [subset(source, images=400, balanced=balanced).labels.double().mean() for balanced in (True, False)]
    assert shares == pytest.approx([0.5, 0.1], abs=0.05)


def test_an_impossible_subset_is_named():
    source = Memory(torch.zeros(9, 1, 1, 1, dtype=torch.uint8))
    assert len(subset(source, images=5)) == 5
    for options in ({"images": 10}, {"part": (0.1, 0.1000001)}):
        with pytest.raises(OptionError, match=f"^{next(iter(options))}="):
            subset(source, **options)
    for options in ({"part": (0.5, 0.2)}, {"images": 0}):
        with pytest.raises(OptionError, match=f"^{next(iter(options))}="):
            source_options.Subset(**options)


class _Stub:
    """A stand-in for torchvision's readers of file sets, of STL-10 and of CIFAR."""

    def __init__(self, root: str, split: str = "", download: bool = False, train: bool = False) -> None:
        self._image_files = self._images = [Path(root) / split / f"{i}.jpg" for i in range(3)]
        self._labels = [0, 1, 0]
        self.classes = ["a", "b"]
        self.data = np.full((3, 3, 96, 96), len(split), dtype=np.uint8)
        if not split:
            self.data = np.random.default_rng(train).integers(0, 256, (3, 32, 32, 3), dtype=np.uint8)
        self.targets = self._labels
        self.labels = np.array([0, 1, 1]) if split != "unlabeled" else np.array([-1, -1, -1])


def test_sets_train_on_all_but_the_test_images(tmp_path, monkeypatch):
    for reader in ("Flowers102", "OxfordIIITPet", "STL10", "CIFAR10"):
        monkeypatch.setattr(torchvision.datasets, reader, _Stub)
    for name, parts in (("flowers102", {"train", "val"}), ("oxford_pets", {"trainval"})):
        data = torchvision_set(tmp_path, name)
        assert {Path(path).parent.name for path in data.train.paths} == parts
        assert {Path(path).parent.name for path in data.test.paths} == {"test"}
        assert data.test.labels.tolist() == [0, 1, 0]
    assert torchvision_set(tmp_path, "stl10").classes == ("a", "b")
    unlabelled = torchvision_set(tmp_path, "stl10", split="unlabeled")
    assert (unlabelled.classes, unlabelled.train.labels) == ((), None)
    assert (unlabelled.train.in_memory == len("unlabeled")).all()
    assert unlabelled.test.labels.tolist() == [0, 1, 1]
    cifar = torchvision_set(tmp_path, "cifar10")
    for source, train in ((cifar.train, True), (cifar.test, False)):
        assert (source.in_memory.movedim(1, -1).numpy() == _Stub("", train=train).data).all()
        assert source.labels.tolist() == [0, 1, 0]


def test_masks_go_with_their_images(tmp_path):
    for name in ("train/ant/1", "train/cat/2.b", "val/cat/3"):
        put_grey(tmp_path / "images" / f"{name}.jpg", 1)
        of = tmp_path / "masks" / f"{name}.png"
        of.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (6, 6), int(name[-1]) if name[-1] != "b" else 255).save(of)
    root = str(tmp_path / "images")
    data = datasets.folder(datasets_options.Folder(root=root, masks=str(tmp_path / "masks")))
    assert [data.train.mask(i).unique().tolist() for i in (0, 1)] == [[1], [255]]
    for part in (data.train.take(torch.tensor([1, 0])), Selection(data.train, torch.tensor([1, 0]))):
        assert [part.mask(i)[0, 0].item() for i in (0, 1)] == [255, 1]
    assert (data.validation.mask(0) == 3).all()
    crop = CenterCrop(size=5).build()
    found = masks(data.train, crop.mask, torch.tensor([1, 0, 1]))
    assert found.flatten(1).unique(dim=1).tolist() == [[255], [1], [255]]
    plain = datasets.folder(datasets_options.Folder(root=root))
    assert plain.train.mask(0) is None
    assert plain.train.fingerprint == data.train.fingerprint
    with pytest.raises(UserError, match=r"\b1\.jpg\b"):
        masks(plain.train, crop.mask, torch.tensor([0]))
    of.unlink()
    with pytest.raises(UserError, match=r"\b3\.png: "):
        masks(data.validation, crop.mask, torch.tensor([0]))
    assert Greys().mask(0) is None
    with pytest.raises(OptionError, match="masks=nowhere: "):
        datasets.folder(datasets_options.Folder(root=root, masks="nowhere"))


def test_paths_below_the_common_folder_may_be_relative_and_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    files = Files(["a/0.png", str(tmp_path / "a" / "b" / "1.png"), "a/2.png"])
    assert [files.inner_name(index) for index in range(3)] == ["0.png", "b/1.png", "2.png"]
