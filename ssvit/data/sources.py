"""Where images come from: a set held in memory, or a list of files, and the builders of data sets.

Letters: n images, c channels, h, w pixels.
"""

import hashlib
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor
from tqdm import tqdm

from ssvit.data import folder as folders
from ssvit.data import rules
from ssvit.options import OptionError, UserError, number, pair, printable
from ssvit.randomness import uniform


class Source(Protocol):
    """Images in a fixed order: labels (n,) int64 into `classes`, or None; the fingerprint tells content and order."""

    labels: Tensor | None
    classes: tuple[str, ...]

    def __len__(self) -> int: ...

    @property
    def fingerprint(self) -> str: ...

    def take(self, indices: Tensor) -> "Source": ...


@dataclass(frozen=True)
class Data:
    """What to train on, and what to measure on: validation images for choices, test images for the reported figure.

    One of these two may be None; the other then serves for both, under its own name. classes: the names of the training
    set's classes (none if unlabelled). told: which folder serves what, a line for people.
    """

    train: Source
    validation: Source | None
    test: Source | None
    classes: tuple[str, ...]
    told: str = ""

    @property
    def watched(self) -> Source:
        """What to measure on while training goes on."""
        return self.test if self.validation is None else self.validation

    @property
    def reported(self) -> tuple[str, Source]:
        """What the reported figure is measured on: its name, test or validation, and the images."""
        return ("validation", self.validation) if self.test is None else ("test", self.test)

    def without_test(self, development: float | str) -> "Data":
        """The same without test images, to choose options by.

        The choice is on the validation images, unless those are what is reported on: then it is on the fraction
        `development` of the training images, which are not trained on. development=validation takes them all the same;
        OptionError if there are none.
        """
        if self.validation is not None and (self.test is not None or development == rules.VALIDATION):
            return replace(self, test=None)
        if development == rules.VALIDATION:
            right = "there are no validation images; 0.1 for that fraction of the training images"
            raise OptionError("development", development, right)
        train, validation = hold_out(self.train, fraction=development, seed=0)
        return replace(self, train=train, validation=validation, test=None)


class Memory:
    """Images of one size held as one tensor: images (n, c, h, w) uint8, labels (n,). UserError for a label amiss."""

    def __init__(self, images: Tensor, labels: Any = None, classes: Sequence[str] = ()) -> None:
        if images.ndim != 4 or images.dtype != torch.uint8:
            raise ValueError(f"images must be (n, c, h, w) uint8, not {tuple(images.shape)} {images.dtype}")
        self.images = images.contiguous()
        self.labels = _labels(labels, len(images), classes)
        self.classes = tuple(classes)

    def __len__(self) -> int:
        return len(self.images)

    @cached_property
    def fingerprint(self) -> str:
        """sha256 of the shape and the pixels."""
        digest = hashlib.sha256(str(tuple(self.images.shape)).encode())
        digest.update(self.images.numpy())
        return digest.hexdigest()

    def take(self, indices: Tensor) -> "Memory":
        """The set of the images at `indices`, in that order."""
        labels = None if self.labels is None else self.labels[indices]
        return Memory(self.images[indices], labels, self.classes)


class Files:
    """Image files of any size, decoded to RGB as they are needed; labels (n,). UserError for a label amiss.

    verify: what the fingerprint covers besides the names, the "size" of each file or its "content".
    """

    def __init__(
        self, paths: Sequence[str], labels: Any = None, classes: Sequence[str] = (), *, verify: str = "size"
    ) -> None:
        rules.verified(verify)
        self.verify = verify
        self.paths = [os.fspath(path) for path in paths]
        self.labels = _labels(labels, len(self.paths), classes)
        self.classes = tuple(classes)

    def __len__(self) -> int:
        return len(self.paths)

    @cached_property
    def fingerprint(self) -> str:
        """sha256 of the names below the common folder and the sizes or contents: the same wherever the folder lies.

        UserError if a file is to be hashed and cannot be read.
        """
        digest = hashlib.sha256()
        # What the first and the last of the sorted paths share, all share.
        top = os.path.commonpath([os.path.dirname(path) for path in (min(self.paths), max(self.paths))])
        for path, what in zip(self.paths, self._contents() if self.verify == "content" else self._sizes(), strict=True):
            digest.update(f"{os.path.relpath(path, top)}\0{what}\0".encode(errors="surrogateescape"))
        return digest.hexdigest()

    def _sizes(self) -> Iterator[int]:
        for path in self.paths:
            yield os.path.getsize(path) if os.path.isfile(path) else -1

    def _contents(self) -> Iterator[str]:
        """sha256 of each file, read by as many threads as there are cores; a bar shows where that takes longer."""
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            yield from tqdm(
                pool.map(_digest, self.paths),
                "data.verify=content",
                len(self.paths),
                unit=" files",
                delay=2,
                leave=False,
            )

    def take(self, indices: Tensor) -> "Files":
        """The set of the files at `indices`, in that order."""
        labels = None if self.labels is None else self.labels[indices]
        return Files([self.paths[i] for i in indices.tolist()], labels, self.classes, verify=self.verify)


