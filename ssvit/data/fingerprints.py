"""Compute and record fingerprints of images. An evaluation compares them with its own images.

A fingerprint has 24 bytes: a hash of evenly spaced rows of the decoded pixels (at most 63), which identical images have
in common, and a perceptual hash, which differs in few bits between an image and a changed copy. The perceptual hash
contains the signs of the 128 discrete cosine coefficients of lowest frequency of the image, reduced to 32 x 32 grey
values (Zauner 2010, section 3.2.1, with signs instead of comparisons with the median).

A run folder has the fingerprints in `fingerprints.npy`, one row for each training image. Rows of images that have not
been shown yet are 0. The rows of the run whose weights were the initial weights follow.

Letters: b, n images, c channels, h, w pixels.
"""

import hashlib
import io
import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ssvit.data.augment.crop import resize
from ssvit.data.sources.base import Source, Unreadable
from ssvit.engine import atomic_io
from ssvit.errors import UserError

FILE = "fingerprints.npy"
CONTENT, BYTES = 8, 24  # bytes of the hash of the content, and of a fingerprint
_ROW = np.dtype([("content_1", "u1", CONTENT), ("picture_1", "u1", BYTES - CONTENT)])  # the names contain the version
_COMPARED = 20_000  # images that are decoded to name the first one that has changed
_INDEX = 8  # bytes of the index of an image
_SIDE = 32  # rows and columns of the grey values
_ROWS = 32  # rows of pixels, evenly spaced, that the hash of the content covers


def fingerprints(images: Tensor | Sequence[Tensor], slots: Tensor | None = None, seed: int = 0) -> Tensor:
    """Return the fingerprints of images.

    This is a transform of decoded images, as evaluations use it. The arithmetic is exact: a fingerprint does not depend
    on the other images of the batch.

    Args:
        images: (b, c, h, w), or images (c, h, w) of any size; uint8, or float32 in [0, 1].
        slots: Has no effect.
        seed: Has no effect.

    Returns:
        (b, 24) uint8: 8 bytes of the content, then 16 of the perceptual hash.
    """
    parts = [images] if isinstance(images, Tensor) else [image[None] for image in images]
    small = torch.cat([resize(part, (_SIDE, _SIDE)) for part in parts])
    grey = ((255 * small).round() if small.is_floating_point() else small).sum(1, dtype=torch.float64)
    basis, order = _cosines()
    signs = np.packbits(((basis @ grey @ basis.T).flatten(1)[:, order] > 0).numpy(), axis=1)
    content = np.frombuffer(b"".join(digest for part in parts for digest in _content(part)), np.uint8)
    return torch.from_numpy(np.concatenate([content.reshape(-1, CONTENT), signs], 1))


def _content(images: Tensor) -> list[bytes]:
    """Return the hash of the content of images (b, c, h, w)."""
    shape = repr(tuple(images.shape[1:])).encode()
    # Decoded images have the channels last in memory, so that rows are copied quickly in this order.
    rows = images[:, :, :: max(1, images.shape[2] // _ROWS)].permute(0, 2, 3, 1).contiguous().numpy()
    return [hashlib.blake2b(shape + row.tobytes(), digest_size=CONTENT).digest() for row in rows]


@cache
def _cosines() -> tuple[Tensor, Tensor]:
    """Return the cosines (frequency, pixel) as whole numbers in float64, and the order of the first 128 products."""
    frequencies = torch.arange(_SIDE)
    basis = (4096 * torch.cos(math.pi / _SIDE * frequencies[:, None] * (frequencies + 0.5))).round().double()
    order = (frequencies[:, None] + frequencies).flatten().argsort(stable=True)
    return basis, order[1 : 1 + 8 * (BYTES - CONTENT)]  # without the mean


def indexed(indices: Tensor, images: Tensor | Sequence[Tensor]) -> bytes:
    """Return the indices of images, (b,) int64, and their fingerprints as bytes, for `record`."""
    numbers = np.ascontiguousarray(indices.numpy()).view(np.uint8).reshape(-1, _INDEX)
    return np.concatenate([numbers, fingerprints(images).numpy()], 1).tobytes()


def start(folder: Path, images: int, initial: Path | None) -> bool:
    """Create the file of a new run, and return whether the run has a file.

    A run that has checkpoints and no file was started by an older version, and its record would be incomplete.

    Args:
        folder: The run folder.
        images: Number of training images whose fingerprints will be recorded.
        initial: Run folder of the initial weights, whose fingerprints are included; None: random weights.

    Raises:
        UserError: The file of `initial` is invalid, or this file cannot be written.
    """
    if not any(folder.glob("step_*")):
        parts = [np.zeros((images, BYTES), np.uint8)] if images else []
        if initial is not None and (former := read_fingerprints(initial)) is not None:
            parts.append(former)
        if parts:
            _write(folder, np.concatenate(parts))
    return (folder / FILE).exists()


def record(folder: Path, shown: bytes) -> None:
    """Add the fingerprints of images, as `indexed` returns them, to the file of a run.

    The file is replaced atomically before the checkpoint is written: a run that continues from an older checkpoint
    records the same fingerprints again.

    Raises:
        UserError: The file is invalid or cannot be written.
    """
    if (values := read_fingerprints(folder)) is None:  # a run that was started by an older version has no file
        return
    rows = np.frombuffer(shown, np.uint8).reshape(-1, _INDEX + BYTES)
    values[rows[:, :_INDEX].copy().view(np.int64)[:, 0]] = rows[:, _INDEX:]
    _write(folder, values)


def read_fingerprints(folder: Path) -> np.ndarray | None:
    """Return the fingerprints of a run, (n, 24) uint8; rows of images that have not been shown are 0.

    Returns None for a folder without fingerprints, such as that of foreign weights.

    Raises:
        UserError: The file is damaged, or was written by an incompatible version.
    """
    path = folder / FILE
    try:
        atomic_io.check_regular(path)
        values = np.load(path, allow_pickle=False)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, EOFError) as error:
        raise UserError(f"{path}: cannot be read ({error})") from None
    if values.dtype != _ROW or values.ndim != 1:
        raise UserError(f"{path}: was written by another version of ssvit, or is damaged")
    return values.view(np.uint8).reshape(-1, BYTES)


def first_difference(folder: Path, source: Source) -> str:
    """Return the name of the first image whose content differs from a run's fingerprints; "" if there is none.

    Args:
        folder: The run folder.
        source: As many images as the run has, of which up to 20,000 are decoded.
    """
    if (values := read_fingerprints(folder)) is None:
        return ""
    for index in range(min(len(source), len(values), _COMPARED)):
        if values[index].any():  # the run has shown the image
            try:
                current = fingerprints([source.read(index)]).numpy()[0]
            except Unreadable:
                return source.name(index)
            if (values[index] != current)[:CONTENT].any():
                return source.name(index)
    return ""


def _write(folder: Path, values: np.ndarray) -> None:
    file = io.BytesIO()
    np.save(file, values.reshape(-1).view(_ROW))
    try:
        atomic_io.replace(folder / FILE, file.getvalue())
    except OSError as error:
        raise UserError(f"{folder / FILE}: cannot be written ({error.strerror})") from None
