"""Shards made from a data set, each with what an interrupted command needs to go on, and shards checked afterwards.

A split becomes a folder of tar files in the layout of WebDataset: an image under its name and, where there are classes,
its class as a number (a/1.jpg, a/1.cls), or the numbers of its classes (a/1.json). Beside them lies the index that
`ssvit.data.sources.shards` reads, with checksums. The images keep their order. The number of images in a shard follows
from their bytes, so that shards are the same at each try.
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
from typing import BinaryIO, NamedTuple

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

_AHEAD = 16  # images for each thread that are read together
_PART = ".part.safetensors"  # the index of one shard, until all are made
_PLAN = ".plan"  # what the shards of a folder are made of, until all are made
_COLUMNS = (*PLACE, CHECKSUM)
Progress = Callable[[int, int], None]  # of how many are done, and all


class Packed(NamedTuple):
    """An image as it stands in a shard."""

    name: str
    data: bytes


def pack(data: Data, output: Path, own: packing_options.Pack, progress: Progress) -> list[str]:
    """Write the splits of a data set below a folder, going on from what is there; returns what they hold, in lines.

    OptionError if the folder holds shards of other images or by other options, or those that the images are read from;
    UserError if no image of a split can be read.
    """
    splits = {"train": data.train, "val": data.validation, "test": data.test}
    sources = {name: source for name, source in splits.items() if source is not None}
    packers = {name: _Packer(source, output / name, own) for name, source in sources.items()}
    shards = (shard for source in sources.values() if isinstance(source, Shards) for shard in source.shards)
    read = {os.path.realpath(os.path.dirname(shard)) for shard in shards}
    if not read.isdisjoint(os.path.realpath(packer.folder) for packer in packers.values()):
        raise OptionError("output", own.output, "is the folder that the images are read from; give another one")
    for packer in packers.values():
        packer.check()
    total, before, lines = sum(map(len, sources.values())), 0, []
    for name, packer in packers.items():

        def show(done: int, before: int = before) -> None:
            progress(before + done, total)

        lines.append(packer.run(show))
        before += len(sources[name])
        progress(before, total)
    return lines


class _Packer:
    """One split."""

    def __init__(self, source: Source, folder: Path, own: packing_options.Pack) -> None:
        self.source, self.folder, self.own = source, folder, own
        self.plan = json.dumps([source.fingerprint, list(source.classes), own.size, own.quality, own.shard_size])

    def check(self) -> None:
        """UserError if no image can be read: before shards of an earlier command are replaced by none."""
        if all(self._image(place) is None for place in range(len(self.source))):
            raise UserError(f"{self.folder}: none of the {len(self.source):,} images that it is to hold can be read")

    def run(self, show: Callable[[int], None]) -> str:
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.own.overwrite:
            for pattern in (f"*{SUFFIX}", f".*{SUFFIX}.part", f".*{_PART}", INDEX, _PLAN):
                for path in self.folder.glob(pattern):
                    path.unlink()
        plan, index = self.folder / _PLAN, self.folder / INDEX
        if index.exists() or plan.exists() or any(self.folder.glob(f"*{SUFFIX}")):
            there = Index.read(index).facts.get("plan") if index.exists() else plan.read_text() if plan.exists() else ""
            if there != self.plan:
                right = f"{self.folder} holds shards of other images or by other options: overwrite=true replaces them"
                raise OptionError("output", self.own.output, right)
        if index.exists():
            return self._told(Index.read(index), "there already")
        atomic_io.replace(plan, self.plan.encode())
        parts = [Index.read(path) for path in sorted(self.folder.glob(f".*{_PART}"))]
        done = parts[-1].facts["next"] if parts else 0
        show(done)
        images = self._images(done)
        while done < len(self.source):
            parts.append(self._shard(len(parts), images, done, show))
            done = parts[-1].facts["next"]
        joined = self._joined(parts)
        joined.write(index)
        atomic_io.synchronise(self.folder)
        for path in (*self.folder.glob(f".*{_PART}"), plan):
            path.unlink()
        return self._told(joined, "written")

    def _told(self, index: Index, words: str) -> str:
        left_out = len(self.source) - len(index)
        more = f"; {left_out:,} could not be read" if left_out else ""
        size = sum(size for _, size, _ in index.facts["shards"])
        shards = len(index.facts["shards"])
        return f"{self.folder}: {len(index):,} images in {shards} shards, {size / 1e6:,.1f} MB, {words}{more}"

    def _shard(
        self, number: int, images: Iterator[tuple[int, Packed | None]], done: int, show: Callable[[int], None]
    ) -> Index:
        """Write the next shard from the images, and its index; the latter says which image comes next."""
        path = self.folder / f"{number:06d}{SUFFIX}"
        beside = path.with_name(f".{path.name}.part")
        rows: list[Row] = []
        keys = set()
        with atomic_io.naming(path), open(beside, "wb") as file:
            written = _Hashed(file)
            with tarfile.open(fileobj=written, mode="w", format=tarfile.GNU_FORMAT) as shard:  # type: ignore[call-overload]
                for place, image in images:
                    done = place + 1
                    show(done)
                    if image is None:
                        continue
                    key, suffix = ending(image.name)
                    plain = "." not in suffix and key not in keys
                    member = (
                        image.name if plain else f"{_without_dots(image.name)}.{image.name.rpartition('.')[2].lower()}"
                    )
                    keys.add(ending(member)[0])
                    if self.source.labels is not None:
                        label = self.source.labels[place]
                        if label.ndim:
                            numbers = json.dumps({"labels": label.nonzero()[:, 0].tolist()})
                            _add(shard, f"{ending(member)[0]}.json", numbers.encode())
                        else:
                            _add(shard, f"{ending(member)[0]}.cls", str(int(label)).encode())
                    offset = _add(shard, member, image.data)
                    rows.append((image.name, len(image.data), None, (number, offset, zlib.crc32(image.data), place)))
                    if shard.offset >= self.own.shard_size * 1_000_000:
                        break
            file.flush()
            os.fsync(file.fileno())
            size = file.tell()
        beside.replace(path)
        index = Index.of(rows, (*_COLUMNS, "place"), next=done, shard=[path.name, size, written.digest])
        index.write(self.folder / f".{number:06d}{_PART}")
        return index

    def _joined(self, parts: list[Index]) -> Index:
        """The index of all shards, with the classes as the source numbers them."""

        def rows() -> Iterator[Row]:
            for part in parts:
                columns = [part.columns[name].tolist() for name in (*_COLUMNS, "place")]
                for row in range(len(part)):
                    yield part.name(row), part.size(row), None, tuple(column[row] for column in columns)

        facts = {"plan": self.plan, "shards": [part.facts["shard"] for part in parts]}
        if self.source.labels is not None:
            facts["classes"] = list(self.source.classes)
        index = Index.of(rows(), (*_COLUMNS, "place"))
        columns = {name: column for name, column in index.columns.items() if name != "place"}
        if self.source.labels is not None:
            columns["labels"] = self.source.labels[index.columns["place"]]
        return Index(columns, facts)

    def _images(self, first: int) -> Iterator[tuple[int, Packed | None]]:
        """The images from a place on, None for one that cannot be read; the next are read while some are written."""
        with ThreadPoolExecutor(self.own.workers) as pool:
            places = iter(range(first, len(self.source)))
            parts = iter(lambda: list(islice(places, _AHEAD * self.own.workers)), [])
            begun = ((part, pool.map(self._image, part)) for part in parts)
            for (part, found), _ in pairwise(chain(begun, [([], iter(()))])):
                yield from zip(part, found, strict=True)

    def _image(self, place: int) -> Packed | None:
        try:
            name, data = self._file(place)
            if self.own.size is None and data is not None:
                return Packed(name, data)
            image = self.source.read(place)
            if self.own.size is None or min(image.shape[1:]) <= self.own.size:
                return Packed(name, _encoded(image, "PNG") if data is None else data)
            name = f"{name.rpartition('.')[0]}.jpg"
            return Packed(name, _encoded(_resized(image, self.own.size), "JPEG", quality=self.own.quality))
        except Unreadable:
            return None

    def _file(self, place: int) -> tuple[str, bytes | None]:
        """The name of an image below its folder, and the bytes of its file if it has one."""
        source = self.source
        if isinstance(source, Files | Shards):
            return source.inner_name(place), source.file(place).tobytes()
        return f"{place:08d}.png", None


def _without_dots(name: str) -> str:
    """A path whose file has no dot, but %2E: it is the key of no other."""
    folder, _, file = name.rpartition("/")
    stem = file.replace("%", "%25").replace(".", "%2E")
    return f"{folder}/{stem}" if folder else stem


def _add(shard: tarfile.TarFile, name: str, data: bytes) -> int:
    """Add a member, and return where its bytes begin."""
    about = tarfile.TarInfo(name)
    about.size = len(data)
    shard.addfile(about, io.BytesIO(data))
    blocks = -(-len(data) // tarfile.BLOCKSIZE)
    return shard.offset - blocks * tarfile.BLOCKSIZE


class _Hashed:
    """A file to be written, and the sha256 of what is."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self._sha256 = file, hashlib.sha256()

    def write(self, data: bytes) -> int:
        self._sha256.update(data)
        return self.file.write(data)

    def tell(self) -> int:
        return self.file.tell()

    @property
    def digest(self) -> str:
        return self._sha256.hexdigest()


def _resized(image: Tensor, size: int) -> Tensor:
    """(3, h, w) uint8 with the shorter side of `size` pixels."""
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
    """Compare every shard and every image below a folder with their checksums. UserError if one differs, or none is."""
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
