"""Images in data sets of the library `datasets` (Hugging Face), from disk or from its cache.

Its tables are memory-mapped files with random access to rows, so a batch is a function of the step.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain
from typing import Any

import datasets
import numpy as np

from ssvit.data.sources import datasets_options, decode
from ssvit.data.sources.base import Data, Label, Labels, Unreadable, note_on_missing, number_labels
from ssvit.data.sources.datasets import read_splits
from ssvit.data.sources.decode_options import RGB, PixelFormat
from ssvit.data.sources.files import Encoded, checksum, checksum_of, size_of
from ssvit.data.sources.splits import AUTO, Items, Splits, resolve, spellings
from ssvit.errors import OptionError, UserError, printable

_FILES = ("string", "large_string", "binary", "large_binary")
_CLASSES = ("string", "large_string", "bool", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)))


class HubImages(Encoded):
    """The images of a column of a `datasets.Dataset`.

    Args:
        dataset: The data set.
        image: Name of the column.
        labels: (n,) class indices, (n, k) bool, or None.
        classes: Class names.
        called: Name of the data set in messages.
        pixels: Pixel format of the images.

    Raises:
        UserError: A label is out of range.
    """

    def __init__(
        self,
        dataset: Any,
        image: str,
        labels: Labels = None,
        classes: Sequence[str] = (),
        *,
        called: str,
        pixels: PixelFormat = RGB,
    ) -> None:
        super().__init__(len(dataset), labels, classes, pixels)
        self.dataset = dataset.select_columns([image]).cast_column(image, datasets.Image(decode=False))
        self.image, self.called = image, called

    def __len__(self) -> int:
        return len(self.dataset)

    def file(self, index: int) -> decode.Bytes:
        """Return the bytes of an image's file, from the table or from the path in it, (bytes,) uint8."""
        image = self.dataset[index][self.image] or {"bytes": None, "path": None}
        if image["bytes"] is not None:
            return np.frombuffer(bytearray(image["bytes"]), np.uint8)
        path = image["path"]
        if not os.path.isfile(path or ""):
            raise Unreadable(self.name(index), f"there is no file {path}" if path else "the row has no image")
        return decode.read_file(path)

    def name(self, index: int) -> str:
        """Return the name of the data set and the row."""
        return f"{self.called}/{index}"

    def content(self, index: int) -> str:
        """Return the checksum of an image's file, of which large ones in the table are not read completely."""
        import pyarrow

        image = self.dataset.data.column(self.image)[index]
        data = image["bytes"].as_buffer() if image.is_valid else None
        return checksum(pyarrow.BufferReader(data)) if data else checksum_of(str(image and image["path"]))

    @cached_property
    def fingerprint(self) -> str:
        """Return the sha256 of the labels and of the sizes of the images."""
        labels = None if self.labels is None else self.labels.tolist()
        digest = hashlib.sha256(json.dumps([len(self), self.classes, labels]).encode())
        for size in self._sizes():
            digest.update(b"%d " % size)
        return digest.hexdigest()

    def _sizes(self) -> Iterator[int]:
        """Yield the size of each image's file in bytes, -1 if it does not exist, without reading images."""
        import pyarrow.compute as arrow

        for chunk in self.dataset.data.column(self.image).chunks:
            lengths = arrow.binary_length(arrow.struct_field(chunk, "bytes")).to_pylist()
            for length, path in zip(lengths, arrow.struct_field(chunk, "path").to_pylist(), strict=True):
                yield size_of(path or "") if length is None else length


def hugging_face(options: datasets_options.HuggingFace) -> Data:
    """Build a data set of the library `datasets`.

    Raises:
        UserError: The data set cannot be read, or lacks a column or a split.
    """
    parts = _loaded(options)
    splits = _splits(options, parts)
    image, label = _columns(options, parts[splits.train[0]].features)

    def read(names: Items, classes: Sequence[str]) -> HubImages:
        (name,) = names
        dataset, called = parts[name], f"{options.root}/{name}".rstrip("/")
        if missing := {image, label} - {None, *dataset.column_names}:
            raise UserError(f"{called}: has no column {min(map(str, missing))}, and {splits.train[0]} has")
        labels, order = _labels(dataset, label)
        numbers = number_labels(labels, classes or order, source=called)
        source = HubImages(dataset, image, *numbers, called=called, pixels=options.pixels)
        source.note = note_on_missing(labels, source.name)
        return source

    names = [", ".join(names) or os.path.basename(os.path.normpath(options.root)) for names in splits]
    unused = parts.keys() - {*chain(*splits)}
    return read_splits(options, splits, [f"{name}:" for name in names], read, unused=unused)


