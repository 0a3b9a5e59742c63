"""Sources of image files, decoded on demand.

Letters: n images.
"""

import hashlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from ssvit.data import decode
from ssvit.data.decode_options import RGB, PixelFormat
from ssvit.data.sources import folder
from ssvit.data.sources.base import Labels, Reduce, Source, checked_labels
from ssvit.data.sources.files_options import Verify
from ssvit.data.sources.index import KEPT_FROM, Index, Row, kept
from ssvit.options import UserError, one_of, printable

_COARSE = 2 * 10**9  # nanoseconds: later changes may fall within the resolution of the file system's clock


class Listing(Sequence[str]):
    """The paths of the images of a folder, from an index of their names below it."""

    def __init__(self, root: str, entries: Index) -> None:
        self.root, self.entries = root, entries

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, place: Any) -> Any:
        places = range(len(self))[place]
        if isinstance(places, range):
            return [self[i] for i in places]
        return os.path.join(self.root, self.entries.name(places))

    def fingerprint(self) -> str:
        """Return the sha256 of the names below the common folder and of the sizes."""
        if not _top([self.entries.name(place) for place in (0, len(self) - 1)]):
            return self.entries.fingerprint()
        names = [self.entries.name(place) for place in range(len(self))]
        top = _top([min(names), max(names)])
        digest = hashlib.sha256()
        for place, name in enumerate(names):
            digest.update(_text(os.path.relpath(name, top or "."), self.entries.size(place)))
        return digest.hexdigest()


def listing(root: str, *, fresh: bool = False) -> Listing:
    """List the images of a folder, sorted by class and path.

    The index of a large folder is cached until the modification time of a folder in it changes. Overwriting a file does
    not change the time of its folder.

    Args:
        root: The folder.
        fresh: Whether to list the files again instead of using the cache.

    Raises:
        UserError: The folder holds no image or cannot be read.
    """
    if fresh or folder.count(root, at_most=KEPT_FROM) < KEPT_FROM:
        return Listing(root, _index(root))
    key = f"folder {os.path.realpath(root)}"
    return Listing(root, kept(key, lambda index: _is_unchanged(root, index), lambda: _index(root)))


def _index(root: str) -> Index:
    """Return the index of a folder, with the modification time of each folder if all are older than `_COARSE`."""
    began, folders, above = time.time_ns(), dict[str, int](), len(os.path.join(root, ""))

    def rows() -> Iterator[Row]:
        for image, name in tqdm(folder.scan(root, folders), f"list {root}", unit=" images", delay=2, leave=False):
            try:
                size = image.stat().st_size
            except OSError:
                size = -1
            yield image.path[above:], size, name, ()

    index = Index.of(rows())
    if max(folders.values()) < began - _COARSE:
        names = "\0".join(path[above:] for path in folders).encode(errors="surrogateescape")
        index.columns["folders"] = torch.from_numpy(np.frombuffer(names, np.uint8).copy())
        index.columns["changed"] = torch.tensor(list(folders.values()))
    return index


def _is_unchanged(root: str, index: Index) -> bool:
    """Return whether no folder has been modified since the index was built."""
    if "changed" not in index.columns:
        return False
    names = index.columns["folders"].numpy().tobytes().decode(errors="surrogateescape").split("\0")
    before = index.columns["changed"].tolist()
    try:
        return all(os.stat(os.path.join(root, name)).st_mtime_ns == at for name, at in zip(names, before, strict=True))
    except OSError:
        return False


def _top(paths: Sequence[str]) -> str:
    """Return the common folder of some paths."""
    return os.path.commonpath([os.path.dirname(path) for path in paths])


def _text(name: str, content: object) -> bytes:
    return f"{name}\0{content}\0".encode(errors="surrogateescape")


class Encoded(Source):
    """Images in files, decoded on demand; a subclass implements `file` and `__len__`."""

    def __init__(self, pixels: PixelFormat) -> None:
        self.pixels, self.bytes_per_pixel = pixels, pixels.bytes_per_pixel

    def file(self, index: int) -> decode.Bytes:
        """Return the bytes of an image's file, (bytes,) uint8.

        Raises:
            Unreadable: The file does not exist or cannot be read.
        """
        raise NotImplementedError

    def read(self, index: int) -> Tensor:
        """Read and decode one image, in the pixel format of the source."""
        return decode.decoded(self.file(index), self.name(index), None, self.pixels)

    def read_smaller(self, index: int, reduce: Reduce) -> Tensor:
        """Read and decode one image, downscaled by the JPEG decoder where `reduce` allows it."""
        return decode.decoded(self.file(index), self.name(index), reduce, self.pixels)

    def values(self, index: int) -> np.ndarray:
        """Read the stored values of one image, (c, h, w) of any dtype."""
        return decode.values(self.file(index), self.name(index))


