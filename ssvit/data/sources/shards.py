"""Images in shards (uncompressed tar files in the layout of WebDataset), read at random offsets by means of an index.

Consecutive files of a shard with the same key form a sample: an image (a/1.jpg) and optionally its class (a/1.cls, or
a/1.json with "cls", "label", "class" or "class_name"). Readers that stream shards shuffle within a buffer; here an
image is read at its offset, so a batch remains a function of the step.

Images in an object store are copied to a local disk on demand. The copy of a shard is a sparse file in which images
have the same offsets as in the shard. A byte for each image records whether it was copied; it is set after the image
has been written, and all processes of a machine share the files.

Letters: n images.
"""

import hashlib
import json
import os
import tarfile
import time
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
from ssvit.data.sources.base import Labels, checked_labels
from ssvit.data.sources.files import Encoded
from ssvit.data.sources.folder import IMAGE_SUFFIXES, NPY
from ssvit.data.sources.index import Index, Row, caches, kept, locked
from ssvit.data.sources.shard_folder import CHECKSUM, INDEX, PLACE, ending, is_remote, opened
from ssvit.options import UserError, printable

_OF_CLASS = ("cls", "label", "class", "class_name")
_LARGEST = 1 << 20  # maximum size in bytes of a member with a class
_TRIES = 4  # attempts of a request, with pauses of 1, 2 and 4 seconds
_TOGETHER = 64  # images per request


class Mirror:
    """Local copies of the shards in an object store.

    Args:
        root: Address of the object store.
        names: Names of the shards below it.
        folder: Folder of the copies.
        count: Number of images of the index.
        key: A string that changes whenever the shards change.

    Raises:
        UserError: The folder cannot be written.
    """

    def __init__(self, root: str, names: Sequence[str], folder: Path, count: int, *, key: str) -> None:
        self.root, self.names = root, tuple(names)
        self.shards = tuple(str(folder / name) for name in names)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"present_{hashlib.sha256(f'{self.names} {key}'.encode()).hexdigest()[:16]}"
            with open(path, "ab") as file:
                if file.tell() < count:
                    file.truncate(count)
        except OSError as error:
            raise UserError(f"data.cache={folder}: cannot be written: {error.strerror}") from None
        self._present = np.memmap(path, np.uint8, "r+", shape=(count,))

    def fetch(self, indices: Sequence[int], index: Index) -> None:
        """Copy images that have not been copied yet.

        Args:
            indices: Images, as indices into the index.
            index: Offsets of the images.

        Raises:
            UserError: A request or a write failed, or a checksum differs.
        """
        missing = [one for one in indices if not self._present[index.row(one)]]
        for start in range(0, len(missing), _TOGETHER):
            part = missing[start : start + _TOGETHER]
            numbers, offsets = ([index.number(column, one) for one in part] for column in PLACE)
            ends = [offset + index.size(one) for offset, one in zip(offsets, part, strict=True)]
            contents = self._asked(numbers, offsets, ends)
            for one, number, offset, data in zip(part, numbers, offsets, contents, strict=True):
                if CHECKSUM in index.columns and zlib.crc32(data) != index.number(CHECKSUM, one):
                    raise UserError(f"{self.root}/{self.names[number]}: {index.name(one)} has another checksum there")
                self._write(self.shards[number], offset, data)
                self._present[index.row(one)] = 1

    def _asked(self, numbers: list[int], starts: list[int], ends: list[int]) -> list[bytes]:
        """Return the bytes from `starts` to `ends` of some shards, in one request where the store supports that."""
        for attempt in range(_TRIES):
            try:
                system, top = opened(self.root)  # fsspec caches one for each process
                paths = [f"{top.rstrip('/')}/{self.names[number]}" for number in numbers]
                found = system.cat_ranges(paths, starts, ends, on_error="raise")
                if all(len(data) == end - start for data, start, end in zip(found, starts, ends, strict=True)):
                    return found
                reason = "a shard is shorter than its index says"
            except UserError:
                raise
            except Exception as error:  # each store raises different exceptions
                reason = " ".join(str(error).split()) or type(error).__name__
            if attempt + 1 < _TRIES:
                time.sleep(2**attempt)
        raise UserError(f"data.root={self.root}: cannot be read: {reason}; the same command goes on")

    @staticmethod
    def _write(path: str, offset: int, data: bytes) -> None:
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(os.open(path, os.O_WRONLY | os.O_CREAT, 0o666), "wb") as file:
                file.seek(offset)
                file.write(data)
        except OSError as error:
            raise UserError(f"{path}: cannot be written: {error.strerror}; data.cache=PATH is another place") from None


