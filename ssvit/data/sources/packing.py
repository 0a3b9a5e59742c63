"""Write the splits of a data set as shards, also after an interruption.

A split becomes a folder of tar files in the layout of WebDataset. An image is stored under its name, and its class, if
any, as a number (a/1.jpg, a/1.cls), or its multi-label classes as numbers (a/1.json). Next to each shard is its index,
which `ssvit.data.sources.shards` reads. Images keep their order. Names and keys are unique in a split, as WebDataset
requires in a shard. The number of images in a shard is determined by their sizes, so repeated runs write identical
shards.
"""

import io
import json
import os
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ssvit.data.sources import datasets_options, decode
from ssvit.data.sources.base import Data, Label, Source, Unreadable, is_multi_label, read_ahead
from ssvit.data.sources.files import Files
from ssvit.data.sources.folder import SHARD
from ssvit.data.sources.shard_folder import INDEX, ending
from ssvit.data.sources.shards import SCHEMA, Index, Row, Shards, index_path, read_index
from ssvit.engine import atomic_io
from ssvit.errors import OptionError, UserError

Progress = Callable[[int, int], None]  # called with the number of images done and of all
Packed = tuple[str, bytes]  # name of an image in its shard, and bytes of its file


def pack(data: Data, output: Path, options: datasets_options.Pack, progress: Progress) -> list[str]:
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
    for name, source in splits.items():  # shards of other images would be read as a split of these
        if source is None and (former := [*(output / name).glob(f"*{SHARD}")]):
            if not options.overwrite:
                raise OptionError("output", options.output, f"must not contain {former[0]}, a split of other images")
            _clear(output / name)
    lines, before, total = list[str](), 0, sum(len(packer.source) for packer in packers)
    for packer in packers:

        def show(done: int, before: int = before) -> None:
            progress(before + done, total)

        lines.append(packer.run(show))
        before += len(packer.source)
    return lines


def _clear(folder: Path) -> None:
    """Delete all shards in a folder."""
    for pattern in (f"*{SHARD}", f"*{INDEX}", f".*{SHARD}.part"):
        for path in folder.glob(pattern):
            path.unlink()


