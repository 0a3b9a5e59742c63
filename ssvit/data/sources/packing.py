"""Write the splits of a data set as shards, resume an interrupted command, and verify checksums of shards.

A split becomes a folder of tar files in the layout of WebDataset. An image is stored under its name, and its class, if
any, as a number (a/1.jpg, a/1.cls), or its multi-label classes as numbers (a/1.json). Next to them is the index, with
checksums, that `ssvit.data.sources.shards` reads. Images keep their order. The number of images in a shard is
determined by their sizes, so repeated runs write identical shards.
"""

import hashlib
import io
import json
import os
import tarfile
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import chain, islice, pairwise
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ssvit import atomic_io
from ssvit.data.sources import packing_options
from ssvit.data.sources.base import Data, Source, Unreadable
from ssvit.data.sources.files import Files
from ssvit.data.sources.index import Index, Row
from ssvit.data.sources.shard_folder import CHECKSUM, INDEX, PLACE, SUFFIX, ending
from ssvit.data.sources.shards import Shards
from ssvit.options import OptionError, UserError

_AHEAD = 16  # images per thread that are read ahead
_PART = ".part.safetensors"  # suffix of the index of one shard, until all shards are written
Progress = Callable[[int, int], None]  # called with the number of images done and of all
Packed = tuple[str, bytes]  # name of an image in its shard, and bytes of its file


def pack(data: Data, output: Path, options: packing_options.Pack, progress: Progress) -> list[str]:
    """Write the splits of a data set as shards, continuing an interrupted command.

    Args:
        data: The data set.
        output: Folder with one subfolder for each split.
        options: Options of the command.
        progress: Called with the number of images done and of all.

    Returns:
        A summary line for each split.

    Raises:
        OptionError: The folder contains shards of other images or options, or the shards that are read.
        UserError: None of the images of a split can be read.
    """
    splits = {"train": data.train, "val": data.validation, "test": data.test}
    packers = [_Packer(source, output / name, options) for name, source in splits.items() if source is not None]
    for packer in packers:
        packer.check()
    total, before, lines = sum(len(packer.source) for packer in packers), 0, []
    for packer in packers:

        def show(done: int, before: int = before) -> None:
            progress(before + done, total)

        lines.append(packer.run(show))
        before += len(packer.source)
        progress(before, total)
    return lines


