"""Sources of images, and the data set of a run: its training, validation and test images.

Letters: n images, b images of a batch, k classes, c channels, h, w pixels.
"""

import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from ssvit.data.sources import base_options as source_options
from ssvit.engine.randomness import uniform
from ssvit.errors import OptionError, UserError, printable

T = TypeVar("T")
_THREADS = 8  # that read masks
_AHEAD = 32  # images per thread that are read ahead
IGNORED = 255  # the class of ignored pixels of a mask
Labels = Tensor | np.ndarray | Sequence[int] | None  # labels as a caller passes them
Label = str | tuple[str, ...] | None  # the class of an image, or its classes if the set is multi-label


class Unreadable(UserError):
    """A file that is damaged or not an image."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(path, reason)
        self.path, self.reason = path, reason

    def __str__(self) -> str:
        return f"{printable(self.path)}: {printable(self.reason)}"


class Source(Protocol):
    """Images in a fixed order; a subclass implements `__len__` and `read`, and may override all other methods.

    Attributes:
        labels: (n,) int64, indices into `classes`; (n, k) bool for multi-label classification; or None.
        classes: Class names.
        mask_classes: Names of the classes of masks, in the order of their numbers; () if they are unknown.
        in_memory: All images as one tensor (n, c, h, w), uint8 or float32 in [0, 1], or None if they are read one by
            one.
    """

    labels: Tensor | None = None
    classes: tuple[str, ...] = ()
    mask_classes: tuple[str, ...] = ()
    in_memory: Tensor | None = None

    def __len__(self) -> int: ...

    def read(self, index: int) -> Tensor:
        """Return one image, (c, h, w) uint8 or float32 in [0, 1].

        Raises:
            Unreadable: The image is damaged; the caller replaces or skips it.
        """
        ...

    def values(self, index: int) -> np.ndarray:
        """Return the stored values of an image, (c, h, w) of any dtype.

        Raises:
            Unreadable: The image is damaged.
        """
        return self.read(index).numpy()

    def name(self, index: int) -> str:
        """Return the name of an image for messages: the path of a file."""
        return f"image {index}"

    def mask(self, index: int) -> Tensor | None:
        """Return the class of each pixel, (h, w) uint8, 255 for ignored pixels; None if the source has no masks."""
        return None

    def take(self, indices: Tensor) -> "Source":
        """Return the source of the images at `indices`, in that order."""
        return Selection(self, indices)

    @cached_property
    def fingerprint(self) -> str:
        """Return the sha256 of the shape and pixels of every image, in order; override it where reading is slow."""
        digest = hashlib.sha256()
        for index in range(len(self)):
            try:
                image = self.read(index)
                digest.update(str(tuple(image.shape)).encode())
                digest.update(image.contiguous().numpy().data)
            except Unreadable:
                digest.update(b"unreadable")
        return digest.hexdigest()

    @cached_property
    def contents(self) -> str:
        """Return a checksum of what `fingerprint` does not cover, "" if it covers the pixels."""
        return ""

    def content(self, index: int) -> str:
        """Return a checksum of the content of one image, "" if unknown."""
        return ""


class Selection(Source):
    """Select images of a source.

    Args:
        source: The source.
        indices: Their indices in the source, (n,) int64, in the order of the selection.
    """

    def __init__(self, source: Source, indices: Tensor) -> None:
        self.source, self.indices, self.classes = source, indices, source.classes
        self.mask_classes = source.mask_classes
        self.labels = None if source.labels is None else source.labels[indices]

    def __len__(self) -> int:
        return len(self.indices)

    def read(self, index: int) -> Tensor:
        """Return one image of the source."""
        return self.source.read(int(self.indices[index]))

    def values(self, index: int) -> np.ndarray:
        """Return the stored values of an image of the source."""
        return self.source.values(int(self.indices[index]))

    def name(self, index: int) -> str:
        """Return the name of an image in the source."""
        return self.source.name(int(self.indices[index]))

    def mask(self, index: int) -> Tensor | None:
        """Return the mask of an image of the source, or None."""
        return self.source.mask(int(self.indices[index]))

    @cached_property
    def fingerprint(self) -> str:
        """Return the sha256 of the fingerprint of the source and of the indices."""
        return hashlib.sha256(f"{self.source.fingerprint} {self.indices.tolist()}".encode()).hexdigest()

    @cached_property
    def contents(self) -> str:
        """Return the checksum of the contents of all images of the source."""
        return self.source.contents

    def content(self, index: int) -> str:
        """Return the checksum of the content of an image of the source."""
        return self.source.content(int(self.indices[index]))


@dataclass(frozen=True)
class Data:
    """Training images, validation images for choices, and test images for the reported figure.

    Attributes:
        train: Training images.
        validation: Validation images, or None: the test images then serve for both, under their name.
        test: Test images, or None: the validation images then serve for both, under their name.
        classes: Class names of the training set, empty if it is unlabelled.
        summary: A console line on the origin of each split.
        undivided: All images in their order, if test images were held out of them; else None.
    """

    train: Source
    validation: Source | None
    test: Source | None
    classes: tuple[str, ...]
    summary: str = ""
    undivided: Source | None = None

    @property
    def validation_or_test(self) -> Source:
        """Return the validation images, or else the test images, for metrics during training."""
        return self.test_or_validation[1] if self.validation is None else self.validation

    @property
    def test_or_validation(self) -> tuple[str, Source]:
        """Return name and images of the test split, or else of the validation split, for the reported figure."""
        name, source = ("validation", self.validation) if self.test is None else ("test", self.test)
        assert source is not None
        return name, source

    def for_development(self, development: float | str | None) -> "Data":
        """Return the data set without its test images, for the choice of options.

        If the reported figure comes from the validation images, a held-out fraction of the training images replaces
        them.

        Args:
            development: Fraction of the training images to hold out; "validation" keeps the validation images; None:
                the data set is returned as it is.

        Raises:
            OptionError: `development` is "validation" and there are no validation images.
        """
        if development is None:
            return self
        if self.validation is not None and (self.test is not None or development == source_options.VALIDATION):
            return replace(self, test=None)
        if isinstance(development, str):
            raise OptionError("development", development, source_options.NO_VALIDATION)
        train, validation = hold_out(self.train, fraction=development, seed=0)
        return replace(self, train=train, validation=validation, test=None)


def missing_labels(train: Source, **held_out: Source | None) -> str:
    """Return a message if images lack labels, which names the split if only held-out images lack them, or "".

    Args:
        train: Training images.
        **held_out: Validation and test images by the name of the split.
    """
    if train.labels is None:
        return source_options.NO_LABELS
    for name, source in held_out.items():
        if source is not None and source.labels is None:
            remedy = f"label them as the training images, or set data.{name}=null"
            return f"data.{name}: the {len(source):,} {name} images have no labels: {remedy}"
    return ""


def hold_out(source: Source, *, fraction: float, seed: int) -> tuple[Source, Source]:
    """Split a source into training and held-out images by a hash of (seed, index).

    The images with the smallest hashes are held out, except for the last image of each class: each class keeps an image
    for training, unless no image would be held out. Each part has at least one image.

    Args:
        source: Source to split.
        fraction: Fraction of the images to hold out, in (0, 1).
        seed: Seed of the hash.

    Returns:
        The training images and the held-out images.

    Raises:
        UserError: The source has fewer than two images.
    """
    if len(source) < 2:
        raise UserError("the data set has one image; holding out images requires at least two")
    order = uniform(seed, "held out", torch.arange(len(source)), 1)[:, 0].argsort()
    count = min(max(1, round(fraction * len(source))), len(source) - 1)
    held_out = torch.arange(len(source)) < count
    if source.labels is not None:
        labels = source.labels[order].flip(0).numpy()
        last = labels.argmax(0) if labels.ndim == 2 else np.unique(labels, return_index=True)[1]
        held_out[len(source) - 1 - torch.from_numpy(last)] = False
    if not held_out.any():
        held_out[:count] = True
    return source.take(order[~held_out].sort().values), source.take(order[held_out].sort().values)


def split_data(
    names: Sequence[str],
    train: Source,
    validation: Source | None = None,
    test: Source | None = None,
    *,
    held_out: float,
    seed: int,
    skipped: str = "",
) -> Data:
    """Return the data set of some splits; without validation and test images, training images are held out for testing.

    Args:
        names: Names of the training, validation and test splits, for messages.
        train: Training images.
        validation: Validation images, or None.
        test: Test images, or None.
        held_out: Fraction of the training images to hold out, see `hold_out`.
        seed: Seed of the choice of held-out images.
        skipped: Reason why existing test images are not used, "" if there is none.
    """
    if validation is None and test is None:
        part, rest = hold_out(train, fraction=held_out, seed=seed)
        line = f"{names[0]} {len(part):,} images for training, {len(rest):,} held out for testing"
        return Data(part, None, rest, part.classes, f"{line} (data.held_out={held_out:g})", train)
    purposes = ("for validation", "for testing") if validation and test else ("for evaluation",) * 2
    lines = [f"{names[0]} {len(train):,} images for training"]
    for name, source, purpose in zip(names[1:], (validation, test), purposes, strict=True):
        if source is not None:
            lines.append(f"{name} {len(source):,} {purpose}")
    if skipped:
        lines.append(f"{names[2]} is not used: {skipped}")
    return Data(train, validation, test, train.classes, "; ".join(lines))


def subset(
    source: Source,
    *,
    part: Sequence[float] = (0, 1),
    images: int | None = None,
    seed: int = 0,
    balanced: bool = True,
) -> Source:
    """Return a subset of a source, in its order; see `source_options.Subset`.

    Args:
        source: The source.
        part: Interval [from, to) of hashes in [0, 1) of the images to take.
        images: Number of images; None for all in the interval.
        seed: Seed of the hash.
        balanced: Whether as many images of each class are taken, as far as possible, instead of a random sample.

    Raises:
        OptionError: There are fewer images than requested, or none.
    """
    low, high = part
    if (low, high) == (0, 1) and images is None:
        return source
    hashes = uniform(seed, "subset", torch.arange(len(source)), 1)[:, 0]
    chosen = ((hashes >= low) & (hashes < high)).nonzero()[:, 0]
    chosen = chosen[hashes[chosen].argsort()]
    if len(chosen) < (images or 1):
        name, value = ("part", [low, high]) if images is None else ("images", images)
        raise OptionError(name, value, f"must be at most {len(chosen)}, the number of images")
    if balanced and images is not None and source.labels is not None:
        # Take the first image of each class, then the second of each, and so on. A multi-label image is taken at the
        # first turn of any of its classes; images without a class count as one more class.
        labels = source.labels[chosen]
        turn = torch.full((len(labels),), len(labels))
        for of_class in members(labels):
            turn[of_class] = turn[of_class].minimum(torch.arange(int(of_class.sum())))
        chosen = chosen[turn.argsort(stable=True)]
    return source.take(chosen[:images].sort().values)


def reduced(train: Source, test: Source, train_images: int | None, test_images: int | None) -> tuple[Source, Source]:
    """Return training and held-out images of at most these numbers; None: all.

    Training images are balanced over the classes. Held-out images are a random sample, so that accuracies apply to all
    of them.
    """
    if train_images is not None:
        train = subset(train, images=min(train_images, len(train)))
    if test_images is not None:
        test = subset(test, images=min(test_images, len(test)), balanced=False)
    return train, test


def masks(source: Source, transform: Callable[[Tensor], Tensor], indices: Tensor) -> Tensor:
    """Return the masks of some images, transformed like the images in evaluation.

    Args:
        source: Source of the masks.
        transform: Transforms one mask, (h, w) uint8: the method `mask` of the transform of the images.
        indices: (b,) int64.

    Returns:
        (b, h, w) uint8.

    Raises:
        UserError: An image has no mask, or its mask is unreadable.
    """
    transformed = []
    for index in indices.tolist():
        mask = source.mask(index)
        if mask is None:
            raise UserError(f"{source.name(index)} {source_options.NO_MASKS}")
        transformed.append(transform(mask))
    return torch.stack(transformed)


def count_pixels(source: Source) -> Tensor:
    """Return the number of pixels of each class over all masks of a source, (256,) int64; errors as for `masks`."""

    def count(index: int) -> Tensor:
        return masks(source, lambda mask: mask.flatten().bincount(minlength=256), torch.tensor([index]))[0]

    counts = torch.zeros(256, dtype=torch.int64)
    for _, of_image in read_ahead(count, range(len(source)), _THREADS):
        counts += of_image
    return counts


def read_ahead(read: Callable[[int], T], indices: range, workers: int) -> Iterator[tuple[int, T]]:
    """Yield each index with what a function returns for it, in order, while a pool of threads calls the function."""
    begun: deque[tuple[int, Future[T]]] = deque()
    with ThreadPoolExecutor(workers) as pool:
        for index in indices:
            begun.append((index, pool.submit(read, index)))
            if len(begun) > _AHEAD * workers:
                first, result = begun.popleft()
                yield first, result.result()
        for index, result in begun:
            yield index, result.result()


def number_labels(
    labels: Sequence[Label], classes: Sequence[str] = (), *, source: str, numeric: bool = False
) -> tuple[Tensor | None, tuple[str, ...]]:
    """Number the classes of images.

    Args:
        labels: Class of each image, or a tuple of classes if the set is multi-label.
        classes: All class names in order; () for the sorted names that occur.
        source: Name of the data set for the message.
        numeric: Whether to sort class names by number if all are decimal numbers.

    Returns:
        Labels (n,) int64, or (n, k) bool if the set is multi-label, and class names; None and () if an image has no
        class, or there are no classes.

    Raises:
        UserError: The class of an image is not among `classes`.
    """
    by_image = [label if isinstance(label, tuple) else (label,) for label in labels if label is not None]
    names = set(chain(*by_image))
    if len(by_image) < len(labels) or not (names or classes):
        return None, ()
    are_numbers = numeric and all(name.isdecimal() for name in names)
    classes = tuple(classes) or tuple(sorted(names, key=lambda name: (int(name) if are_numbers else 0, name)))
    number = {name: index for index, name in enumerate(classes)}
    if unknown := names - number.keys():
        reason = f"is not among the {len(classes)} classes of the training images"
        raise UserError(f"{source}: the class {printable(min(unknown))} {reason}")
    if not any(isinstance(label, tuple) for label in labels):
        return torch.tensor([number[name] for (name,) in by_image]), classes
    table = torch.zeros(len(labels), len(classes), dtype=torch.bool)
    for row, of_image in zip(table, by_image, strict=True):
        row[[number[name] for name in of_image]] = True
    return table, classes


def note_on_missing(labels: Sequence[Label], name: Callable[[int], str]) -> str:
    """Return a sentence on labels that `number_labels` does not use since some images have no class, or "".

    Args:
        labels: As in `number_labels`.
        name: Returns the name of an image.
    """
    missing = [index for index, label in enumerate(labels) if label is None]
    if len(missing) in (0, len(labels)):
        return ""
    share = f"{len(missing):,} of {len(labels):,} images"
    return f"the labels are not used, since {share} have none, such as {printable(name(missing[0]))}"


def is_multi_label(labels: Tensor) -> bool:
    """Return whether labels are multi-label, (n, k) bool, instead of (n,) int64."""
    return labels.ndim == 2


def members(labels: Tensor) -> Iterator[Tensor]:
    """Yield the members of each class that has any as a mask (n,) bool; for multi-label also those without a class."""
    if is_multi_label(labels):
        yield from (column for column in (*labels.T, ~labels.any(1)) if column.any())
    else:
        yield from (labels == label for label in labels.unique())


def class_text(label: Tensor, classes: Sequence[str], separator: str = "|") -> str:
    """Return the class name of a label, () int64, or the joined class names of a multi-label one, (k,) bool."""
    numbers = label.nonzero()[:, 0] if label.ndim else label[None]
    return separator.join(classes[number] for number in numbers)


def caption(source: Source, index: int) -> str:
    """Return the class of an image, or its file name if there are no labels."""
    return Path(source.name(index)).name if source.labels is None else class_text(source.labels[index], source.classes)


def checked_labels(labels: Labels, count: int, classes: Sequence[str]) -> Tensor | None:
    """Validate labels and return them as (n,) int64 or, if they are bool, as (n, k) bool; None stays None.

    Args:
        labels: The labels, or None.
        count: Number of images n.
        classes: Class names.

    Raises:
        UserError: The number of labels differs from the number of images, or a label is out of range.
    """
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