def download(root: str, name: str, folder: Path) -> Path | None:
    """Copy a complete file from an address unless its newest version has been copied already.

    Args:
        root: Address of the object store.
        name: Name of the file below it.
        folder: Folder of the copy.

    Returns:
        The path of the copy; None if the file does not exist.

    Raises:
        UserError: The file cannot be fetched.
    """
    try:
        system, top = opened(root)
        remote = f"{top.rstrip('/')}/{name}"
        if not system.exists(remote):
            return None
        version = folder / f".{name.replace('/', '_')}.version"
        path, key = folder / name, str(system.ukey(remote))
        if not path.exists() or not version.exists() or version.read_text() != key:
            path.parent.mkdir(parents=True, exist_ok=True)
            beside = path.with_name(f".{path.name}.part")
            system.get_file(remote, str(beside))
            beside.replace(path)
            version.write_text(key)
    except UserError:
        raise
    except Exception as error:  # each store raises different exceptions
        raise UserError(f"{root}/{name}: cannot be fetched: {' '.join(str(error).split())}") from None
    return path


class Shards(Encoded):
    """The images of an index of shards.

    Args:
        shards: Paths of the shards, in the order of the index's numbers.
        index: Shard and offset of each image.
        labels: (n,) class indices, (n, k) bool, or None.
        classes: Class names.
        mirror: Copies images from an object store to these paths; None for local shards.
        pixels: Pixel format of the images.

    Raises:
        UserError: A label is out of range.
    """

    def __init__(
        self,
        shards: Sequence[str],
        index: Index,
        labels: Labels = None,
        classes: Sequence[str] = (),
        *,
        mirror: Mirror | None = None,
        pixels: PixelFormat = RGB,
    ) -> None:
        super().__init__(pixels)
        self.shards, self.index, self.mirror = tuple(shards), index, mirror
        self.labels = checked_labels(labels, len(index), classes)
        self.classes = tuple(classes)

    def __len__(self) -> int:
        return len(self.index)

    def file(self, index: int) -> decode.Bytes:
        """Return the bytes of an image's file, (bytes,) uint8.

        Raises:
            Unreadable: The shard does not exist or is truncated before the image.
        """
        self.prefetch([index])
        number, offset = (self.index.number(column, index) for column in PLACE)
        return decode.read_part(self.shards[number], offset, self.index.size(index), self.name(index))

    def is_whole(self, index: int) -> bool:
        """Return whether an image's bytes match the checksum of the index; True without checksums."""
        if CHECKSUM not in self.index.columns:
            return True
        return zlib.crc32(self.file(index).data) == self.index.number(CHECKSUM, index)

    def prefetch(self, indices: Sequence[int]) -> None:
        """Copy images that are read next from the object store, if the shards have a mirror."""
        if self.mirror is not None:
            self.mirror.fetch(indices, self.index)

    def inner_name(self, index: int) -> str:
        """Return the name of an image in its shard."""
        return self.index.name(index)

    def name(self, index: int) -> str:
        """Return the path of the shard and the name of an image in it."""
        return f"{self.shards[self.index.number(PLACE[0], index)]}/{self.index.name(index)}"

    @cached_property
    def fingerprint(self) -> str:
        """Return the sha256 of the names and sizes of the images, independent of their shards and offsets."""
        return self.index.fingerprint()

    def take(self, indices: Tensor) -> Self:
        """Return the source of the images at `indices`, in that order."""
        labels = None if self.labels is None else self.labels[indices]
        index = self.index.take(indices)
        return type(self)(self.shards, index, labels, self.classes, mirror=self.mirror, pixels=self.pixels)


def find(
    root: str,
    names: Sequence[str],
    classes: Sequence[str] = (),
    *,
    cache: str | None = None,
    pixels: PixelFormat = RGB,
) -> Shards:
    """Return the images of some shards.

    Args:
        root: Folder or address of the shards.
        names: Names of the shards below it.
        classes: Class names that the labels index; () takes the classes of the shards.
        cache: Folder for copies from an object store; None for the default.
        pixels: Pixel format of the images.

    Raises:
        UserError: A shard cannot be read or differs from the index next to it, or a class is not among `classes`.
    """
    mirror = None
    if is_remote(root):
        folder = Path(cache or caches("shards"), hashlib.sha256(root.encode()).hexdigest()[:16])
        with locked(folder):  # one process of a machine downloads
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
    names_of_classes = () if labels is None else tuple(classes) or index.classes
    return Shards(shards, index, labels, names_of_classes, mirror=mirror, pixels=pixels)