class _Packer:
    """Write the shards of one split."""

    def __init__(self, source: Source, folder: Path, options: packing_options.Pack) -> None:
        self.source, self.folder, self.options = source, folder, options
        stored = [options.size, options.quality, options.shard_size]
        self.plan = json.dumps([source.fingerprint, list(source.classes), *stored])

    def check(self) -> None:
        """Check the source and the output folder before existing shards are deleted."""
        shards = self.source.shards if isinstance(self.source, Shards) else ()
        if os.path.realpath(self.folder) in {os.path.realpath(os.path.dirname(shard)) for shard in shards}:
            right = "is the folder that the images are read from; give another one"
            raise OptionError("output", self.options.output, right)
        if all(self._image(place) is None for place in range(len(self.source))):
            raise UserError(f"{self.folder}: none of the {len(self.source):,} images that it is to hold can be read")

    def run(self, show: Callable[[int], None]) -> str:
        """Write the remaining shards of the split and return a summary line; `show` receives the number of images."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.options.overwrite:
            for pattern in (f"*{SUFFIX}", f".*{SUFFIX}.part", f".*{_PART}", INDEX):
                for path in self.folder.glob(pattern):
                    path.unlink()
        index = self.folder / INDEX
        parts = [Index.read(path) for path in sorted((*self.folder.glob(INDEX), *self.folder.glob(f".*{_PART}")))]
        if any(part.facts.get("plan") != self.plan for part in parts) or (
            not parts and any(self.folder.glob(f"*{SUFFIX}"))
        ):
            right = f"{self.folder} holds shards of other images or by other options: overwrite=true replaces them"
            raise OptionError("output", self.options.output, right)
        if index.exists():
            return self._summary(Index.read(index), "there already")
        # The index of a shard is written before the shard is renamed to its final name.
        parts = [part for part in parts if (self.folder / part.facts["shard"][0]).exists()]
        done = parts[-1].facts["next"] if parts else 0
        show(done)
        images = self._images(done)
        while done < len(self.source):
            parts.append(self._shard(len(parts), images, done, show))
            done = parts[-1].facts["next"]
        classes = {} if self.source.labels is None else {"classes": list(self.source.classes)}
        facts = {"plan": self.plan, "shards": [part.facts["shard"] for part in parts], **classes}
        joined = Index.joined(parts, facts)
        joined.write(index)
        atomic_io.synchronise(self.folder)
        for path in self.folder.glob(f".*{_PART}"):
            path.unlink()
        return self._summary(joined, "written")

    def _summary(self, index: Index, words: str) -> str:
        left_out = len(self.source) - len(index)
        more = f"; {left_out:,} could not be read" if left_out else ""
        size = sum(size for _, size, _ in index.facts["shards"])
        shards = len(index.facts["shards"])
        return f"{self.folder}: {len(index):,} images in {shards} shards, {size / 1e6:,.1f} MB, {words}{more}"

    def _shard(
        self, number: int, images: Iterator[tuple[int, Packed | None]], done: int, show: Callable[[int], None]
    ) -> Index:
        """Write the next shard and its index, which records the position of the image after the shard.

        Args:
            number: Number of the shard.
            images: Iterator of the remaining images.
            done: Number of images of the previous shards.
            show: Called with the number of images done.
        """
        path = self.folder / f"{number:06d}{SUFFIX}"
        beside, labels = path.with_name(f".{path.name}.part"), self.source.labels
        rows: list[Row] = []
        places, keys = list[int](), set[str]()
        with atomic_io.naming(path), open(beside, "w+b") as file:
            with tarfile.open(fileobj=file, mode="w", format=tarfile.GNU_FORMAT) as shard:
                for place, image in images:
                    done = place + 1
                    show(done)
                    if image is None:
                        continue
                    name, data = image
                    key, suffix = ending(name)
                    plain = "." not in suffix and key not in keys
                    member = name if plain else f"{_without_dots(name)}.{name.rpartition('.')[2].lower()}"
                    key = ending(member)[0]
                    if labels is not None and labels.ndim == 2:
                        numbers = json.dumps({"labels": labels[place].nonzero()[:, 0].tolist()})
                        _add(shard, f"{key}.json", numbers.encode())
                    elif labels is not None:
                        _add(shard, f"{key}.cls", str(int(labels[place])).encode())
                    rows.append((name, len(data), None, (number, _add(shard, member, data), zlib.crc32(data))))
                    keys.add(key)
                    places.append(place)
                    if shard.offset >= self.options.shard_size * 1_000_000:
                        break
            file.flush()
            os.fsync(file.fileno())
            size = file.tell()
            file.seek(0)
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        index = Index.of(rows, (*PLACE, CHECKSUM), plan=self.plan, next=done, shard=[path.name, size, digest])
        if labels is not None:
            index.columns["labels"] = labels[torch.tensor(places, dtype=torch.int64)]
        index.write(self.folder / f".{number:06d}{_PART}")
        beside.replace(path)
        return index

    def _images(self, first: int) -> Iterator[tuple[int, Packed | None]]:
        """Yield the images from a position on, None for unreadable ones, while a thread pool reads ahead."""
        with ThreadPoolExecutor(self.options.workers) as pool:
            places = iter(range(first, len(self.source)))
            parts = iter(lambda: list(islice(places, _AHEAD * self.options.workers)), [])
            begun = ((part, pool.map(self._image, part)) for part in parts)
            for (part, found), _ in pairwise(chain(begun, [([], iter(()))])):
                yield from zip(part, found, strict=True)

    def _image(self, place: int) -> Packed | None:
        """Return the name of an image below its folder and its file, encoded again if it is resized or not a file."""
        source, size = self.source, self.options.size
        try:
            stored = isinstance(source, Files | Shards)
            name = source.inner_name(place) if stored else f"{place:08d}.png"  # type: ignore[attr-defined]
            data = source.file(place).tobytes() if stored else None  # type: ignore[attr-defined]
            if size is None and data is not None:
                return name, data
            image = source.read(place)
            if size is None or min(image.shape[1:]) <= size:
                return name, _encoded(image, "PNG") if data is None else data
            resized = _encoded(_resized(image, size), "JPEG", quality=self.options.quality)
            return f"{name.rpartition('.')[0]}.jpg", resized
        except Unreadable:
            return None


def _without_dots(name: str) -> str:
    """Return a path whose file name has its dots escaped as %2E, so that it is a unique key."""
    folder, _, file = name.rpartition("/")
    stem = file.replace("%", "%25").replace(".", "%2E")
    return f"{folder}/{stem}" if folder else stem


def _add(shard: tarfile.TarFile, name: str, data: bytes) -> int:
    """Add a member to a shard and return the offset of its content in bytes."""
    about = tarfile.TarInfo(name)
    about.size = len(data)
    shard.addfile(about, io.BytesIO(data))
    blocks = -(-len(data) // tarfile.BLOCKSIZE)
    return shard.offset - blocks * tarfile.BLOCKSIZE


def _resized(image: Tensor, size: int) -> Tensor:
    """Resize an image, (3, h, w) uint8, to `size` pixels on its shorter side."""
    height, width = image.shape[1:]
    scale = size / min(height, width)
    shape = max(size, round(width * scale)), max(size, round(height * scale))
    pixels = Image.fromarray(image.permute(1, 2, 0).numpy()).resize(shape, Image.Resampling.BICUBIC)
    return torch.from_numpy(np.array(pixels)).permute(2, 0, 1)


def _encoded(image: Tensor, kind: str, **options: int) -> bytes:
    file = io.BytesIO()
    pixels = image.permute(1, 2, 0).numpy()
    Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels).save(file, kind, **options)
    return file.getvalue()


def verify(output: Path, progress: Progress) -> str:
    """Compare all shards and images below a folder with their checksums.

    Args:
        output: Folder of the shards.
        progress: Called with the number of images done and of all.

    Raises:
        OptionError: The folder contains no index with checksums.
        UserError: A shard or an image differs from its checksum.
    """
    folders = [path.parent for path in sorted((*output.glob(INDEX), *output.glob(f"*/{INDEX}")))]
    if not folders:
        raise OptionError("output", str(output), f"holds no {INDEX} of shards, beside which checksums are")
    indices = {folder: Index.read(folder / INDEX) for folder in folders}
    total, done, wrong = sum(map(len, indices.values())), 0, []
    for folder, index in indices.items():
        names = [str(folder / name) for name, *_ in index.facts["shards"]]
        for path, (_, _, digest) in zip(names, index.facts["shards"], strict=True):
            with suppress(OSError), open(path, "rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() == digest:
                    continue
            wrong.append(path)
        source = Shards(names, index)
        for place in range(len(index)):
            try:
                if not source.is_whole(place):
                    wrong.append(source.name(place))
            except Unreadable as error:
                wrong.append(error.path)
            done += 1
            progress(done, total)
    if wrong:
        raise UserError(f"{len(wrong)} shards or images differ from their checksums; the first: {wrong[0]}")
    shards = sum(len(index.facts["shards"]) for index in indices.values())
    return f"{output}: {shards} shards and {total:,} images are as their checksums say"
