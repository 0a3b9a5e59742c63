"""Images of any number of channels and of any numbers: how .npy, TIFF and PNG files hold them, and what a run takes.

Letters: c channels, h, w pixels.
"""

import io
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, Any

import numpy as np
from PIL import Image

from ssvit.data.decode_options import RGB, PixelFormat
from ssvit.options import UserError

NPY = b"\x93NUMPY"
TIFF = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")  # the last two of files above 4 GB
NO_NUMBERS = "holds values that are no numbers (NaN): store a number in their place, as the least one for no data"
VALUE_LIMIT = 3 << 27  # of an image: 1.6 GB as float32
# Of Pillow's modes, what its numbers are read as: indices of a palette and single bits mean nothing by themselves.
_MODES = {"1": "L", "P": "RGB", "PA": "RGBA", "RGBa": "RGBA", "La": "LA", "YCbCr": "RGB"}


@dataclass(frozen=True)
class Moments:
    """Of each channel, (c,) float64: the mean, the sum of squared deviations from it, the least and the most value."""

    pixels: int
    mean: np.ndarray
    squares: np.ndarray
    least: np.ndarray
    most: np.ndarray

    @classmethod
    def of(cls, image: np.ndarray) -> "Moments":
        """Of an image, (c, h, w)."""
        values = image.reshape(len(image), -1).astype(np.float64)
        mean = values.mean(1)
        squares = np.square(values - mean[:, None]).sum(1)
        return cls(values.shape[1], mean, squares, values.min(1), values.max(1))

    def __add__(self, other: "Moments") -> "Moments":
        """Of both together (Chan, Golub and LeVeque 1983), without a difference of large sums."""
        pixels, apart = self.pixels + other.pixels, other.mean - self.mean
        mean = self.mean + apart * (other.pixels / pixels)
        squares = self.squares + other.squares + apart**2 * (self.pixels * other.pixels / pixels)
        return Moments(pixels, mean, squares, np.minimum(self.least, other.least), np.maximum(self.most, other.most))

    def options(self, *, is_bytes: bool, given: Sequence[float | Sequence[float]] | None = None) -> dict[str, Any]:
        """Return the options channels, range, mean and std of a data set that has these moments.

        Args:
            is_bytes: Whether the images have 8 bits, so that they need no range.
            given: The range that was applied to the values before, or None to take the minimum and maximum.
        """
        std, channels = np.sqrt(self.squares / self.pixels), len(self.mean)
        constant = self.squares == 0
        least, unit = np.zeros(channels), np.full(channels, 255.0 if is_bytes else 1.0)
        options: dict[str, Any] = {"channels": channels}
        if given is not None:
            options["range"] = given
        elif not is_bytes:
            least, unit = self.least, np.where(constant, 1, self.most - self.least)
            ends = (end.tolist() for end in (least, np.where(constant, least + 1, self.most)))
            options["range"] = [[int(value) if value.is_integer() else value for value in end] for end in ends]
        for name, values in (("mean", (self.mean - least) / unit), ("std", np.where(constant, 1, std / unit))):
            options[name] = [float(f"{value:.9g}") for value in values]
        return options


def npy(data: np.ndarray, channels: int | None) -> np.ndarray:
    """The array in a file of numpy's, (bytes,) uint8: (h, w), (c, h, w) or (h, w, c) -> (c, h, w). ValueError.

    channels: tells which axis counts them; None, or where neither does: the shorter one.
    """
    array = np.load(io.BytesIO(data.data), allow_pickle=False)
    _check(array.shape, array.dtype)
    if array.ndim not in (2, 3):
        raise ValueError(f"has the shape {array.shape}, and an image has (h, w), (c, h, w) or (h, w, c)")
    if array.ndim == 2:
        return array[None]
    first, _, last = array.shape
    return array if first == channels or (last != channels and first <= last) else np.moveaxis(array, 2, 0)


def tiff(data: np.ndarray) -> np.ndarray:
    """The first image of a TIFF file, (bytes,) uint8; bands may be pages: -> (c, h, w). ValueError."""
    with _opened_tiff(io.BytesIO(data.tobytes())) as file:
        first = file.series[0]
        _check(first.shape, first.dtype)
        channels = [axis for axis, name in enumerate(first.axes) if name not in "YX"]
        if len(channels) > 1 or len(first.axes) != len(channels) + 2:
            raise ValueError(f"has the axes {first.axes}, and an image has rows, columns and channels")
        array = first.asarray(maxworkers=1)
    return np.moveaxis(array, channels[0], 0) if channels else array[None]