def _read(path: Path | None, names: Sequence[str]) -> Index | None:
    """Return the index in a file next to shards, or None if it does not exist or lists other shards.

    Raises:
        UserError: The file is damaged.
    """
    if path is None or not path.exists():
        return None
    try:
        index = Index.read(path)
        its = [name for name, *_ in index.facts["shards"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: is no index of shards ({error}); without it their headers are read") from None
    return index if its == [os.path.basename(name) for name in names] else None


def _local(root: str, names: Sequence[str]) -> Index:
    """Return the index of shards in a folder: from the file next to them, from the cache, or from their headers."""
    shards = [os.path.join(root, name) for name in names]
    for folder in {os.path.dirname(shard) for shard in shards}:
        if index := _read(Path(folder, INDEX), names):
            for shard, (_, size, *_) in zip(shards, index.facts["shards"], strict=True):
                if (there := os.path.getsize(shard)) != size:
                    raise UserError(f"{shard}: has {there} bytes, and its index says {size}: copy it again")
            return index

    def stamp() -> list[list[Any]]:
        status = [os.stat(shard) for shard in shards]
        return [[name, one.st_size, one.st_mtime_ns] for name, one in zip(names, status, strict=True)]

    def make() -> Index:
        before = stamp()
        rows = tqdm(scan(shards), f"read the headers of {len(shards)} shards", unit=" images", delay=2, leave=False)
        return Index.of(rows, PLACE, numbered=True, shards=before)

    index = kept(f"shards {os.path.realpath(root)} {list(names)}", lambda index: index.facts["shards"] == stamp(), make)
    if not len(index):
        raise UserError(f"{root}: its shards hold no image (a member ending in {', '.join(IMAGE_SUFFIXES + NPY)})")
    return index


def scan(shards: Sequence[str]) -> Iterator[Row]:
    """Yield the images of shards in order, as (name, bytes, class, (shard, offset)).

    Raises:
        UserError: A shard is damaged, unreadable, or not an uncompressed tar file.
    """
    for number, shard in enumerate(shards):
        key, image, array, label = "", None, None, None
        try:
            with open(shard, "rb") as opened, tarfile.open(fileobj=opened, mode="r:") as file:
                for member in file:
                    file.members.clear()  # type: ignore[attr-defined]  # otherwise it would keep all members in memory
                    own, suffix = ending(member.name)
                    if not member.isreg() or not suffix or os.path.basename(own) == "":
                        continue
                    if own != key:
                        if image := image or array:
                            yield *image[:2], label, image[2]
                        key, image, array, label = own, None, None, None
                    if f".{suffix}".endswith(IMAGE_SUFFIXES):
                        image = image or (member.name, member.size, (number, member.offset_data))
                    elif f".{suffix}".endswith(NPY):  # used if the sample has no image in another format
                        array = array or (member.name, member.size, (number, member.offset_data))
                    elif member.size <= _LARGEST and (suffix.startswith("cls") or suffix.endswith("json")):
                        content = file.extractfile(member)
                        assert content is not None  # not None for a regular file
                        label = _label(content.read(), is_json=suffix.endswith("json")) or label
                opened.seek(file.offset)  # tarfile stops at a damaged header; the end is a block of zeros
                if opened.read(tarfile.BLOCKSIZE).strip(b"\0"):
                    raise tarfile.ReadError(f"no header at byte {file.offset}")
        except (tarfile.TarError, EOFError) as error:
            raise UserError(f"{printable(shard)}: is no uncompressed tar file, or a damaged one: {error}") from None
        except OSError as error:
            raise UserError(f"{printable(shard)}: cannot be read: {error.strerror}") from None
        if image := image or array:
            yield *image[:2], label, image[2]


def _label(content: bytes, *, is_json: bool) -> str | None:
    """Return the class in the content of a .cls or .json member, or None."""
    with suppress(ValueError, RecursionError):
        text = content.decode().strip()
        if not is_json:
            return text or None
        values = json.loads(text)
        for name in _OF_CLASS:
            if isinstance(values, dict) and isinstance(values.get(name), int | str):
                return str(values[name])
    return None
