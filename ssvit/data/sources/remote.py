"""What lies in an object store, copied to a local disk as it is needed.

The copy of a shard is a sparse file, in which an image stands where it stands in the shard. A byte for each image says
whether it is there; it is set after the image's bytes, and all processes of a machine share both.
"""

import hashlib
import os
import time
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ssvit.data.sources.index import Index
from ssvit.data.sources.shard_folder import CHECKSUM, PLACE, opened
from ssvit.options import UserError

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
