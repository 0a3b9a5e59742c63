"""Sources of images, and what a run trains on and is measured on. Letters: n images, c channels, h, w pixels."""

import hashlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, chain
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ssvit.data.batch import EvalTransform
from ssvit.data.sources import base_options as source_options
from ssvit.options import OptionError, UserError, number, printable
from ssvit.randomness import uniform

IGNORED = 255  # the class of a mask's pixels that do not count
Reduce = Callable[[int, int], int]  # height, width -> by what their JPEG may be smaller when it is decoded: 1, 2, 4, 8
Labels = Tensor | np.ndarray | Sequence[int] | None  # as they are given


class Unreadable(UserError):
    """A file that is no image, or a damaged one."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(path, reason)
        self.path, self.reason = path, reason

    def __str__(self) -> str:
        return f"{printable(self.path)}: {printable(self.reason)}"


class Source(Protocol):
    """Images in a fixed order. A subclass needs `__len__` and `read`, and may replace the rest.

    labels: (n,) int64 into `classes`; (n, k) bool where an image may have several of them; or None. in_memory: all
    images as one tensor (n, c, h, w) uint8, or None where they are read one by one. bytes_per_pixel: of an image as it
    is read.
    """

    labels: Tensor | None = None
    classes: tuple[str, ...] = ()
    in_memory: Tensor | None = None
    bytes_per_pixel: int = 3

    def __len__(self) -> int: ...

    def read(self, index: int) -> Tensor:
        """One image, (c, h, w) uint8 or float32 in [0, 1]. `Unreadable` if it is damaged: another takes its place."""
        ...

    def read_smaller(self, index: int, reduce: Reduce) -> Tensor:
        """The same, decoded smaller where `reduce` allows and the file's format can."""
        return self.read(index)

    def values(self, index: int) -> np.ndarray:
        """The numbers of an image as its file has them, (c, h, w) of any type. `Unreadable` as above."""
        return self.read(index).numpy()

    def prefetch(self, indices: Sequence[int]) -> None:
        """Told of the images that are read next, for what is faster together, as requests to an object store."""
        return

    def name(self, index: int) -> str:
        """What to call an image: the path of a file."""
        return f"image {index}"

    def mask(self, index: int) -> Tensor | None:
        """The class of each pixel of an image, (h, w) uint8, 255 for those that do not count; None without masks."""
        return None

    def take(self, indices: Tensor) -> "Source":
        """The source of the images at `indices`, in that order."""
        return Part(self, indices)

    @cached_property
    def fingerprint(self) -> str:
        """sha256 of every image's shape and pixels, in order. Replace it where reading is slow."""
        digest = hashlib.sha256()
        for index in range(len(self)):
            try:
                image = self.read(index)
                digest.update(str(tuple(image.shape)).encode())
                digest.update(image.contiguous().numpy().data)
            except Unreadable:
                digest.update(b"unreadable")
        return digest.hexdigest()