def _digest(path: str) -> str:
    """sha256 of a file; of nothing where there is no file that could be read, as for training."""
    if not os.path.isfile(path):
        return ""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UserError(f"{printable(path)}: data.verify=content cannot read it: {error.strerror}") from None


def _labels(labels: Any, count: int, classes: Sequence[str]) -> Tensor | None:
    if labels is None:
        return None
    labels = torch.as_tensor(labels, dtype=torch.int64)
    if labels.shape != (count,):
        raise UserError(f"{len(labels)} labels for {count} images")
    wrong = labels[(labels < 0) | (labels >= len(classes))]
    if len(wrong):
        raise UserError(f"label {wrong[0].item()} is outside of [0, {len(classes)}), the range of the classes")
    return labels


def synthetic(*, size: Any = 32, images: int = 8192, held_out_images: int = 2048, seed: int = 0) -> Data:
    """The embedded set, drawn anew at each start: nothing to download. OptionError for sizes or counts amiss."""
    from ssvit.data.synthetic import CLASSES, render

    rules.drawn_set(size=size, images=images, held_out_images=held_out_images, seed=seed)
    size = pair("size", size)
    train = render(torch.arange(images), seed=seed, size=size)
    test = render(torch.arange(images, images + held_out_images), seed=seed, size=size)
    return Data(Memory(*train, CLASSES), None, Memory(*test, CLASSES), CLASSES)


def folder(
    *,
    root: str,
    train: str | None = folders.AUTO,
    validation: str | None = folders.AUTO,
    test: str | None = folders.AUTO,
    held_out: float = 0.1,
    seed: int = 0,
    verify: str = "size",
) -> Data:
    """A folder of images, flat or with a subfolder for each class, or subfolders of those: see `folders.splits`.

    Without validation and test images the fraction `held_out` of the images is kept from training to test on. Where
    there are both, test=auto passes over images that have no labels of the training set's classes. UserError if
    validation or test images have a class that training lacks. verify: as that of `Files`.
    """
    named = {"train": train, "validation": validation, "test": test}
    rules.images_in_folder(root=root, **named, held_out=held_out, seed=seed, verify=verify)
    found = folders.splits(root, **named)
    trained = _files(found.train, verify=verify)
    if found.validation is None and found.test is None:
        trained, kept = hold_out(trained, fraction=held_out, seed=seed)
        told = f"{_short(found.train)} {len(trained):,} images to train on, {len(kept):,} others to measure on"
        return Data(trained, None, kept, trained.classes, f"{told} (data.held_out={held_out:g})")
    validated = found.validation and _files(found.validation, trained.classes, verify=verify)
    tested, reason = None, ""
    optional = test == folders.AUTO and validated
    try:
        tested = found.test and _files(found.test, trained.classes, verify=verify)
        if optional and tested and trained.classes and tested.labels is None:
            tested, reason = None, "its images have no labels"
    except UserError as error:
        if not optional:
            raise
        reason = str(error)
    choices, figure = ("for choices", "for the reported figure") if validated and tested else ("to measure on",) * 2
    told = [f"{_short(found.train)} {len(trained):,} images to train on"]
    for path, source, purpose in ((found.validation, validated, choices), (found.test, tested, figure)):
        if source is not None:
            told.append(f"{_short(path)} {len(source):,} {purpose}")
    if reason:
        told.append(f"{_short(found.test)} is not used: {reason}")
    return Data(trained, validated, tested, trained.classes, "; ".join(told))


def _short(path: str) -> str:
    return f"{os.path.basename(os.path.abspath(path))}/"


def imagenet(*, root: str, verify: str = "size") -> Data:
    """ImageNet in its usual layout: train/ and val/, in each a folder for every class, named by its wnid."""
    rules.imagenet(root=root, verify=verify)
    train = _files(os.path.join(root, "train"), verify=verify)
    if not train.classes:
        raise OptionError("root", root, "images lie in train/ itself, not in a folder for each class")
    validation = _files(os.path.join(root, "val"), train.classes, verify=verify)
    if validation.labels is None:
        raise OptionError("root", root, "images lie in val/ itself: sort them into a folder for each class (wnid)")
    return Data(train, validation, None, train.classes)


def torchvision_set(
    *,
    name: str,
    root: str,
    download: bool = False,
    split: str | None = None,
) -> Data:
    """A public data set as torchvision reads it: cifar10, cifar100, stl10, flowers102 or oxford_pets.

    Trains on all labelled images that are not the set's test images, or with split=unlabeled on STL-10's unlabelled
    ones. Measures on the test images. UserError if the files are absent or damaged.
    """
    rules.public_set(name=name, root=root, download=download, split=split)
    train_parts, test_part = _READERS[name]
    try:
        train = _torchvision(name, root, (split,) if split else train_parts, download)
        test = _torchvision(name, root, (test_part,), download)
    except ModuleNotFoundError as error:
        raise UserError(f"data.name={name}: reading it needs the package {error.name}") from None
    except (RuntimeError, OSError, EOFError) as error:
        if download:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise UserError(f"data.root={root}: {name} could not be fetched: {reason}") from None
        right = "give the folder that holds it, or set data.download=true to fetch it"
        raise UserError(f"data.root={root}: holds no whole {name}: {right}") from None
    return Data(train, None, test, train.classes)


