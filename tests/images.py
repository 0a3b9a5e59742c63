"""Image files of tests: numbered pictures of noise, their pixels, and the folders that hold them."""

import io
import struct
import tarfile
import zlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from PIL import Image


def picture(number: int, kind: str = "PNG", size: tuple[int, int] | None = None) -> bytes:
    """A file of noise, of 7 columns and 8 to 10 rows by default."""
    file = io.BytesIO()
    shape = (*(size or (8 + number % 3, 7)), 3)
    Image.fromarray(np.random.default_rng(number).integers(0, 256, shape, dtype=np.uint8)).save(file, kind)
    return file.getvalue()


def pixels(body: bytes) -> torch.Tensor:
    """The pixels of a file, (3, h, w) uint8."""
    return torch.from_numpy(np.array(Image.open(io.BytesIO(body)).convert("RGB"))).permute(2, 0, 1)


def png_of(height: int, width: int, rows: bytes, bits: int = 8, colour: int = 0) -> bytes:
    """A PNG with this header, whose rows, each after a byte for its filter, may be any bytes."""
    header = struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, 0)
    chunks = b""
    for kind, data in ((b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")):
        chunks += struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    return b"\x89PNG\r\n\x1a\n" + chunks


def put(path: Path, body: bytes = b"") -> Path:
    """Write a file and the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(body)
    return path


def put_set(folder: Path, count: int, size: tuple[int, int] | None = None, parts: tuple[str, ...] = ("",)) -> None:
    """Write pictures of two classes, a and b, in the folders of each part in turn: PART/CLASS/NUMBER.png."""
    for number in range(count):
        turn, part = divmod(number, len(parts))
        put(folder / parts[part] / "ab"[turn % 2] / f"{number:02}.png", picture(number, size=size))


def put_tar(path: Path, members: Mapping[str, bytes]) -> Path:
    """Write a tar file with members, by name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as file:
        for name, content in members.items():
            about = tarfile.TarInfo(name)
            about.size = len(content)
            file.addfile(about, io.BytesIO(content))
    return path


def put_grey(path: Path, grey: int, size: tuple[int, int] = (6, 6)) -> Path:
    """Write an image of one grey level, (width, height), which identifies it in tests."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (grey,) * 3).save(path)
    return path


def class_names(source) -> list[str]:
    """The class of each image of a labelled source."""
    return [source.classes[label] for label in source.labels]
