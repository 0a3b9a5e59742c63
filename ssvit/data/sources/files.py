"""Sources of image files, decoded on demand.

Letters: n images.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import IO

import numpy as np
from torch import Tensor

from ssvit.data.sources import decode
from ssvit.data.sources.base import Labels, Source, Unreadable, checked_labels, read_ahead
from ssvit.data.sources.decode_options import ANY_MASK, RGB, MaskFormat, PixelFormat

_BLOCKS, _BLOCK = 8, 2048  # blocks of a large file, and bytes of a block, that identify its content
_THREADS, _TASK = 8, 256  # threads that read blocks, since network disks have long latencies, and images per task


def digest_of(names: Iterable[str], sizes: Iterable[int]) -> str:
    """Return the sha256 of the names and sizes of images, which identifies a set of files."""
    digest = hashlib.sha256()
    for name, size in zip(names, sizes, strict=True):
        digest.update(f"{name}\0{size}\0".encode(errors="surrogateescape"))
    return digest.hexdigest()


def size_of(path: str) -> int:
    """Return the size of a file in bytes, -1 if it does not exist."""
    return os.path.getsize(path) if os.path.isfile(path) else -1


def checksum(file: IO[bytes], start: int = 0, size: int | None = None) -> str:
    """Return a checksum of the bytes of an image, or of evenly spaced blocks of a large one.

    Args:
        file: The file.
        start: Offset of the image in bytes.
        size: Number of bytes; None for the size of the file.
    """
    size = file.seek(0, os.SEEK_END) if size is None else size
    count, length = (1, size) if size <= _BLOCKS * _BLOCK else (_BLOCKS, _BLOCK)
    digest = hashlib.sha256(b"%d" % size)
    for block in range(count):
        file.seek(start + (size - length) * block // max(1, count - 1))
        digest.update(file.read(length))
    return digest.hexdigest()[:32]


def checksum_of(path: str, start: int = 0, size: int | None = None) -> str:
    """Return the `checksum` of an image in a file; "" if it cannot be read."""
    try:
        with open(path, "rb", buffering=0, opener=decode.without_waiting) as file:
            return checksum(file, start, size)
    except OSError:  # also of a pipe
        return ""


class Encoded(Source):
    """Images in files, decoded on demand; a subclass implements `file` and `__len__`.

    Args:
        count: Number of images n.
        labels: (n,) class indices, (n, k) bool, or None.
        classes: Class names.
        pixels: Pixel format of the images.

    Attributes:
        note: Sentence on labels that are not used, or "".

    Raises:
        UserError: A label is out of range.
    """

    note: str = ""

    def __init__(self, count: int, labels: Labels, classes: Sequence[str], pixels: PixelFormat) -> None:
        self.labels, self.classes, self.pixels = checked_labels(labels, count, classes), tuple(classes), pixels

    def file(self, index: int) -> decode.Bytes:
        """Return the bytes of an image's file, (bytes,) uint8.

        Raises:
            Unreadable: The file does not exist or cannot be read.
        """
        raise NotImplementedError

    @cached_property
    def contents(self) -> str:
        """Return the sha256 of the checksums of all files."""

        def checksums(start: int) -> str:
            return " ".join(map(self.content, range(start, min(start + _TASK, len(self)))))

        parts = read_ahead(checksums, range(0, len(self), _TASK), _THREADS)
        return hashlib.sha256(" ".join(part for _, part in parts).encode()).hexdigest()

    def _with_labels(self, digest: str) -> str:
        """Return the sha256 of a checksum, the class names and the labels; without labels, the checksum."""
        if self.labels is None:
            return digest
        with_labels = hashlib.sha256(json.dumps([digest, self.classes]).encode())
        with_labels.update(self.labels.contiguous().numpy().data)
        return with_labels.hexdigest()

    def read(self, index: int) -> Tensor:
        """Read and decode one image, in the pixel format of the source."""
        return decode.decode_image(self.file(index), self.name(index), self.pixels)

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
        mask_format: Classes of the masks.
        named: Whether the paths determine the labels; if not, the fingerprint covers the labels too.
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
        mask_format: MaskFormat = ANY_MASK,
        named: bool = True,
        pixels: PixelFormat = RGB,
    ) -> None:
        super().__init__(len(paths), labels, classes, pixels)
        self.named, self.masks, self.paths = named, masks, [os.fspath(path) for path in paths]
        self.mask_format = mask_format
        self.mask_classes = () if masks is None else tuple(mask_format.mask_values)

    def __len__(self) -> int:
        return len(self.paths)

    def file(self, index: int) -> decode.Bytes:
        """Return the bytes of an image's file, (bytes,) uint8."""
        return decode.read_file(self.paths[index])

    def name(self, index: int) -> str:
        """Return the path of an image."""
        return self.paths[index]

    def content(self, index: int) -> str:
        """Return the checksum of an image's file, and of its mask if there are masks."""
        content = checksum_of(self.paths[index])
        return content if self.masks is None else f"{content} {checksum_of(self.masks[index])}"

    def inner_name(self, index: int) -> str:
        """Return the path of an image below the common folder of all images."""
        return os.path.relpath(self.paths[index], self._common_folder)

    @cached_property
    def _common_folder(self) -> str:
        paths = [*map(os.path.abspath, self.paths)]
        ends = min(paths), max(paths)  # the first and the last path in order share only what all paths share
        return os.path.commonpath([os.path.dirname(path) for path in ends])

    def mask(self, index: int) -> Tensor | None:
        """Return the mask of an image, (h, w) uint8, or None without masks.

        Raises:
            Unreadable: The mask is damaged, has an unknown class, or has another size than the image in its EXIF
                orientation.
        """
        if self.masks is None:
            return None
        mask = decode.load_mask(self.masks[index], self.mask_format)
        size = decode.upright_size(self.paths[index]) or tuple(self.read(index).shape[1:])
        if size != mask.shape:
            (h, w), (height, width) = mask.shape, size
            reason = f"has {w}x{h} pixels, and the image {width}x{height} in its EXIF orientation"
            raise Unreadable(self.masks[index], reason)
        return mask

    @cached_property
    def fingerprint(self) -> str:
        """Return the sha256 of names below the common folder, of sizes, and of labels that paths do not determine."""
        digest = digest_of(map(self.inner_name, range(len(self))), map(size_of, self.paths))
        return digest if self.named else self._with_labels(digest)

    def take(self, indices: Tensor) -> "Files":
        """Return the source of the files at `indices`, in that order."""
        paths = [self.paths[i] for i in indices.tolist()]
        labels = None if self.labels is None else self.labels[indices]
        masks = None if self.masks is None else [self.masks[i] for i in indices.tolist()]
        taken = Files(paths, labels, self.classes, masks=masks, mask_format=self.mask_format, pixels=self.pixels)
        taken.named = self.named
        return taken
