"""Images in shards: uncompressed tar files in the layout of WebDataset, read at any place by an index of their offsets.

The files that follow each other in a shard under one key are a sample: an image (a/1.jpg), and perhaps its class
(a/1.cls, or a/1.json with "cls", "label", "class" or "class_name"). Readers that stream shards shuffle within a buffer;
here an image is read from where it stands, so a batch stays a function of the step.

Letters: n images.
"""

import hashlib
import json
import os
import tarfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
from torch import Tensor
from tqdm import tqdm

from ssvit.data import decode
from ssvit.data.decode_options import RGB, PixelFormat
from ssvit.data.sources.base import Labels, Reduce, Source, checked_labels
from ssvit.data.sources.folder import IMAGE_SUFFIXES, NPY
from ssvit.data.sources.index import Index, Row, caches, kept, locked
from ssvit.data.sources.remote import Mirror, download
from ssvit.data.sources.shard_folder import CHECKSUM, INDEX, PLACE, ending, is_remote
from ssvit.options import UserError, printable

_OF_CLASS = ("cls", "label", "class", "class_name")
_LARGEST = 1 << 20  # bytes of a class or of JSON; others are not read


class Shards(Source):
    """The images at `rows` of an index, by default all; shards: the paths that the index counts. labels (n,).

    mirror: brings what lies in an object store to those paths. UserError for an out-of-range label.
    """

    def __init__(
        self,
        shards: Sequence[str],
        index: Index,
        labels: Labels = None,
        classes: Sequence[str] = (),
        *,
        rows: Tensor | None = None,
        mirror: Mirror | None = None,
        pixels: PixelFormat = RGB,
    ) -> None:
        self.shards, self.index, self.rows, self.mirror = tuple(shards), index, rows, mirror
        self.pixels, self.bytes_per_pixel = pixels, pixels.bytes_per_pixel
        self.labels = checked_labels(labels, len(self), classes)
        self.classes = tuple(classes)

    def __len__(self) -> int:
        return len(self.index) if self.rows is None else len(self.rows)

    def row(self, index: int) -> int:
        """Where an image stands in the index."""
        return index if self.rows is None else int(self.rows[index])

    def read(self, index: int) -> Tensor:
        return decode.load_bytes(self.file(index), self.name(index), None, self.pixels)

    def read_smaller(self, index: int, reduce: Reduce) -> Tensor:
        return decode.load_bytes(self.file(index), self.name(index), reduce, self.pixels)

    def values(self, index: int) -> np.ndarray:
        return decode.values_of_bytes(self.file(index), self.name(index))

    def file(self, index: int) -> decode.Bytes:
        """The file of an image as it is, (bytes,) uint8. Unreadable where the shard ends before it, or is not there."""
        row = self.row(index)
        self.prefetch([index])
        number, offset = (int(self.index.columns[name][row]) for name in PLACE)
        return decode.read_part(self.shards[number], offset, self.index.size(row), self.name(index))

    def is_whole(self, index: int) -> bool:
        """Whether an image's bytes have the checksum of the index; True where that has none."""
        if CHECKSUM not in self.index.columns:
            return True
        return zlib.crc32(self.file(index).data) == int(self.index.columns[CHECKSUM][self.row(index)])

    def prefetch(self, indices: Sequence[int]) -> None:
        if self.mirror is not None:
            self.mirror.fetch([self.row(index) for index in indices], self.index)

    def name(self, index: int) -> str:
        row = self.row(index)
        return f"{self.shards[int(self.index.columns[PLACE[0]][row])]}/{self.index.name(row)}"

    @cached_property
    def fingerprint(self) -> str:
        """sha256 of the names and sizes of the images, wherever they stand in the shards."""
        return self.index.fingerprint(self.rows)

    def take(self, indices: Tensor) -> Self:
        """The set of the images at `indices`, in that order."""
        rows = indices if self.rows is None else self.rows[indices]
        labels = None if self.labels is None else self.labels[indices]
        given = (self.shards, self.index, labels, self.classes)
        return type(self)(*given, rows=rows, mirror=self.mirror, pixels=self.pixels)


def find(
    root: str,
    names: Sequence[str],
    classes: Sequence[str] = (),
    *,
    cache: str | None = None,
    pixels: PixelFormat = RGB,
) -> Shards:
    """The images of shards, by their names below a folder or an address, labelled by `classes` or by their own.

    cache: the folder for copies of what an address has. UserError if a shard cannot be read, or is not what the index
    beside it says, or for a class that is not among `classes`.
    """
    mirror = None
    if is_remote(root):
        folder = copies(root, cache)
        with locked(folder):  # of the processes of a machine one downloads
            beside = {os.path.dirname(name) for name in names}
            index = _read(download(root, os.path.join(*beside, INDEX), folder), names) if len(beside) == 1 else None
            if index is None:
                for name in tqdm(names, f"copy {root}", unit=" shards", delay=2, leave=False):
                    download(root, name, folder)
        if index is not None:
            mirror = Mirror(root, names, folder, len(index), key=json.dumps(index.facts["shards"]))
        root = str(folder)
    shards = [os.path.join(root, name) for name in names]
    if mirror is None:
        index = _local(root, names)
    assert index is not None
    labels = index.labels(classes, root=root)
    if labels is None:
        return Shards(shards, index, mirror=mirror, pixels=pixels)
    return Shards(shards, index, labels, tuple(classes) or index.classes, mirror=mirror, pixels=pixels)


