"""Decode image files to tensors, uint8 RGB by default; a damaged file raises an error and never crashes the process.

libjpeg (by way of torchvision) decodes a JPEG after its header has passed the size limit. Pillow decodes all other
formats, restricted to a short list of decoders, since torchvision's PNG decoder can crash on damaged files.
`ssvit.data.sources.rasters` reads .npy, TIFF and PNG files with other channels or value types.

Conventions: transparent pixels are composited onto `PixelFormat.background`, black by default; the first frame of an
animation is read; 16-bit grey values v become round(v / 257) in RGB; images and masks are rotated and flipped as their
EXIF orientation specifies.

Letters: h, w pixels.
"""

import errno
import io
import os
import re
import stat
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from importlib.util import find_spec
from typing import IO

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from ssvit.data.sources import rasters
from ssvit.data.sources.base import IGNORED, Unreadable
from ssvit.data.sources.decode_options import ANY_MASK, GREY, RGB, MaskFormat, PixelFormat
from ssvit.engine import private
from ssvit.errors import UserError, printable

# torchvision imports its models and, with them, torch._dynamo, which takes as long as importing torch.
if not private.load_operators("torchvision", "image*.so"):
    import torchvision.io  # noqa: F401

PIXEL_LIMIT = 1 << 27  # 134 million pixels: 400 MB decoded
BYTE_LIMIT = 1 << 29
_FORMATS: tuple[str, ...] = ("PNG", "JPEG", "BMP", "GIF", "TIFF", "WEBP", "PPM")
if find_spec("PIL.AvifImagePlugin"):  # since Pillow 11.3
    _FORMATS += ("AVIF",)
# Start-of-frame markers hold the size; 0xC4, 0xC8 and 0xCC in their range are other markers.
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
# Exclude stuffed zeros, fill bytes (FF), and markers without a length: 01 and the restarts, D0 to D7.
_MARKER = re.compile(rb"\xff([^\x00\x01\xd0-\xd7\xff])", re.DOTALL)


Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]


def load(path: str, pixels: PixelFormat = RGB) -> Tensor:
    """Read and decode a file; see `read_file` and `decode_image`."""
    return decode_image(read_file(path), path, pixels)


def decode_image(data: Bytes, name: str, pixels: PixelFormat = RGB) -> Tensor:
    """Decode the bytes of a file.

    Args:
        data: (bytes,) uint8.
        name: Name of the file for messages.
        pixels: Pixel format of the result.

    Returns:
        (3, h, w) uint8 RGB; for other pixel formats (c, h, w) uint8, or float32 in [0, 1].

    Raises:
        Unreadable: The file is damaged, too large, or does not match the pixel format.
        UserError: Too many files are open.
    """
    with _named(name):
        return _decoded(data, pixels)


def values(data: Bytes, name: str) -> np.ndarray:
    """Return the stored values of an image, (c, h, w) of any dtype, from its file; errors as for `decode_image`."""
    with _named(name):
        return _values(data)


def read_file(path: str) -> Bytes:
    """Return the bytes of a file, (bytes,) uint8; errors as for `decode_image`."""
    with _named(path), open(path, "rb", opener=without_waiting) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("not a regular file")
        if status.st_size > BYTE_LIMIT:
            raise ValueError(f"{status.st_size} bytes, more than the limit of {BYTE_LIMIT}")
        return np.fromfile(file, dtype=np.uint8)


def without_waiting(path: str, flags: int) -> int:
    """Open a file; opening a pipe does not wait for a writer."""
    return os.open(path, flags | os.O_NONBLOCK)


def read_part(path: str, start: int, size: int, name: str) -> Bytes:
    """Return `size` bytes of a file from offset `start`, (size,) uint8; errors as for `decode_image`.

    Args:
        path: Path of the file.
        start: Offset in bytes.
        size: Number of bytes.
        name: Name of the image for messages.
    """
    with _named(name), open(path, "rb", buffering=0) as file:
        file.seek(start)
        data = np.fromfile(file, np.uint8, size)
        if len(data) < size:
            raise ValueError(f"{path} ends before this image")
        return data


def header(file: IO[bytes]) -> Image.Image | None:
    """Open an image without decoding its pixels; None if Pillow cannot read it."""
    with warnings.catch_warnings(), suppress(Exception):
        warnings.simplefilter("ignore")
        return Image.open(file, formats=_FORMATS)
    return None


def is_8_bit(image: Image.Image) -> bool:
    """Return whether the header of an image, see `header`, states values of at most 8 bits."""
    # Pillow reduces colours of 16 bits to 8, with a decoder such as RGB;16B.
    return image.mode[0] not in "IF" and not any(";16" in str(tile) for tile in image.tile)  # type: ignore[attr-defined]


