"""Images in shards (uncompressed tar files in the layout of WebDataset), read at random offsets.

Consecutive files of a shard with the same key form a sample: an image (a/1.jpg) and optionally its class (a/1.cls, or
a/1.json with "cls", "label", "class" or "class_name"), which may also be elsewhere in the shard. Readers that stream
shards shuffle within a buffer; here an image is read at its offset, so a batch remains a function of the step. The
offsets are in the index that `ssvit pack` writes next to each shard; the headers of other shards are read at each
start.

Letters: n images.
"""

import json
import os
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, groupby
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np
from torch import Tensor
from tqdm import tqdm

from ssvit.data.sources import decode
from ssvit.data.sources.base import Label, Labels, is_multi_label, note_on_missing, number_labels
from ssvit.data.sources.decode_options import RGB, PixelFormat
from ssvit.data.sources.files import Encoded, checksum_of, digest_of
from ssvit.data.sources.folder import IMAGE_SUFFIXES, NPY
from ssvit.data.sources.shard_folder import INDEX, ending
from ssvit.engine import atomic_io
from ssvit.errors import UserError, printable

SCHEMA = 2
_CLASS_KEYS, _SEVERAL = ("cls", "label", "class", "class_name"), "labels"
_LARGEST = 1 << 20  # maximum size in bytes of a member with a class


class Row(NamedTuple):
    """An image in a shard: its name, the offset and size of its file in bytes, and its class or classes."""

    name: str
    offset: int
    size: int
    label: Label


@dataclass(frozen=True)
class Index:
    """The index of a shard, as `ssvit pack` writes it.

    Attributes:
        images: The images in their order.
        classes: Class names in the order of the labels.
        size: Size of the shard in bytes.
        plan: Data set and options of the command.
        next: Position in the data set of the first image after the shard.
    """

    images: Sequence[Row]
    classes: Sequence[str] = ()
    size: int = 0
    plan: str = ""
    next: int = 0


class Shards(Encoded):
    """The images of some shards.

    Args:
        shards: Paths of the shards, in the order of their numbers.
        names: Name of each image in its shard, (n,) bytes.
        locations: Number of each image's shard, and offset and size of its file in bytes, (n, 3) int64. Arrays are
            shared by worker processes, which would copy lists.
        labels: (n,) class indices, (n, k) bool, or None.
        classes: Class names.
        pixels: Pixel format of the images.

    Raises:
        UserError: A label is out of range.
    """

    def __init__(
        self,
        shards: Sequence[str],
        names: np.ndarray,
        locations: np.ndarray,
        labels: Labels = None,
        classes: Sequence[str] = (),
        *,
        pixels: PixelFormat = RGB,
    ) -> None:
        super().__init__(len(names), labels, classes, pixels)
        self.shards, self.names, self.locations = tuple(shards), names, locations

    def __len__(self) -> int:
        return len(self.names)

    def file(self, index: int) -> decode.Bytes:
        """Return the bytes of an image's file, (bytes,) uint8.

        Raises:
            Unreadable: The shard does not exist or is truncated before the image.
        """
        shard, offset, size = self.locations[index].tolist()
        return decode.read_part(self.shards[shard], offset, size, self.name(index))

    def inner_name(self, index: int) -> str:
        """Return the name of an image in its shard."""
        return os.fsdecode(self.names[index])

    def name(self, index: int) -> str:
        """Return the path of the shard and the name of an image in it."""
        return f"{self.shards[self.locations[index, 0]]}/{self.inner_name(index)}"

    def content(self, index: int) -> str:
        """Return the checksum of an image's file in its shard."""
        shard, offset, size = self.locations[index].tolist()
        return checksum_of(self.shards[shard], offset, size)

    @cached_property
    def fingerprint(self) -> str:
        """Return the sha256 of names, sizes, and labels that names do not contain; shards and offsets do not count."""
        names = [*map(self.inner_name, range(len(self)))]
        digest, labels = digest_of(names, self.locations[:, 2].tolist()), self.labels
        if labels is not None and not is_multi_label(labels):
            classes = (self.classes[label] for label in labels.tolist())
            if all(name in path.split("/")[:-1] for name, path in zip(classes, names, strict=True)):
                return digest  # that of the folder of these images, on whose shards a run continues
        return self._with_labels(digest)

    def take(self, indices: Tensor) -> Self:
        """Return the source of the images at `indices`, in that order."""
        labels = None if self.labels is None else self.labels[indices]
        rows = indices.numpy()
        return type(self)(self.shards, self.names[rows], self.locations[rows], labels, self.classes, pixels=self.pixels)


def open_shards(
    root: str,
    names: Sequence[str],
    classes: Sequence[str] = (),
    *,
    pixels: PixelFormat = RGB,
    unused: list[str] | None = None,
) -> Shards:
    """Return the images of some shards.

    Args:
        root: Folder of the shards.
        names: Names of the shards below it.
        classes: Class names that the labels index; () takes the classes of the shards.
        pixels: Pixel format of the images.
        unused: Receives the names of further images of a sample, and of classes without an image.

    Raises:
        UserError: A shard cannot be read or differs from the index next to it, or a class is not among `classes`.
    """
    shards = [os.path.join(os.path.abspath(root), name) for name in names]  # stores of features keep the paths
    image_names, locations = list[np.ndarray](), list[np.ndarray]()
    labels, orders = list[Label](), set[tuple[str, ...]]()
    for number, shard in enumerate(tqdm(shards, f"list {root}", unit=" shards", delay=2, leave=False)):
        index = read_index(shard) or Index(scan(shard, [] if unused is None else unused))
        image_names.append(np.array([os.fsencode(row.name) for row in index.images], np.bytes_))
        locations.append(np.array([(number, row.offset, row.size) for row in index.images], np.int64).reshape(-1, 3))
        labels += [row.label for row in index.images]
        orders.add(tuple(index.classes))
    if not labels:
        raise UserError(f"{root}: its shards contain no image (a member ending in {', '.join(IMAGE_SUFFIXES + NPY)})")
    order = orders.pop() if len(orders) == 1 else ()
    numbers = number_labels(labels, classes or order, source=root, numeric=True)
    source = Shards(shards, np.concatenate(image_names), np.concatenate(locations), *numbers, pixels=pixels)
    source.note = note_on_missing(labels, source.name)
    return source