def copies(root: str, cache: str | None) -> Path:
    """The folder for copies of an address."""
    return Path(cache or caches("shards"), hashlib.sha256(root.encode()).hexdigest()[:16])


def _read(path: Path | None, names: Sequence[str]) -> Index | None:
    """The index in a file beside shards, if there is one and it is of all of them. UserError for a damaged one."""
    if path is None or not path.exists():
        return None
    try:
        index = Index.read(path)
        its = [name for name, *_ in index.facts["shards"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: is no index of shards ({error}); without it their headers are read") from None
    return index if its == [os.path.basename(name) for name in names] else None


def _local(root: str, names: Sequence[str]) -> Index:
    """The index of shards in a folder: the one beside them, else the one that is kept, else made from their headers."""
    shards = [os.path.join(root, name) for name in names]
    for folder in {os.path.dirname(shard) for shard in shards}:
        if index := _read(Path(folder, INDEX), names):
            _check_sizes(shards, index)
            return index

    def stamp() -> list[list[Any]]:
        status = [os.stat(shard) for shard in shards]
        return [[name, one.st_size, one.st_mtime_ns] for name, one in zip(names, status, strict=True)]

    def made() -> Index:
        before = stamp()
        rows = tqdm(scan(shards), f"read the headers of {len(shards)} shards", unit=" images", delay=2, leave=False)
        return Index.of(rows, PLACE, numbered=True, shards=before)

    index = kept(f"shards {os.path.realpath(root)} {list(names)}", lambda index: index.facts["shards"] == stamp(), made)
    if not len(index):
        raise UserError(f"{root}: its shards hold no image (a member ending in {', '.join(IMAGE_SUFFIXES + NPY)})")
    return index


def _check_sizes(shards: Sequence[str], index: Index) -> None:
    for shard, (_, size, *_) in zip(shards, index.facts["shards"], strict=True):
        if (there := os.path.getsize(shard)) != size:
            raise UserError(f"{shard}: has {there} bytes, and its index says {size}: copy it again")


def scan(shards: Sequence[str]) -> Iterator[Row]:
    """The images of shards in their order: (name, bytes, class, (shard, offset)). UserError for what is no tar file."""
    for number, shard in enumerate(shards):
        key, image, array, label = "", None, None, None
        try:
            with open(shard, "rb") as opened, tarfile.open(fileobj=opened, mode="r:") as file:
                for member in file:
                    file.members.clear()  # type: ignore[attr-defined]  # it would keep them all
                    own, suffix = ending(member.name)
                    if not member.isreg() or not suffix or os.path.basename(own) == "":
                        continue
                    if own != key:
                        if image := image or array:
                            yield *image[:2], label, image[2]
                        key, image, array, label = own, None, None, None
                    if f".{suffix}".endswith(IMAGE_SUFFIXES):
                        image = image or (member.name, member.size, (number, member.offset_data))
                    elif f".{suffix}".endswith(NPY):  # of a sample without another image
                        array = array or (member.name, member.size, (number, member.offset_data))
                    elif member.size <= _LARGEST and (suffix.startswith("cls") or suffix.endswith("json")):
                        content = file.extractfile(member)
                        assert content is not None  # of a regular file
                        label = _label(content.read(), is_json=suffix.endswith("json")) or label
                opened.seek(file.offset)  # tarfile takes a damaged header for the end, which is a block of zeros
                if opened.read(tarfile.BLOCKSIZE).strip(b"\0"):
                    raise tarfile.ReadError(f"no header at byte {file.offset}")
        except (tarfile.TarError, EOFError) as error:
            raise UserError(f"{printable(shard)}: is no uncompressed tar file, or a damaged one: {error}") from None
        except OSError as error:
            raise UserError(f"{printable(shard)}: cannot be read: {error.strerror}") from None
        if image := image or array:
            yield *image[:2], label, image[2]


def _label(content: bytes, *, is_json: bool) -> str | None:
    """The class that a member names or numbers; None if it does not."""
    with suppress(ValueError, RecursionError):
        text = content.decode().strip()
        if not is_json:
            return text or None
        values = json.loads(text)
        for name in _OF_CLASS:
            if isinstance(values, dict) and isinstance(values.get(name), int | str):
                return str(values[name])
    return None