def png(data: np.ndarray) -> np.ndarray:
    """The image of a PNG of 16 bits and several channels, (bytes,) uint8, which Pillow reads as 8: -> (c, h, w)."""
    width, height = (int.from_bytes(data[at : at + 4].tobytes(), "big") for at in (16, 20))
    _check((height, width, 4), np.dtype(np.uint16))
    try:
        from imagecodecs import png_decode
    except ModuleNotFoundError:
        raise UserError("needs imagecodecs: pip install 'ssvit[tiff]'") from None
    return np.moveaxis(png_decode(data.tobytes()), 2, 0)


def _opened_tiff(file: Any) -> Any:
    try:
        import tifffile
    except ModuleNotFoundError:
        raise UserError("needs tifffile: pip install 'ssvit[tiff]'") from None
    logging.getLogger("tifffile").setLevel(logging.CRITICAL)  # what is odd in a file that can be read
    return tifffile.TiffFile(file)


def bands(image: Image.Image) -> np.ndarray:
    """The numbers of what Pillow reads, (c, h, w)."""
    array = np.asarray(image.convert(_MODES[image.mode]) if image.mode in _MODES else image)
    return array[None] if array.ndim == 2 else np.moveaxis(array, 2, 0)


def grey(file: IO[bytes]) -> tuple[Moments, bool] | None:
    """Return the moments of an image without colours and whether its values are bytes, or None if it has colours.

    A JPEG is decoded at a fraction of its size if that leaves 256 pixels or more. Raises what Pillow raises.
    """
    image = Image.open(file)
    image.draft(None, (256, 256))
    array = bands(image.convert("RGB") if image.mode in ("LA", "PA", "RGBA") else image)
    return (Moments.of(array[:1]), array.dtype == np.uint8) if (array == array[0]).all() else None


def taken(array: np.ndarray, pixels: PixelFormat) -> np.ndarray:
    """An image as a run takes it: (c, h, w) of any numbers -> uint8, or float32 in [0, 1] by the range. ValueError."""
    if len(array) != pixels.channels:
        measured = " (the command normalization measures images of other channels)" if pixels == RGB else ""
        raise ValueError(f"has {len(array)} channels, and data.channels={pixels.channels}{measured}")
    if pixels.range is None:
        if array.dtype != np.uint8:
            measured = "the command normalization measures it"
            raise ValueError(f"holds {array.dtype} values, which need data.range=[least, most] ({measured})")
        return np.require(array, requirements=["C", "W"])
    # Numbers of 32 bits and more lose digits as float32 before the least one is subtracted.
    wide = np.result_type(array.dtype, np.float32)
    low, high = (np.asarray(end, wide).reshape(-1, 1, 1) for end in pixels.range)
    with np.errstate(all="ignore"):
        shares = ((array - low) / (high - low)).astype(np.float32)
    if np.isnan(shares).any():
        raise ValueError(NO_NUMBERS)
    return np.clip(shares, 0, 1, out=shares)


def _check(shape: Sequence[int], dtype: np.dtype[Any]) -> None:
    if dtype.kind not in "uif":
        raise ValueError(f"holds {dtype} values, and an image has whole or floating-point numbers")
    if math.prod(shape) > VALUE_LIMIT:
        raise ValueError(f"{math.prod(shape)} values, more than the limit of {VALUE_LIMIT}")
    if math.prod(shape) == 0:
        raise ValueError("holds no pixel")


def size(file: IO[bytes]) -> tuple[int, int]:
    """Height and width in the header of a file. Whatever its reader raises if it has none."""
    start = file.read(len(NPY))
    file.seek(0)
    if start == NPY:
        height, width = sorted(np.load(file, allow_pickle=False).shape)[-2:]
        return height, width
    if start.startswith(TIFF):
        with _opened_tiff(file) as opened:
            return opened.pages[0].imagelength, opened.pages[0].imagewidth
    image = Image.open(file)
    return image.height, image.width
