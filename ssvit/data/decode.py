"""A file becomes a uint8 RGB image, or an error that names it: no file may stop or crash the process.

JPEG goes to libjpeg by way of torchvision, once its header has passed the size limit; every other format goes to
Pillow, held to a short list of decoders, since torchvision's PNG decoder can crash on damaged files.

Choices, where files leave one open: what is transparent shows black behind it; of an animation the first frame counts;
16 bits of grey become 8 by v / 257, rounded; an EXIF orientation is ignored, as torchvision's own data sets do.

Letters: h, w pixels.
"""

import io
import os
import re
import stat
import warnings

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision.io import ImageReadMode, decode_jpeg

from ssvit.options import UserError

PIXEL_LIMIT = 1 << 27  # 134 million pixels: 400 MB decoded
BYTE_LIMIT = 1 << 29
_FORMATS = ("PNG", "JPEG", "BMP", "GIF", "TIFF", "WEBP", "PPM")
# Start-of-frame markers hold the size; 0xC4, 0xC8 and 0xCC of their range mean something else.
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_BARE = frozenset({0x01, *range(0xD0, 0xD8)})  # markers without a length


class Unreadable(UserError):
    """A file that is no image, or a damaged one."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(path, reason)
        self.path, self.reason = path, reason

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


def load(path: str) -> Tensor:
    """Read an image file: (3, h, w) uint8, RGB. Unreadable if it cannot be read, is damaged, truncated or too large."""
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("no regular file")
        if status.st_size > BYTE_LIMIT:
            raise ValueError(f"{status.st_size} bytes, more than the limit of {BYTE_LIMIT}")
        data = np.fromfile(path, dtype=np.uint8)
        image = _jpeg(data) if data[:3].tobytes() == b"\xff\xd8\xff" else _pillow(data)
    except Exception as error:  # decoders raise what they like: struct.error, SyntaxError, MemoryError, ...
        raise Unreadable(os.fspath(path), _reason(error)) from None
    return image


def _jpeg(data: np.ndarray) -> Tensor:
    _check_pixels(*_jpeg_size(data.data))
    return decode_jpeg(torch.from_numpy(data), mode=ImageReadMode.RGB)


def _jpeg_size(data: memoryview) -> tuple[int, int]:
    """Height and width as the JPEG's first frame header tells them."""
    at = 2
    while at + 9 <= len(data):
        if data[at] != 0xFF or data[at + 1] in (0x00, 0xFF):
            at += 1
            continue
        marker = data[at + 1]
        if marker in _FRAMES:
            return int.from_bytes(data[at + 5 : at + 7], "big"), int.from_bytes(data[at + 7 : at + 9], "big")
        at += 2 if marker in _BARE else 2 + int.from_bytes(data[at + 2 : at + 4], "big")
    raise ValueError("a JPEG without a frame header")


def _pillow(data: np.ndarray) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow warns of odd metadata and of sizes; the limit below is ours
        image = Image.open(io.BytesIO(data.data), formats=_FORMATS)
        _check_pixels(image.height, image.width)
        image.load()
        return torch.from_numpy(_rgb(image)).permute(2, 0, 1)


def _rgb(image: Image.Image) -> np.ndarray:
    """(h, w, 3) uint8 of an image in any of Pillow's modes."""
    if image.mode == "I" or image.mode.startswith("I;16"):
        grey = np.asarray(image).astype(np.int64).clip(0, 65535)
        return np.repeat(((grey + 128) // 257).astype(np.uint8)[:, :, None], 3, axis=2)
    if image.mode == "F":
        raise ValueError("pixels are floating-point numbers, whose range nothing tells")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, (0, 0, 0, 255)), image)
    return np.array(image.convert("RGB"))


def _check_pixels(height: int, width: int) -> None:
    if height * width > PIXEL_LIMIT:
        raise ValueError(f"{width}x{height} pixels, more than the limit of {PIXEL_LIMIT}")
    if height * width == 0:
        raise ValueError("holds no pixel")


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, Image.UnidentifiedImageError):
        return "no image of a known format"
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    return re.sub(r"^.*\.cpp:\d+, ", "", text)  # torchvision puts its source file in front