def extrema(data: Bytes, name: str, background: str | None) -> np.ndarray:
    """Return the extrema of an image, (4, 2): red, green, blue as of `rgb`, and alpha; errors as for `decode_image`."""

    def convert(image: Image.Image) -> np.ndarray:
        opaque, alpha = rasters.opaque(image, background), image.convert("RGBA").getchannel("A")
        return np.array([*opaque.convert("RGB").getextrema(), alpha.getextrema()])

    with _named(name):
        return _pillow(data.tobytes(), _FORMATS, convert)


def upright_size(path: str) -> tuple[int, int] | None:
    """Return height and width of an image in its EXIF orientation from the header; None where this is not possible."""
    with suppress(Exception), open(path, "rb") as file:
        image = header(file)
        if image and image.format != "TIFF":  # whether the size is swapped depends on Pillow's version
            width, height = image.size
            exif = image.getexif()
            if image.format == "JPEG":  # torchvision ignores an orientation in XMP, and Pillow does not
                exif = Image.Exif()
                exif.load(image.info.get("exif", b""))
            return (width, height) if exif.get(rasters.ORIENTATION, 1) > 4 else (height, width)
    return None


def _decoded(data: Bytes, pixels: PixelFormat) -> Tensor:
    start = data[:6].tobytes()
    if not pixels.is_photo or start.startswith(rasters.NPY):
        return torch.from_numpy(rasters.converted(_values(data, pixels.channels), pixels))
    convert = partial(rgb if pixels.channels == 3 else grey, background=pixels.background)
    if not start.startswith(b"\xff\xd8\xff"):
        try:
            return torch.from_numpy(_pillow(data.tobytes(), _FORMATS, convert)).permute(2, 0, 1)
        except (UnidentifiedImageError, ValueError):
            if not start.startswith(rasters.TIFF):
                raise
            # Channels or value types that Pillow does not support; the error explains which options they need.
            return torch.from_numpy(rasters.converted(rasters.tiff(data), pixels))
    return _jpeg(data, 3 if pixels.channels == 3 else 1)


def _values(data: Bytes, channels: int | None = None) -> np.ndarray:
    """Return the stored values of an image, (c, h, w); `channels` as for `rasters.npy`."""
    start = data[:26].tobytes()
    if start.startswith(rasters.NPY):
        return rasters.npy(data, channels)
    if start.startswith(rasters.TIFF):
        return rasters.tiff(data)
    if start.startswith(b"\xff\xd8\xff"):
        return _jpeg(data).numpy()
    if start.startswith(b"\x89PNG") and start[24:25] == b"\x10" and start[25:] != b"\0":
        return rasters.png(data)
    return _pillow(data.tobytes(), _FORMATS, rasters.bands)


def load_mask(path: str, classes: MaskFormat = ANY_MASK) -> Tensor:
    """Read a mask, a PNG of grey values, of a palette or of colours.

    Args:
        path: The file.
        classes: The classes of the values or colours; by default, values are returned as they are.

    Returns:
        The number of the class of each pixel, 255 for ignored ones, (h, w) uint8.

    Raises:
        Unreadable: The file is damaged, or has a value that is neither a class nor ignored.
    """
    data = read_file(path).tobytes()
    of_colours = any(isinstance(value, tuple) for value in classes.mask_values.values())
    with _named(path):
        # After the signature and the size come the bit depth and the colour type: 0 for grey, 3 for a palette. Pillow
        # rescales grey values of two or four bits to eight.
        is_png, is_indexed = data.startswith(b"\x89PNG"), data[25:26] == b"\3" or data[24:26] == b"\x08\0"
        if not is_png or not (is_indexed or of_colours):
            reason = "a mask must be a PNG of 8-bit grey values or of a palette's entries"
            raise ValueError(f"{reason}; of colours with data.mask_classes={{name: [r, g, b]}}" if is_png else reason)
        pixels = _pillow(data, ("PNG",), rgb if of_colours else np.array)
        if classes.mask_values:
            return torch.from_numpy(_numbered(pixels, classes))
        return torch.from_numpy(np.where(np.isin(pixels, [*classes.ignored_values]), np.uint8(IGNORED), pixels))