def index_path(shard: str | Path) -> Path:
    """Return the path of the index of a shard, in the same folder."""
    return Path(shard).with_suffix(INDEX)


def read_index(shard: str | Path) -> Index | None:
    """Return the index of a shard, or None if there is none next to it.

    Raises:
        UserError: The file is damaged or of another version, or the shard has another size than its index states.
    """
    path = index_path(shard)
    if not path.exists():
        return None
    try:
        stored = json.loads(path.read_bytes())
        atomic_io.check_schema(stored.pop("schema", None), SCHEMA, path, UserError)
        images = [Row(name, offset, size, _text(label)) for name, offset, size, label in stored.pop("images")]
        index = Index(images, **stored)
        for row in images:
            os.fsencode(row.name)
            if not 0 <= row.offset <= row.offset + row.size <= index.size:
                raise ValueError(f"{row.name!r:.100} is not within {index.size} bytes")
        if not all(isinstance(name, str) for name in index.classes):
            raise TypeError("classes must be names")
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        raise UserError(f"{path}: is not an index of a shard ({error}): delete it to read the headers") from None
    if os.path.exists(shard) and (size := os.path.getsize(shard)) != index.size:
        raise UserError(f"{shard}: has {size} bytes, but its index states {index.size}: copy both again")
    return index


def _text(label: str | list[str] | None) -> Label:
    """Return a stored label; TypeError if it is neither a class, nor a list of classes, nor null."""
    for name in label if isinstance(label, list) else [label or ""]:
        if not isinstance(name, str):
            raise TypeError(f"the label {name!r:.100} must be a name")
    return tuple(label) if isinstance(label, list) else label


def scan(shard: str, unused: list[str]) -> list[Row]:
    """Return the images of a shard in order, from the headers of its members.

    Args:
        shard: Path of the shard.
        unused: Receives the names of further images of a sample, and of classes without an image.

    Raises:
        UserError: The shard is damaged, unreadable, or not an uncompressed tar file.
    """
    rows, apart = list[Row](), dict[str, Label]()
    try:
        with open(shard, "rb") as stream, tarfile.open(fileobj=stream, mode="r:") as file:
            for key, members in groupby(_members(file), lambda member: ending(member.name)[0]):
                images, label = _sample(file, members)
                rows += [Row(image.name, image.offset_data, image.size, label) for image in images[:1]]
                unused += [image.name for image in images[1:]]
                if label is not None and not images:
                    apart[key] = label
            stream.seek(file.offset)  # tarfile stops at a damaged header; the end is a block of zeros
            if stream.read(tarfile.BLOCKSIZE).strip(b"\0"):
                raise tarfile.ReadError(f"no header at byte {file.offset}")
    except (tarfile.TarError, EOFError) as error:
        raise UserError(f"{printable(shard)}: is not an uncompressed tar file, or is damaged: {error}") from None
    except OSError as error:
        raise UserError(f"{printable(shard)}: cannot be read: {error.strerror}") from None
    # The images 7.0.jpg and 7.1.jpg may share the class 7.cls, as in WebDataset.
    keys = [(key, key.rpartition(".")[0]) for key in (ending(row.name)[0] for row in rows)]
    unused += sorted(apart.keys() - {*chain(*keys)})
    labels = [apart.get(key, apart.get(start)) for key, start in keys]
    return [row if row.label is not None else row._replace(label=of) for row, of in zip(rows, labels, strict=True)]


def _members(file: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """Yield the members of a shard that belong to samples."""
    for member in file:
        file.members.clear()  # type: ignore[attr-defined]  # otherwise it would keep all members in memory
        key, suffix = ending(member.name)
        if member.isreg() and suffix and os.path.basename(key):
            yield member


def _sample(file: tarfile.TarFile, members: Iterable[tarfile.TarInfo]) -> tuple[list[tarfile.TarInfo], Label]:
    """Return the images of a sample, those in .npy files if there are no others, and its class or classes, or None."""
    images, arrays, label = list[tarfile.TarInfo](), list[tarfile.TarInfo](), None
    for member in members:
        suffix = ending(member.name)[1]
        if f".{suffix}".endswith(IMAGE_SUFFIXES):
            images.append(member)
        elif f".{suffix}".endswith(NPY):
            arrays.append(member)
        elif member.size <= _LARGEST and (suffix.startswith("cls") or suffix.endswith("json")):
            content = file.extractfile(member)
            assert content is not None  # not None for a regular file
            found = _label(content.read(), is_json=suffix.endswith("json"))
            label = label if found is None else found
    return images or arrays[:1], label


def _label(content: bytes, *, is_json: bool) -> Label:
    """Return the class in the content of a .cls or .json member, the classes in a list `labels`, or None."""
    with suppress(ValueError, RecursionError):
        text = content.decode().strip()
        if not is_json:
            return text or None
        values = json.loads(text)
        for name in _CLASS_KEYS:
            if isinstance(values, dict) and isinstance(values.get(name), int | str):
                return str(values[name])
        several = values.get(_SEVERAL) if isinstance(values, dict) else None
        if isinstance(several, list) and all(isinstance(number, int) for number in several):
            return tuple(map(str, several))
    return None
