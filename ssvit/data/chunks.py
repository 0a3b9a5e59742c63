"""Images in the chunks that LitData writes, read in place like those of shards, without that library.

A chunk begins with the number of its items and their offsets; an item, with the sizes of its leaves. All these are
uint32. An image that is stored as a file lies in the chunk as it is.

Letters: n items, l leaves.
"""

import hashlib
import io
import json
import os
from collections.abc import Iterator, Sequence
from functools import cached_property

import numpy as np
from PIL import Image
from tqdm import tqdm

from ssvit.data.chunk_folder import PIXELS, Described
from ssvit.data.decode import Bytes
from ssvit.data.decode_options import RGB, PixelFormat
from ssvit.data.index import Index, Row, kept
from ssvit.data.shard_folder import PLACE
from ssvit.data.shards import Shards
from ssvit.data.source import Unreadable
from ssvit.options import UserError, printable

_FRAMED = b"LDFZ01\0\0"  # with which a chunk of compressed frames begins
_ENDINGS = ((b"\xff\xd8", "jpg"), (b"\x89PNG", "png"), (b"RIFF", "webp"), (b"GIF8", "gif"), (b"BM", "bmp"))
_MODES = ("1", "L", "LA", "RGB", "RGBA", "I;16")  # of pixels that a PNG has


class Chunks(Shards):
    """The images at `rows` of an index of chunks, whose facts say whether they are pixels."""

    def file(self, index: int) -> Bytes:
        """The file of an image; pixels as a PNG."""
        data = super().file(index)
        if not self.index.facts["pixels"]:
            return data
        try:
            width, height, letters = (int(number) for number in data[:12].view("<u4"))
            mode = data[12 : 12 + letters].tobytes().decode()
            image = Image.frombytes(mode, (width, height), data[12 + letters :].tobytes())
            written = io.BytesIO()
            (image if mode in _MODES else image.convert("RGB")).save(written, "PNG", compress_level=1)
        except (ValueError, OverflowError, MemoryError) as error:
            raise Unreadable(self.name(index), f"{error}") from None
        return np.frombuffer(bytearray(written.getvalue()), np.uint8)

    @cached_property
    def fingerprint(self) -> str:
        """sha256 of the sizes and the labels of the images, and of the sizes of the chunks."""
        shards = [size for _, size, _ in self.index.facts["shards"]]
        digest = hashlib.sha256(json.dumps([super().fingerprint, shards, self.classes]).encode())
        if self.labels is not None:
            digest.update(self.labels.contiguous().numpy().data)
        return digest.hexdigest()


def find_chunks(folder: str, described: Described, classes: Sequence[str] = (), *, pixels: PixelFormat = RGB) -> Chunks:
    """The images of a folder of chunks, labelled by `classes` or by their own. UserError if it cannot be read."""
    paths = [os.path.join(folder, chunk.name) for chunk in described.chunks]

    def stamp() -> list[list[str | int]]:
        try:
            status = [os.stat(path) for path in paths]
        except OSError as error:
            raise UserError(f"{printable(str(error.filename))}: cannot be read: {error.strerror}") from None
        return [[path, one.st_size, one.st_mtime_ns] for path, one in zip(paths, status, strict=True)]

    def made() -> Index:
        rows = tqdm(_rows(paths, described), f"read {folder}", unit=" images", delay=2, leave=False)
        are_pixels = described.kinds[described.image] == PIXELS
        return Index.of(rows, PLACE, numbered=True, shards=stamp(), pixels=are_pixels)

    key = json.dumps(["chunks", os.path.realpath(folder), described.image, described.label])
    index = kept(key, lambda index: index.facts["shards"] == stamp(), made)
    labels = index.labels(classes, root=folder)
    own = () if labels is None else tuple(classes) or index.classes
    return Chunks(paths, index, labels, own, pixels=pixels)


def _rows(paths: Sequence[str], described: Described) -> Iterator[Row]:
    """The images of chunks in their order. UserError for what is no chunk of plain items."""
    image, label = described.image, described.label
    ending = "png" if described.kinds[image] == PIXELS else None
    for number, (path, chunk) in enumerate(zip(paths, described.chunks, strict=True)):
        stem = os.path.splitext(chunk.name)[0]
        try:
            data = np.memmap(path, np.uint8, "r")
            if data[: len(_FRAMED)].tobytes() == _FRAMED:
                raise ValueError("its items are compressed")
            count = int(data[:4].view("<u4")[0])
            offsets = data[4 : 8 + 4 * count].view("<u4").astype(np.int64)
            if count != chunk.items or len(offsets) != count + 1:
                raise ValueError(f"has {count} items, and the index says {chunk.items}")
            if count and (np.diff(offsets) < 4 * len(described.kinds)).any():
                raise ValueError("its items are rows of an Arrow table: store images as files, as image=Image(path=…)")
            heads = data[offsets[:-1, None] + np.arange(4 * len(described.kinds))].view("<u4").astype(np.int64)
            starts = offsets[:-1, None] + heads.shape[1] * 4 + heads.cumsum(1) - heads
            if (starts[:, -1] + heads[:, -1] > len(data)).any():
                raise ValueError("ends before its last item")
        except (ValueError, IndexError, OSError) as error:
            raise UserError(f"{printable(path)}: is no chunk that can be read: {error}") from None
        for place in range(count):
            start, size = int(starts[place, image]), int(heads[place, image])
            own = None
            if label is not None:
                content = data[starts[place, label] : starts[place, label] + heads[place, label]].tobytes()
                is_number = described.kinds[label] == "int"
                own = (
                    str(int.from_bytes(content, "little", signed=True))
                    if is_number
                    else content.decode("utf-8", "replace")
                )
            name = f"{stem}/{place:06d}.{ending or _ending(data[start : start + 4].tobytes())}"
            yield name, size, own, (number, start)


def _ending(first: bytes) -> str:
    return next((ending for mark, ending in _ENDINGS if first.startswith(mark)), "img")