def hold_out(source: Source, *, fraction: float, seed: int) -> tuple[Source, Source]:
    """Part a source into (train, held out): the `fraction` of the images whose hash of (seed, index) is least.

    At least one image goes to each part. OptionError unless 0 < fraction < 1, UserError for fewer than two images.
    """
    number("held_out", fraction, 0, above=True)
    if fraction >= 1:
        raise OptionError("held_out", fraction, "must be a fraction of the images, below 1")
    if len(source) < 2:
        raise UserError("one image cannot be parted into images to train on and images to hold out")
    order = uniform(seed, "held out", torch.arange(len(source)), 1)[:, 0].argsort()
    count = min(max(1, round(fraction * len(source))), len(source) - 1)
    return source.take(order[count:].sort().values), source.take(order[:count].sort().values)


def subset(source: Source, *, part: Sequence[float] = (0, 1), images: int | None = None, seed: int = 0) -> Source:
    """Fewer images of a source, in its order: those whose hash of (seed, index) lies in `part`, [from, to), and of
    them `images`, as many of each class as of any other as far as there are.

    Parts that do not overlap share no image. OptionError if there are not so many images, or none.
    """
    rules.subset(part=part, images=images, seed=seed)
    if tuple(part) == (0, 1) and images is None:
        return source
    hashes = uniform(seed, "subset", torch.arange(len(source)), 1)[:, 0]
    chosen = ((hashes >= part[0]) & (hashes < part[1])).nonzero()[:, 0]
    chosen = chosen[hashes[chosen].argsort()]
    if not len(chosen) or (images is not None and images > len(chosen)):
        name, value = ("part", list(part)) if images is None else ("images", images)
        raise OptionError(name, value, f"there are {len(chosen)} images to choose from")
    if images is not None and source.labels is not None:
        # The first image of each class, then the second of each, and so on.
        labels = source.labels[chosen]
        turn = torch.empty_like(labels)
        for label in labels.unique():
            of_class = labels == label
            turn[of_class] = torch.arange(int(of_class.sum()))
        chosen = chosen[turn.argsort(stable=True)]
    return source.take(chosen[:images].sort().values)


def _files(root: str, classes: Sequence[str] = (), *, verify: str) -> Files:
    """The images of a folder, labelled by `classes` where given, else by the names that it holds."""
    found = folders.list_images(root)
    paths = [path for path, _ in found]
    names = {name for _, name in found}
    if None in names:
        return Files(paths, verify=verify)
    classes = tuple(classes) or tuple(sorted(names))
    if unknown := names - set(classes):
        raise UserError(f"{root}: the class {min(unknown)} is not among the {len(classes)} that are trained on")
    label = {name: number for number, name in enumerate(classes)}
    return Files(paths, [label[name] for _, name in found], classes, verify=verify)


# The parts that make up the training set, and the part that is measured on, of each of rules.PUBLIC_SETS.
_READERS = {
    "cifar10": (("train",), "test"),
    "cifar100": (("train",), "test"),
    "stl10": (("train",), "test"),
    "flowers102": (("train", "val"), "test"),
    "oxford_pets": (("trainval",), "test"),
}


def _torchvision(name: str, root: str, parts: Sequence[str], download: bool) -> Source:
    from torchvision import datasets

    if name in ("cifar10", "cifar100"):
        reader = datasets.CIFAR10 if name == "cifar10" else datasets.CIFAR100
        found = reader(root, train=parts == ("train",), download=download)
        return Memory(torch.from_numpy(found.data).permute(0, 3, 1, 2), found.targets, found.classes)
    if name == "stl10":
        found = datasets.STL10(root, split=parts[0], download=download)
        images = torch.from_numpy(found.data)
        return Memory(images) if parts[0] == "unlabeled" else Memory(images, found.labels, found.classes)
    if name == "flowers102":
        found = [datasets.Flowers102(root, split=part, download=download) for part in parts]
        paths, labels = _joined(found, "_image_files"), _joined(found, "_labels")
        return Files(paths, labels, getattr(found[0], "classes", [f"flower {i}" for i in range(102)]))
    found = [datasets.OxfordIIITPet(root, split=part, download=download) for part in parts]
    return Files(_joined(found, "_images"), _joined(found, "_labels"), found[0].classes)


def _joined(sets: Sequence[Any], attribute: str) -> list[Any]:
    return [item for part in sets for item in getattr(part, attribute)]