class _Packer:
    """Write the shards of one split."""

    def __init__(self, source: Source, folder: Path, options: datasets_options.Pack) -> None:
        self.source, self.folder, self.options = source, folder, options
        self._used = set[str]()  # names of the images, and keys of those that are stored under their name
        stored: list[object] = [options.size, options.quality, options.shard_size]
        if options.size is not None and (background := getattr(options.data, "background", None)) is not None:
            stored.append(background)
        self.plan = json.dumps([source.fingerprint, source.contents, list(source.classes), *stored])

    def check(self) -> None:
        """Check the source and the output folder before existing shards are deleted."""
        shards = self.source.shards if isinstance(self.source, Shards) else ()
        if os.path.realpath(self.folder) in {os.path.realpath(os.path.dirname(shard)) for shard in shards}:
            reason = "must not be the folder from which the images are read"
            raise OptionError("output", self.options.output, reason)
        if all(self._image(image_index) is None for image_index in range(len(self.source))):
            raise UserError(f"{self.folder}: none of the {len(self.source):,} images can be read")

    def run(self, show: Callable[[int], None]) -> str:
        """Write the remaining shards of the split and return a summary line; `show` receives the number of images."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.options.overwrite:
            _clear(self.folder)
        # The index of a shard is written before the shard is renamed to its final name.
        existing = sorted(self.folder.glob(f"*{SHARD}"))
        indices = [read_index(path) for path in existing]
        if any(index is None or index.plan != self.plan for index in indices):
            reason = f"must not contain other shards; overwrite=true replaces those of {self.folder}"
            raise OptionError("output", self.options.output, reason)
        # Shards after a missing one are written again.
        numbered = [path.name == f"{number:06d}{SHARD}" for number, path in enumerate(existing)]
        written = [index for index, is_next in zip(indices, numbered, strict=True) if index and is_next]
        done = written[-1].next if written else 0
        for index in written:
            for row in index.images:
                self._member(row.name)
        show(done)
        verb = "there already" if done == len(self.source) else "written"
        images = read_ahead(self._image, range(done, len(self.source)), self.options.workers)
        while done < len(self.source):
            written.append(self._shard(len(written), images, done, show))
            done = written[-1].next
        atomic_io.synchronise(self.folder)
        readable, size = sum(len(index.images) for index in written), sum(index.size for index in written)
        unreadable = f"; {len(self.source) - readable:,} could not be read" if readable < len(self.source) else ""
        count = f"{readable:,} images in {len(written)} shards"
        return f"{self.folder}: {count}, {size / 1e6:,.1f} MB, {verb}{unreadable}"

    def _shard(
        self, number: int, images: Iterator[tuple[int, Packed | None]], done: int, show: Callable[[int], None]
    ) -> Index:
        """Write the next shard and its index.

        Args:
            number: Number of the shard.
            images: Iterator of the remaining images.
            done: Number of images of the previous shards.
            show: Called with the number of images done.
        """
        path = self.folder / f"{number:06d}{SHARD}"
        part, rows = path.with_name(f".{path.name}.part"), list[Row]()
        with atomic_io.naming(path), open(part, "wb") as file:
            with tarfile.open(fileobj=file, mode="w", format=tarfile.GNU_FORMAT) as shard:
                for image_index, image in images:
                    done = image_index + 1
                    show(done)
                    if image is None:
                        continue
                    name, data = self._unused(image[0], image_index), image[1]
                    member = self._member(name)
                    label = self._add_label(shard, ending(member)[0], image_index)
                    rows.append(Row(name, _add(shard, member, data), len(data), label))
                    if shard.offset >= self.options.shard_size * 1_000_000:
                        break
            file.flush()
            os.fsync(file.fileno())
            size = file.tell()
        classes = () if self.source.labels is None else self.source.classes
        index = Index(rows, classes=classes, size=size, plan=self.plan, next=done)
        atomic_io.replace(index_path(path), json.dumps({"schema": SCHEMA, **vars(index)}).encode())
        part.replace(path)
        return index

    def _unused(self, name: str, index: int) -> str:
        """Return a unique name: the index of the image is appended to a name that an earlier image has."""
        stem, suffix = os.path.splitext(name)
        while name in self._used:
            stem = f"{stem}_{index}"
            name = f"{stem}{suffix}"
        return name

    def _member(self, name: str) -> str:
        """Return the path at which the image of a unique name is stored in a shard, and mark name and key as used.

        Keys with % are those of `_without_dots`, which are unique since names are.
        """
        file, key = os.path.basename(name), ending(name)[0]
        is_plain = file.count(".") == 1 and "%" not in file and key not in self._used
        self._used |= {name, key} if is_plain else {name}
        return name if is_plain else f"{_without_dots(name)}.{name.rpartition('.')[2].lower()}"

    def _add_label(self, shard: tarfile.TarFile, key: str, index: int) -> Label:
        """Add the class number or numbers of an image to a shard; return the class names, None without labels."""
        labels, classes = self.source.labels, self.source.classes
        if labels is None:
            return None
        if not is_multi_label(labels):
            number = int(labels[index])
            _add(shard, f"{key}.cls", str(number).encode())
            return classes[number]
        numbers = labels[index].nonzero()[:, 0].tolist()
        _add(shard, f"{key}.json", json.dumps({"labels": numbers}).encode())
        return tuple(classes[number] for number in numbers)

    def _image(self, index: int) -> Packed | None:
        """Return the name of an image below its folder and its file, encoded again if it is resized or not a file."""
        source, size = self.source, self.options.size
        try:
            stored = isinstance(source, Files | Shards)
            name = source.inner_name(index) if stored else f"{index:08d}.png"  # type: ignore[attr-defined]
            data = source.file(index).tobytes() if stored else None  # type: ignore[attr-defined]
            if data is not None and not Path(name).suffix and (opened := decode.header(io.BytesIO(data))):
                name = f"{name}.{str(opened.format).lower()}"
            if size is None and data is not None:
                return name, data
            image = source.read(index)
            if size is None or min(image.shape[1:]) <= size:
                return name, _encoded(image, "PNG") if data is None else data
            resized = _encoded(_resized(image, size), "JPEG", quality=self.options.quality)
            return f"{os.path.splitext(name)[0]}.jpg", resized
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


def _encoded(image: Tensor, format_name: str, **options: int) -> bytes:
    file = io.BytesIO()
    pixels = image.permute(1, 2, 0).numpy()
    Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels).save(file, format_name, **options)
    return file.getvalue()