class Files(Encoded):
    """Image files of any size.

    Args:
        paths: Path of each image.
        labels: (n,) class indices, (n, k) bool, or None.
        classes: Class names.
        masks: Path of the mask of each image, a PNG.
        named: Whether the paths determine the labels; if not, the fingerprint covers the labels too.
        verify: Whether the fingerprint covers the "size" or the "content" of each file, next to the names.
        pixels: Pixel format of the images.

    Raises:
        UserError: A label is out of range.
    """

    def __init__(
        self,
        paths: Sequence[str],
        labels: Labels = None,
        classes: Sequence[str] = (),
        *,
        masks: Sequence[str] | None = None,
        named: bool = True,
        verify: str = "size",
        pixels: PixelFormat = RGB,
    ) -> None:
        super().__init__(pixels)
        one_of("verify", verify, get_args(Verify))
        self.named, self.verify = named, verify
        self.paths: Sequence[str] = paths if isinstance(paths, Listing) else [os.fspath(path) for path in paths]
        self.labels = checked_labels(labels, len(self.paths), classes)
        self.classes, self.masks = tuple(classes), masks

    def __len__(self) -> int:
        return len(self.paths)

    def file(self, index: int) -> decode.Bytes:
        """Return the bytes of an image's file, (bytes,) uint8."""
        return decode.read_file(self.paths[index])

    def name(self, index: int) -> str:
        """Return the path of an image."""
        return self.paths[index]

    def inner_name(self, index: int) -> str:
        """Return the path of an image below the common folder of all images."""
        top = self.paths.root if isinstance(self.paths, Listing) else self._common
        return os.path.relpath(self.paths[index], top)

    @cached_property
    def _common(self) -> str:
        return _top([min(self.paths), max(self.paths)])  # equals the common folder of all sorted paths

    def mask(self, index: int) -> Tensor | None:
        """Return the mask of an image, (h, w) uint8, or None without masks."""
        return None if self.masks is None else decode.load_mask(self.masks[index])

    @cached_property
    def fingerprint(self) -> str:
        """Return the sha256 of the names below the common folder and of sizes or contents.

        Raises:
            UserError: A file is unreadable and contents are covered.
        """
        if self.named or self.labels is None:
            return self._of_files()
        digest = hashlib.sha256(json.dumps([self._of_files(), self.classes]).encode())
        digest.update(self.labels.contiguous().numpy().data)
        return digest.hexdigest()

    def _of_files(self) -> str:
        if isinstance(self.paths, Listing) and self.verify == "size":
            return self.paths.fingerprint()
        digest = hashlib.sha256()
        sizes = (os.path.getsize(path) if os.path.isfile(path) else -1 for path in self.paths)
        for path, content in zip(self.paths, self._digests() if self.verify == "content" else sizes, strict=True):
            digest.update(_text(os.path.relpath(path, self._common), content))
        return digest.hexdigest()

    def _digests(self) -> Iterator[str]:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            digests = pool.map(_digest, self.paths)
            yield from tqdm(digests, "data.verify=content", len(self.paths), unit=" files", delay=2, leave=False)

    def take(self, indices: Tensor) -> "Files":
        """Return the source of the files at `indices`, in that order."""
        paths: Sequence[str]
        if isinstance(self.paths, Listing):
            paths = Listing(self.paths.root, self.paths.entries.take(indices))
        else:
            paths = [self.paths[i] for i in indices.tolist()]
        labels = None if self.labels is None else self.labels[indices]
        masks = None if self.masks is None else [self.masks[i] for i in indices.tolist()]
        more = {"named": self.named, "verify": self.verify, "pixels": self.pixels}
        return Files(paths, labels, self.classes, masks=masks, **more)  # type: ignore[arg-type]


def _digest(path: str) -> str:
    """Return the sha256 of a file, or "" if it does not exist, since training replaces such an image."""
    if not os.path.isfile(path):
        return ""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UserError(f"{printable(path)}: data.verify=content cannot read it: {error.strerror}") from None
