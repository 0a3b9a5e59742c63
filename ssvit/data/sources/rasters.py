"""Read images of any number of channels and any value type from .npy, TIFF and PNG files.

Letters: c channels, h, w pixels.
"""

import io
import logging
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Any

import numpy as np
from PIL import Image

from ssvit.data.sources.base_options import Sample
from ssvit.data.sources.decode_options import RGB, PixelFormat

NPY = b"\x93NUMPY"
TIFF = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")  # the last two are BigTIFF
NANS = "contains NaNs: store a number instead, such as the minimum for missing data"
VALUE_LIMIT = 3 << 27  # values of an image: 1.6 GB as float32
_WHITE_IS_ZERO, _PALETTE = 0, 3  # photometric interpretations of TIFF
ORIENTATION, _EXTRA_BANDS = 274, 338  # tags of TIFF; the first is also a tag of EXIF
# Pillow modes that are converted before their values are read, since palette indices and single bits are no values.
_MODES = {"1": "L", "P": "RGB", "PA": "RGBA", "RGBa": "RGBA", "La": "LA", "YCbCr": "RGB"}


@dataclass(frozen=True)
class Moments:
    """Statistics of each channel.

    Attributes:
        pixels: Number of pixels.
        mean: Mean, (c,) float64.
        squares: Sum of squared deviations from the mean, (c,) float64.
        minimum: Minimum, (c,).
        maximum: Maximum, (c,).
    """

    pixels: int
    mean: np.ndarray
    squares: np.ndarray
    minimum: np.ndarray
    maximum: np.ndarray

    @classmethod
    def of_image(cls, image: np.ndarray) -> "Moments":
        """Return the statistics of an image, (c, h, w)."""
        values = image.reshape(len(image), -1).astype(np.float64)
        mean = values.mean(1)
        squares = np.square(values - mean[:, None]).sum(1)
        return cls(values.shape[1], mean, squares, values.min(1), values.max(1))

    def __add__(self, other: "Moments") -> "Moments":
        """Return the statistics of the union (Chan, Golub and LeVeque 1983), without subtracting large sums."""
        pixels, difference = self.pixels + other.pixels, other.mean - self.mean
        mean = self.mean + difference * (other.pixels / pixels)
        squares = self.squares + other.squares + difference**2 * (self.pixels * other.pixels / pixels)
        limits = np.minimum(self.minimum, other.minimum), np.maximum(self.maximum, other.maximum)
        return Moments(pixels, mean, squares, *limits)

    def options(self, *, is_bytes: bool, limits: Sequence[float | Sequence[float]] | None = None) -> dict[str, Any]:
        """Return the options channels, range, mean and std of a data set with these statistics.

        Args:
            is_bytes: Whether the images are uint8 and need no range.
            limits: Range with which the values were rescaled before; None to use minimum and maximum.
        """
        std, channels = np.sqrt(self.squares / self.pixels), len(self.mean)
        constant = self.squares == 0
        minimum, unit = np.zeros(channels), np.full(channels, 255.0 if is_bytes else 1.0)
        options: dict[str, Any] = {"channels": channels}
        if limits is not None:
            options["range"] = limits
        elif not is_bytes:
            minimum, unit = self.minimum, np.where(constant, 1, self.maximum - self.minimum)
            ends = (end.tolist() for end in (minimum, np.where(constant, minimum + 1, self.maximum)))
            options["range"] = [[int(value) if value.is_integer() else value for value in end] for end in ends]
        for name, values in (("mean", (self.mean - minimum) / unit), ("std", np.where(constant, 1, std / unit))):
            options[name] = [float(f"{value:.9g}") for value in values]
        return options


def npy(data: np.ndarray, channels: int | None) -> np.ndarray:
    """Read the array of a .npy file, (bytes,) uint8 -> (c, h, w).

    Args:
        data: Bytes of the file, with an array (h, w), (c, h, w) or (h, w, c).
        channels: Number of channels, which identifies their axis; None, or without a match: the shorter one of the
            first and the last axis.

    Raises:
        ValueError: The array is not an image.
    """
    array = np.load(io.BytesIO(data.data), allow_pickle=False)
    _check(array.shape, array.dtype)
    if array.ndim not in (2, 3):
        raise ValueError(f"has the shape {array.shape}; an image must be (h, w), (c, h, w) or (h, w, c)")
    if array.ndim == 2:
        return array[None]
    first, _, last = array.shape
    return array if first == channels or (last != channels and first <= last) else np.moveaxis(array, 2, 0)


def tiff(data: np.ndarray) -> np.ndarray:
    """Read the first image of a TIFF file, whose channels may be pages: (bytes,) uint8 -> (c, h, w).

    Entries of a palette become 8-bit colours, and grey values with white as the minimum are inverted, as by Pillow.

    Raises:
        ValueError: It has other axes than rows, columns and channels, or exceeds the limit.
    """
    with _opened_tiff(io.BytesIO(data.tobytes())) as file:
        first = file.series[0]
        _check(first.shape, first.dtype)
        channels = [axis for axis, name in enumerate(first.axes) if name not in "YX"]
        if len(channels) > 1 or len(first.axes) != len(channels) + 2:
            raise ValueError(f"has the axes {first.axes}; an image must have rows, columns and channels")
        array, page = first.asarray(maxworkers=1), first.keyframe
        orientation = page.tags.valueof(ORIENTATION)
        if page.photometric == _WHITE_IS_ZERO and array.dtype.kind == "u":
            array = (1 << page.bitspersample) - 1 - array
        if page.photometric == _PALETTE and not channels:
            array, channels = (page.colormap[:, array] >> 8).astype(np.uint8), [0]
    return _oriented(np.moveaxis(array, channels[0], 0) if channels else array[None], orientation)