def _numbered(pixels: np.ndarray, classes: MaskFormat) -> np.ndarray:
    """Return the number of the class of each pixel, from values (h, w) or colours (h, w, 3); (h, w) uint8."""
    weights = np.array([1 << 16, 1 << 8, 1])
    codes = pixels if pixels.ndim == 2 else pixels @ weights
    kind = int if pixels.ndim == 2 else tuple
    numbers = {value: number for number, value in enumerate(classes.mask_values.values())}
    numbers |= dict.fromkeys(classes.ignored_values, IGNORED)
    by_code = {
        value if isinstance(value, int) else int(np.array(value) @ weights): number
        for value, number in numbers.items()
        if isinstance(value, kind)
    }
    present, inverse = np.unique(codes, return_inverse=True)
    if unknown := {*present.tolist()} - by_code.keys():
        code = min(unknown)
        value = code if kind is int else [code >> 16, code >> 8 & 255, code & 255]
        raise ValueError(f"has the value {value}, which is neither in data.mask_classes nor in data.mask_ignored")
    table = np.array([by_code[code] for code in present.tolist()], np.uint8)
    return table[inverse].reshape(codes.shape)


@contextmanager
def _named(path: str) -> Iterator[None]:
    """Convert exceptions of the block to Unreadable, or to UserError if too many files are open."""
    try:
        yield
    except Exception as error:  # decoders raise many types: struct.error, SyntaxError, MemoryError, ...
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            raise UserError(f"{printable(os.fspath(path))}: {error.strerror}; raise the limit (ulimit -n)") from None
        raise Unreadable(os.fspath(path), _reason(error)) from None


def _jpeg(data: Bytes, channels: int = 0) -> Tensor:
    """Decode a JPEG with this number of channels; 0: as it is stored."""
    _check_jpeg(data.data)
    decoded: Tensor = torch.ops.image.decode_jpeg(torch.from_numpy(data), channels, True)  # upright by its EXIF
    return decoded.contiguous()


def _check_jpeg(data: memoryview) -> None:
    """Raise ValueError for a JPEG without a frame header, or with more pixels than the limit."""
    at = 2
    while match := _MARKER.search(data, at):
        at = match.end()
        if match[1][0] in _FRAMES:
            height, width = (int.from_bytes(data[at + start : at + start + 2], "big") for start in (3, 5))
            _check_pixels(height, width)
            return
        at += int.from_bytes(data[at : at + 2], "big")
    raise ValueError("a JPEG without a frame header")


def _pillow(data: bytes, formats: tuple[str, ...], convert: Callable[[Image.Image], np.ndarray]) -> np.ndarray:
    """Decode an image with Pillow.

    Args:
        data: Bytes of the file.
        formats: Decoders that may be used.
        convert: Converts the image to an array.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow warns of unusual metadata and of sizes, which are checked below
        image = Image.open(io.BytesIO(data), formats=formats)
        _check_pixels(image.height, image.width)
        image.load()
        with suppress(Exception):  # damaged metadata
            ImageOps.exif_transpose(image, in_place=True)
        return convert(image)


def grey(image: Image.Image, background: str | None = None) -> np.ndarray:
    """Convert an image to (h, w, 1) uint8: grey values, or the luminance of colours; `background` as in `rgb`.

    Raises:
        ValueError: The values have more than 8 bits.
    """
    if image.mode[0] in "IF":
        rasters.converted(rasters.bands(image), GREY)
    plain = image.mode == "L" and not rasters.has_alpha(image)
    return np.array(image if plain else Image.fromarray(rgb(image, background)).convert("L"))[:, :, None]


def rgb(image: Image.Image, background: str | None = None) -> np.ndarray:
    """Convert an image in any mode of Pillow to (h, w, 3) uint8, transparent pixels composited onto a colour.

    Args:
        image: The image.
        background: The colour, #rrggbb; None: black.
    """
    if image.mode == "I" or image.mode.startswith("I;16"):
        grey = np.asarray(image).astype(np.int32).clip(0, 65535)
        return np.repeat(((grey + 128) // 257).astype(np.uint8)[:, :, None], 3, axis=2)
    if image.mode == "F":
        raise ValueError("has floating-point values, which require data.range")
    return np.array(rasters.opaque(image, background).convert("RGB"))


def _check_pixels(height: int, width: int) -> None:
    """Raise ValueError for an image without pixels, or with more than the limit."""
    if height * width > PIXEL_LIMIT:
        raise ValueError(f"{width}x{height} pixels, more than the limit of {PIXEL_LIMIT}")
    if height * width == 0:
        raise ValueError("has no pixels")


def _reason(error: Exception) -> str:
    """Return the reason of a decoding error as one line."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, UnidentifiedImageError):
        return "not an image of a known format"
    if isinstance(error, ModuleNotFoundError):
        return f"requires {error.name}: pip install tifffile imagecodecs"
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    return re.sub(r"^.*\.cpp:\d+, ", "", text)  # torchvision prefixes its source file