def median_side(source: Source, images: int = 9) -> int:
    """Return the median of the shorter sides, in pixels, of some images that are evenly spaced in a source.

    Unreadable images do not count. The result is 0 if all are.
    """
    sides, count = [], min(images, len(source))
    for place in range(count):
        with suppress(Unreadable):
            sides.append(min(source.read(place * len(source) // count).shape[-2:]))
    return sorted(sides)[len(sides) // 2] if sides else 0


class _Derived(Source):
    """Images of other sources."""

    def place(self, index: int) -> tuple[Source, int]:
        """Return the source of an image, and its index there."""
        raise NotImplementedError

    def read(self, index: int) -> Tensor:
        source, place = self.place(index)
        return source.read(place)

    def read_smaller(self, index: int, reduce: Reduce) -> Tensor:
        source, place = self.place(index)
        return source.read_smaller(place, reduce)

    def values(self, index: int) -> np.ndarray:
        source, place = self.place(index)
        return source.values(place)

    def name(self, index: int) -> str:
        source, place = self.place(index)
        return source.name(place)

    def mask(self, index: int) -> Tensor | None:
        source, place = self.place(index)
        return source.mask(place)


class Part(_Derived):
    """Some images of a source, in the order of `indices` (n,)."""

    def __init__(self, whole: Source, indices: Tensor) -> None:
        self.whole, self.indices = whole, indices
        self.classes, self.bytes_per_pixel = whole.classes, whole.bytes_per_pixel
        self.labels = None if whole.labels is None else whole.labels[indices]

    def __len__(self) -> int:
        return len(self.indices)

    def place(self, index: int) -> tuple[Source, int]:
        return self.whole, int(self.indices[index])

    def prefetch(self, indices: Sequence[int]) -> None:
        self.whole.prefetch([int(self.indices[index]) for index in indices])

    @cached_property
    def fingerprint(self) -> str:
        return hashlib.sha256(f"{self.whole.fingerprint} {self.indices.tolist()}".encode()).hexdigest()


class Joined(_Derived):
    """Several sources, one after the other. Classes of one name are one; without labels if a source has none."""

    def __init__(self, parts: Sequence[Source]) -> None:
        self.parts, self.ends = parts, list(accumulate(map(len, parts)))
        self.bytes_per_pixel = max(part.bytes_per_pixel for part in parts)
        labels = [part.labels for part in parts if part.labels is not None]
        if len(labels) == len(parts):
            every = [part.classes for part in parts]
            # Sources of the same classes keep their order.
            self.classes = every[0] if len(set(every)) == 1 else tuple(sorted(set(chain(*every))))
            places = [[self.classes.index(name) for name in classes] for classes in every]
            k = len(self.classes)
            self.labels = torch.cat([renumbered(own, place, k) for place, own in zip(places, labels, strict=True)])

    def __len__(self) -> int:
        return self.ends[-1]

    def place(self, index: int) -> tuple[Source, int]:
        number = bisect_right(self.ends, index)
        return self.parts[number], index - (self.ends[number - 1] if number else 0)

    @cached_property
    def fingerprint(self) -> str:
        return hashlib.sha256(" ".join(part.fingerprint for part in self.parts).encode()).hexdigest()


def joined(parts: Sequence[Source]) -> Source:
    """Several sources as one; a single one as it is."""
    return parts[0] if len(parts) == 1 else Joined(parts)


@dataclass(frozen=True)
class Data:
    """Images to train on, validation images for choices, and test images for the reported figure.

    Either validation or test may be None; the other then serves for both, under its own name. classes: the names of the
    training set's classes, none if unlabelled. told: which folder serves what, a line for people.
    """

    train: Source
    validation: Source | None
    test: Source | None
    classes: tuple[str, ...]
    told: str = ""

    @property
    def watched(self) -> Source:
        """What to measure on while training goes on."""
        return self.reported[1] if self.validation is None else self.validation

    @property
    def reported(self) -> tuple[str, Source]:
        """What the reported figure is measured on: its name, test or validation, and the images."""
        name, source = ("validation", self.validation) if self.test is None else ("test", self.test)
        assert source is not None
        return name, source

    def without_test(self, development: float | str) -> "Data":
        """The same without test images, to choose options by.

        If the validation images are what is reported on, the fraction `development` of the training images takes their
        place; development=validation uses them all the same. OptionError if there are none.
        """
        if self.validation is not None and (self.test is not None or development == source_options.VALIDATION):
            return replace(self, test=None)
        if isinstance(development, str):
            raise OptionError("development", development, source_options.NO_VALIDATION)
        train, validation = hold_out(self.train, fraction=development, seed=0)
        return replace(self, train=train, validation=validation, test=None)


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


def parted(
    names: Sequence[str],
    train: Source,
    validation: Source | None = None,
    test: Source | None = None,
    *,
    held_out: float,
    seed: int,
    skipped: str = "",
) -> Data:
    """Return a data set of its splits; of training images alone, some are held out. Errors as `hold_out`.

    Args:
        names: The name of each split, for messages.
        skipped: Why the test images are not used.
    """
    if validation is None and test is None:
        part, rest = hold_out(train, fraction=held_out, seed=seed)
        line = f"{names[0]} {len(part):,} images to train on, {len(rest):,} others to measure on"
        return Data(part, None, rest, part.classes, f"{line} (data.held_out={held_out:g})")
    purposes = ("for choices", "for the reported figure") if validation and test else ("to measure on",) * 2
    lines = [f"{names[0]} {len(train):,} images to train on"]
    for name, source, purpose in zip(names[1:], (validation, test), purposes, strict=True):
        if source is not None:
            lines.append(f"{name} {len(source):,} {purpose}")
    if skipped:
        lines.append(f"{names[2]} is not used: {skipped}")
    return Data(train, validation, test, train.classes, "; ".join(lines))


def subset(source: Source, *, part: Sequence[float] = (0, 1), images: int | None = None, seed: int = 0) -> Source:
    """Fewer images of a source, in its order: see `source_options.Subset`.

    OptionError if there are not so many, or none.
    """
    low, high = part
    if (low, high) == (0, 1) and images is None:
        return source
    hashes = uniform(seed, "subset", torch.arange(len(source)), 1)[:, 0]
    chosen = ((hashes >= low) & (hashes < high)).nonzero()[:, 0]
    chosen = chosen[hashes[chosen].argsort()]
    if len(chosen) < (images or 1):
        name, value = ("part", [low, high]) if images is None else ("images", images)
        raise OptionError(name, value, f"there are {len(chosen)} images to choose from")
    if images is not None and source.labels is not None:
        # The first image of each class, then the second of each, and so on. One of several classes comes when the first
        # of them is due; those of no class are one more.
        labels = source.labels[chosen]
        turn = torch.full((len(labels),), len(labels))
        for of_class in members(labels):
            turn[of_class] = turn[of_class].minimum(torch.arange(int(of_class.sum())))
        chosen = chosen[turn.argsort(stable=True)]
    return source.take(chosen[:images].sort().values)


def masks(source: Source, transform: EvalTransform, indices: Tensor) -> Tensor:
    """The masks of some images as evaluation shows these: indices (b,) -> (b, h, w) uint8.

    transform: that of the images, with a method `mask`. UserError if an image has no mask, or an unreadable one.
    """
    found = []
    for index in indices.tolist():
        mask = source.mask(index)
        if mask is None:
            right = "give data.masks=PATH, a folder of PNGs, or data=synthetic"
            raise UserError(f"{source.name(index)} has no mask, which segmentation needs: {right}")
        found.append(transform.mask(mask))
    return torch.stack(found)


def class_numbers(names: Iterable[str], classes: Sequence[str], *, called: str) -> dict[str, int]:
    """The number of each class. UserError, of what is called so, if one of `names` is not among the classes."""
    number = {name: place for place, name in enumerate(classes)}
    if unknown := set(names) - number.keys():
        wrong = f"the class {printable(min(unknown))} is not among the {len(classes)} that are trained on"
        raise UserError(f"{called}: {wrong}")
    return number


def is_multi_label(labels: Tensor) -> bool:
    """Whether labels are (n, k) bool, of images that may have several of the classes, and not (n,) int64."""
    return labels.ndim == 2


def members(labels: Tensor) -> Iterator[Tensor]:
    """Which images are of each class that has some, (n,) bool, and, where they may have several, which are of none."""
    if is_multi_label(labels):
        yield from (column for column in (*labels.T, ~labels.any(1)) if column.any())
    else:
        yield from (labels == label for label in labels.unique())


def class_text(label: Tensor, classes: Sequence[str]) -> str:
    """The class of an image, () int64, or its classes, (k,) bool, joined by |."""
    numbers = label.nonzero()[:, 0] if label.ndim else label[None]
    return "|".join(classes[number] for number in numbers)


def renumbered(labels: Tensor, numbers: Sequence[int], classes: int) -> Tensor:
    """Labels by other numbers of the classes: class i becomes number `numbers[i]` of so many."""
    if not is_multi_label(labels):
        return torch.tensor(numbers)[labels]
    found = labels.new_zeros(len(labels), classes)
    found[:, list(numbers)] = labels
    return found


def checked_labels(labels: Labels, count: int, classes: Sequence[str]) -> Tensor | None:
    if labels is None:
        return None
    if isinstance(labels, Tensor) and labels.dtype == torch.bool:
        if labels.shape != (count, len(classes)):
            raise UserError(f"labels {tuple(labels.shape)} for {count} images and {len(classes)} classes")
        return labels
    numbers = torch.as_tensor(labels, dtype=torch.int64)
    if numbers.shape != (count,):
        raise UserError(f"{len(numbers)} labels for {count} images")
    wrong = numbers[(numbers < 0) | (numbers >= len(classes))]
    if len(wrong):
        raise UserError(f"label {wrong[0].item()} is outside of [0, {len(classes)}), the range of the classes")
    return numbers
