"""Images in shards: uncompressed tar files in the layout of WebDataset, read at any place by an index of their offsets.

The files that follow each other in a shard under one key are a sample: an image (a/1.jpg), and perhaps its class
(a/1.cls, or a/1.json with "cls", "label", "class" or "class_name"). Readers that stream shards shuffle within a buffer;
here an image is read from where it stands, so a batch stays a function of the step.

What lies in an object store is copied to a local disk as it is needed. The copy of a shard is a sparse file, in which
an image stands where it stands in the shard. A byte for each image says whether it is there; it is set after the
bytes of the image, and all processes of a machine share both.

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
_LARGEST = 1 << 20  # bytes of a class or of JSON; others are not read
_TRIES = 4  # of a request, with a second, two and four between
_TOGETHER = 64  # images that are asked for at a time


class Mirror:
    """Local copies, in `folder`, of the shards `names` of an address.

    count: the images of their index. key: what changes if the shards change.
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
        """Copy some images of the index, as far as they are not there. UserError if that fails."""
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
        """The bytes from `starts` to `ends` of shards, asked for at once where the store can."""
        for attempt in range(_TRIES):
            try:
                system, top = opened(self.root)  # fsspec keeps one for each process
                paths = [f"{top.rstrip('/')}/{self.names[number]}" for number in numbers]
                found = system.cat_ranges(paths, starts, ends, on_error="raise")
                if all(len(data) == end - start for data, start, end in zip(found, starts, ends, strict=True)):
                    return found
                reason = "a shard is shorter than its index says"
            except UserError:
                raise
            except Exception as error:  # each store has errors of its own
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
    """A whole file of an address, unless its newest version is there; None without. UserError if that fails."""
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
    except Exception as error:  # each store has errors of its own
        raise UserError(f"{root}/{name}: cannot be fetched: {' '.join(str(error).split())}") from None
    return path


class Shards(Encoded):
    """The images of an index of shards.

    Args:
        shards: The paths of the shards that the index counts.
        index: The place of each image.
        labels: Labels as of a source.
        classes: The names of the classes.
        mirror: Copies what lies in an object store to those paths.
        pixels: What a run takes of an image.

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
        """The file of an image as it is, (bytes,) uint8. Unreadable where the shard ends before it, or is not there."""
        self.prefetch([index])
        number, offset = (self.index.number(column, index) for column in PLACE)
        return decode.read_part(self.shards[number], offset, self.index.size(index), self.name(index))

    def is_whole(self, index: int) -> bool:
        """Return whether an image's bytes have the checksum of the index; True where that has none."""
        if CHECKSUM not in self.index.columns:
            return True
        return zlib.crc32(self.file(index).data) == self.index.number(CHECKSUM, index)

    def prefetch(self, indices: Sequence[int]) -> None:
        if self.mirror is not None:
            self.mirror.fetch(indices, self.index)

    def inner_name(self, index: int) -> str:
        """Return the name of an image in its shard."""
        return self.index.name(index)

    def name(self, index: int) -> str:
        return f"{self.shards[self.index.number(PLACE[0], index)]}/{self.index.name(index)}"

    @cached_property
    def fingerprint(self) -> str:
        """The sha256 of the names and sizes of the images, wherever they stand in the shards."""
        return self.index.fingerprint()

    def take(self, indices: Tensor) -> Self:
        """Return the set of the images at `indices`, in that order."""
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
    """The images of shards, by their names below a folder or an address, labelled by `classes` or by their own.

    cache: the folder for copies of what an address has. UserError if a shard cannot be read, or is not what the index
    beside it says, or for a class that is not among `classes`.
    """
    mirror = None
    if is_remote(root):
        folder = Path(cache or caches("shards"), hashlib.sha256(root.encode()).hexdigest()[:16])
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
    names_of_classes = () if labels is None else tuple(classes) or index.classes
    return Shards(shards, index, labels, names_of_classes, mirror=mirror, pixels=pixels)


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
