"""Images in data sets of the library `datasets` (Hugging Face), from disk or from its cache.

Its tables are memory-mapped files with random access to rows, so a batch is a function of the step.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np

from ssvit.data import decode
from ssvit.data.decode_options import RGB, PixelFormat
from ssvit.data.sources import huggingface_options
from ssvit.data.sources.base import Data, Labels, Unreadable, checked_labels, number_labels
from ssvit.data.sources.datasets import of_splits
from ssvit.data.sources.files import Encoded, size_of
from ssvit.data.sources.huggingface_options import element
from ssvit.data.sources.splits import Items
from ssvit.options import UserError, printable


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
        import datasets

        super().__init__(pixels)
        self.dataset = dataset.select_columns([image]).cast_column(image, datasets.Image(decode=False))
        self.image, self.called = image, called
        self.labels = checked_labels(labels, len(dataset), classes)
        self.classes = tuple(classes)

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


def hugging_face(options: huggingface_options.HuggingFace) -> Data:
    """Build a data set of the library `datasets`.

    Raises:
        UserError: The data set cannot be read.
    """
    found = _loaded(options)
    splits = options.splits_of(found)
    image, label = options.columns_of(found[splits.train[0]].features.to_dict())

    def read(names: Items, classes: Sequence[str]) -> HubImages:
        (name,) = names
        called = f"{options.root}/{name}".rstrip("/")
        if missing := {image, label} - {None, *found[name].column_names}:
            raise UserError(f"{called}: has no column {min(map(str, missing))}, and {splits.train[0]} has")
        labels, own = _labels(found[name], label, classes, called)
        return HubImages(found[name], image, labels, own, called=called, pixels=options.pixels)

    names = [", ".join(names) or os.path.basename(os.path.normpath(options.root)) for names in splits]
    return of_splits(options, splits, [f"{name}:" for name in names], read)


def _loaded(chosen: huggingface_options.HuggingFace) -> dict[str, Any]:
    """Return the splits of a data set by name, "" for a single one.

    Raises:
        UserError: The data set cannot be read.
    """
    import datasets

    offline = datasets.config.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = offline or not chosen.download
    try:
        if chosen.described is None:
            found = datasets.load_dataset(chosen.root, chosen.config)
        else:
            found = datasets.load_from_disk(chosen.root)
    except Exception as error:  # pyarrow, the hub and the library raise different exceptions
        reason = printable((str(error).splitlines() or [type(error).__name__])[0])
        raise UserError(f"data.root={chosen.root}: the data set cannot be read: {reason}") from None
    finally:
        datasets.config.HF_HUB_OFFLINE = offline
    return dict(found) if isinstance(found, datasets.DatasetDict) else {"": found}


def _labels(dataset: Any, label: str | None, classes: Sequence[str], called: str) -> tuple[Labels, tuple[str, ...]]:
    """Return the labels of a data set and its class names; None and () if a row has no label.

    The shape is (n,), or (n, k) bool for a column of lists; an empty list means an image without a class.

    Args:
        dataset: The data set.
        label: Name of the column of labels, or None.
        classes: Class names that the labels index; () takes the classes of the data set.
        called: Name of the data set in messages.

    Raises:
        UserError: A class is not among `classes`.
    """
    if label is None:
        return None, ()
    feature, values = dataset.features.to_dict()[label], dataset.data.column(label).to_pylist()
    of_list = element(feature)
    names = (of_list or feature).get("names")
    rows = values if of_list else [(value,) for value in values]
    if any(row is None or any(one is None or (names and one < 0) for one in row) for row in rows):
        return None, ()
    order = tuple(classes or names or map(str, sorted(set(chain(*rows)))))
    text = names.__getitem__ if names else str
    by_image = [tuple(map(text, row)) for row in rows]
    return number_labels(by_image if of_list else [label for (label,) in by_image], order, source=called)
