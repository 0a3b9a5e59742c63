"""Measure mean, standard deviation and range of each channel over a source, exact up to the rounding of float64.

Letters: c channels, h, w pixels.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ssvit.data.sources import rasters
from ssvit.data.sources.base import Source, Unreadable, read_ahead
from ssvit.data.sources.decode_options import PixelFormat
from ssvit.data.sources.rasters import Moments
from ssvit.errors import UserError

_SAMPLED = 64  # images that are sampled to determine channels and dtype


def measure(
    source: Source, pixels: PixelFormat, *, workers: int, progress: Callable[[int, int], None]
) -> tuple[dict[str, Any], list[str]]:
    """Measure the options channels, range, mean and std for the images of a source.

    Args:
        source: The images.
        pixels: Pixel format of the options. With a range, mean and std are those of the rescaled values; without one,
            the range is measured too, unless the images are uint8.
        workers: Number of threads that read images.
        progress: Called with the number of images done and of all.

    Returns:
        The options, and lines that summarise the measurement.

    Raises:
        UserError: No image can be read, or images differ in their number of channels.
    """
    read, is_bytes = _reader(source, pixels)

    def moments(index: int) -> Moments | Unreadable:
        try:
            values = read(index)
        except Unreadable as failure:
            return failure
        if is_bytes and values.dtype != np.uint8:
            raise UserError(f"{source.name(index)}: has {values.dtype} values, and other images uint8: set data.range")
        statistics = Moments.of_image(values)
        is_finite = np.isfinite(statistics.mean).all()
        return statistics if is_finite else Unreadable(source.name(index), rasters.NANS)

    total: Moments | None = None
    unreadable: list[Unreadable] = []
    for index, image in read_ahead(moments, range(len(source)), workers):
        if isinstance(image, Unreadable):
            unreadable.append(image)
        elif total is None:
            total = image
        elif len(image.mean) != len(total.mean):
            others = f"and the images before it {len(total.mean)}"
            raise UserError(f"{source.name(index)}: has {len(image.mean)} channels, {others}")
        else:
            total += image
        progress(index + 1, len(source))
    if total is None:
        raise UserError(f"none of the {len(source)} images can be read; the first: {unreadable[0]}")
    lines = [f"{len(source) - len(unreadable):,} training images, {total.pixels:,} pixels, {len(total.mean)} channels"]
    if unreadable:
        lines.append(f"{len(unreadable):,} images could not be read; the first: {unreadable[0]}")
    if len(constant := (total.squares == 0).nonzero()[0]):
        lines.append(f"constant: channels {', '.join(map(str, constant + 1))}")
    options = total.options(is_bytes=is_bytes, limits=pixels.range)
    if options["channels"] == 3 and is_bytes:
        del options["channels"]
    return options, lines


def _reader(source: Source, pixels: PixelFormat) -> tuple[Callable[[int], np.ndarray], bool]:
    """Return a function that reads an image's values, (c, h, w), and whether they are uint8."""

    def converted(index: int) -> np.ndarray:
        return source.read(index).numpy()

    if pixels.range is not None:
        return converted, False
    formats = {(len(image), image.dtype == np.uint8) for image in _sample(source)}
    is_bytes = all(is_bytes for _, is_bytes in formats)
    if (pixels.channels == 3 and (3, True) in formats) or (pixels.channels == 1 and is_bytes):  # photographs
        return converted, True
    return source.values, is_bytes


def _sample(source: Source) -> Iterator[np.ndarray]:
    """Yield the stored values of evenly spaced readable images."""
    for index in range(0, len(source), max(1, len(source) // _SAMPLED)):
        try:
            yield source.values(index)
        except Unreadable:
            continue