def _splits(options: datasets_options.HuggingFace, parts: Mapping[str, Any]) -> Splits:
    """Resolve the options of the splits among the splits of the data set."""

    def find(name: str) -> Items:
        return spellings(name, parts)[:1]

    def rest(held_out: Items) -> Items:
        others = tuple(name for name in parts if name not in held_out)
        return others if len(others) == 1 else ()

    existing = ", ".join(map(printable, filter(None, parts))) or "none"
    return resolve(options.names, find, rest, expected=f"a split of {options.root}, which has {existing}")


def _columns(options: datasets_options.HuggingFace, features: Mapping[str, Any]) -> tuple[str, str | None]:
    """Return the names of the columns of images and of labels.

    auto selects the only column of images; for labels, the column `label` or the only column of classes. A column of
    lists of classes has to be named.

    Args:
        options: Options of the data set.
        features: Features of the columns, by name.

    Raises:
        OptionError: A column does not exist, or the column of labels does not contain classes.
    """
    image, label = options.image, options.label
    columns = f"{options.root}, which has {printable(', '.join(features))}"
    if image == AUTO:
        images = [name for name, feature in features.items() if isinstance(feature, datasets.Image)]
        if len(images) != 1:
            raise OptionError("image", image, f"must name the column of images of {columns}")
        image = images[0]
    if label == AUTO:
        classes = [name for name, feature in features.items() if isinstance(feature, datasets.ClassLabel)]
        is_named = "label" in features and _is_class(features["label"])
        label = "label" if is_named else classes[0] if len(classes) == 1 else None
    for option, name in (("image", image), ("label", label)):
        if name is not None and name not in features:
            raise OptionError(option, name, f"must be a column of {columns}")
    if not isinstance(features[image], datasets.Image) and getattr(features[image], "dtype", "") not in _FILES:
        raise OptionError("image", image, "must be a column of images, or of the paths or contents of their files")
    if label is not None and not _is_class(_element(features[label]) or features[label]):
        raise OptionError("label", label, "must be a column of classes, names or whole numbers, or of lists of them")
    return image, label


def _element(feature: object) -> Any:
    """Return the feature of the elements of a list column; None for a column without lists."""
    if isinstance(feature, list):  # the form of some lists in version 3 of the library
        return feature[0]
    return getattr(feature, "feature", None)


def _is_class(feature: object) -> bool:
    return isinstance(feature, datasets.ClassLabel | datasets.Value) and feature.dtype in _CLASSES


def _loaded(options: datasets_options.HuggingFace) -> dict[str, Any]:
    """Return the splits of a data set by name, "" for a single one.

    Raises:
        UserError: The data set cannot be read.
    """
    offline = datasets.config.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = offline or not options.download
    try:
        if options.is_saved:
            dataset = datasets.load_from_disk(options.root)
        else:
            dataset = datasets.load_dataset(options.root, options.config)
    except Exception as error:  # pyarrow, the hub and the library raise different exceptions
        reason = printable((str(error).splitlines() or [type(error).__name__])[0])
        remedy = "" if options.download else " (data.download=true fetches one from the Hub)"
        raise UserError(f"data.root={options.root}: the data set cannot be read: {reason}{remedy}") from None
    finally:
        datasets.config.HF_HUB_OFFLINE = offline
    return dict(dataset) if isinstance(dataset, datasets.DatasetDict) else {"": dataset}


def _labels(dataset: Any, label: str | None) -> tuple[list[Label], tuple[str, ...]]:
    """Return the class of each row, or its classes in a column of lists, and the class names of the data set in order.

    Args:
        dataset: The data set.
        label: Name of the column of labels, or None.
    """
    if label is None:
        return [None] * len(dataset), ()
    feature, values = dataset.features[label], dataset.data.column(label).to_pylist()
    of_list = _element(feature)
    names = getattr(of_list or feature, "names", None)
    rows = values if of_list else [(value,) for value in values]
    known = [
        None if row is None or any(value is None or (names and value < 0) for value in row) else row for row in rows
    ]
    order = tuple(names or map(str, sorted(set(chain(*filter(None, known))))))
    text = names.__getitem__ if names else str
    if of_list:
        return [None if row is None else tuple(map(text, row)) for row in known], order
    return [None if row is None else text(row[0]) for row in known], order