def png(data: np.ndarray) -> np.ndarray:
    """Read a 16-bit PNG of several channels, which Pillow reduces to 8 bits: (bytes,) uint8 -> (c, h, w) uint16."""
    width, height = (int.from_bytes(data[at : at + 4].tobytes(), "big") for at in (16, 20))
    _check((height, width, 4), np.dtype(np.uint16))
    from imagecodecs import png_decode

    array, orientation = np.moveaxis(png_decode(data.tobytes()), 2, 0), None
    with suppress(Exception):  # damaged metadata
        orientation = Image.open(io.BytesIO(data.data)).getexif().get(ORIENTATION)
    return _oriented(array, orientation)


def _oriented(array: np.ndarray, orientation: int | None) -> np.ndarray:
    """Rotate and flip an image, (c, h, w), as an EXIF or TIFF orientation from 1 to 8 specifies."""
    array = array.swapaxes(1, 2) if orientation in (5, 6, 7, 8) else array
    return array[:, :: -1 if orientation in (3, 4, 7, 8) else 1, :: -1 if orientation in (2, 3, 6, 7) else 1]


def _opened_tiff(file: Any) -> Any:
    import tifffile

    logging.getLogger("tifffile").setLevel(logging.CRITICAL)  # silence warnings about readable files
    return tifffile.TiffFile(file)


def bands(image: Image.Image) -> np.ndarray:
    """Return the values of an image that Pillow opened, (c, h, w)."""
    array = np.asarray(image.convert(_MODES[image.mode]) if image.mode in _MODES else image)
    return array[None] if array.ndim == 2 else np.moveaxis(array, 2, 0)


def has_alpha(image: Image.Image) -> bool:
    """Return whether an image has an alpha channel or a transparent colour; in a TIFF, it must be declared as such."""
    is_declared = image.format != "TIFF" or any(image.tag_v2.get(_EXTRA_BANDS, ()))  # type: ignore[attr-defined]
    return image.has_transparency_data and image.mode[0] not in "IF" and is_declared


def opaque(image: Image.Image, background: str | None) -> Image.Image:
    """Composite an image with transparency onto a colour, #rrggbb; None: black."""
    if not has_alpha(image):
        return image
    image = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", image.size, background or "black"), image)


def grey(file: IO[bytes], background: str | None) -> tuple[Moments, bool] | None:
    """Return the statistics of an image without colours and whether it is uint8, or None if it has colours.

    A JPEG is decoded at a fraction of its size if 256 pixels or more remain. Exceptions of Pillow are not caught.

    Args:
        file: The file.
        background: Colour onto which transparent pixels are composited, as in `opaque`.
    """
    stored = Image.open(file)
    stored.draft(None, (256, 256))
    image = opaque(stored, background)
    array = bands(image.convert("RGB") if image.mode in ("LA", "PA", "RGBA") else image)
    return (Moments.of_image(array[:1]), array.dtype == np.uint8) if (array == array[0]).all() else None


def converted(array: np.ndarray, pixels: PixelFormat) -> np.ndarray:
    """Convert an image to a pixel format: (c, h, w) of any dtype -> uint8, or float32 rescaled by the range to [0, 1].

    Raises:
        ValueError: The number of channels differs, the dtype needs a range, or the values contain NaNs.
    """
    if len(array) != pixels.channels:
        remedy = " (ssvit normalization measures images of other channels)" if pixels == RGB else ""
        raise ValueError(f"has {len(array)} channels, and data.channels={pixels.channels}{remedy}")
    if pixels.range is None:
        if array.dtype != np.uint8:
            remedy = "ssvit normalization measures it"
            raise ValueError(f"has {array.dtype} values, which require data.range=[minimum, maximum] ({remedy})")
        return np.require(array, requirements=["C", "W"])
    # Values of 32 bits and more would lose precision as float32 before the minimum is subtracted.
    wide = np.result_type(array.dtype, np.float32)
    low, high = (np.asarray(end, wide).reshape(-1, 1, 1) for end in pixels.range)
    with np.errstate(all="ignore"):
        scaled = ((array - low) / (high - low)).astype(np.float32)
    if np.isnan(scaled).any():
        raise ValueError(NANS)
    return np.clip(scaled, 0, 1, out=scaled)


def _check(shape: Sequence[int], dtype: np.dtype[Any]) -> None:
    if dtype.kind not in "uif":
        raise ValueError(f"has {dtype} values; an image must have integers or floating-point numbers")
    if math.prod(shape) > VALUE_LIMIT:
        raise ValueError(f"{math.prod(shape)} values, more than the limit of {VALUE_LIMIT}")
    if math.prod(shape) == 0:
        raise ValueError("has no pixels")


def image_size(file: IO[bytes]) -> tuple[int, int]:
    """Return height and width from the header of a file; raise the exceptions of NumPy, tifffile or Pillow."""
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


def median_side(sample: Sample | None) -> int | None:
    """Return the median of the shorter sides of some images in pixels; None if no image can be read."""
    sides = []
    for opened in sample.files if sample else ():
        with suppress(Exception), opened() as file:
            sides.append(min(image_size(file)))
    return sorted(sides)[len(sides) // 2] if sides else None
