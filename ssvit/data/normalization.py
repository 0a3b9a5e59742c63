"""Mean, deviation and range of each channel over the images of a source, exact but for the rounding of float64.

Letters: c channels, h, w pixels.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from ssvit.data import rasters
from ssvit.data.decode import Unreadable
from ssvit.data.options import PixelFormat
from ssvit.data.source import Source
from ssvit.options import UserError

_SAMPLED = 64  # images by which the kind of all is told
_AHEAD = 8  # images for each thread that are read together


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


def measure(
    source: Source, pixels: PixelFormat, *, workers: int, progress: Callable[[int, int], None]
) -> tuple[dict[str, Any], list[str]]:
    """The options channels, range, mean and std for the images of a source, and lines on what was found.

    pixels: as they were given. With a range, what it makes of the images is measured; without, the range too, unless
    images are bytes. UserError if no image can be read, or if they differ in their channels.
    """
    read, is_bytes = _reader(source, pixels)

    def moments(place: int) -> Moments | Unreadable:
        try:
            found = Moments.of(read(place))
        except Unreadable as failure:
            return failure
        return found if np.isfinite(found.mean).all() else Unreadable(source.name(place), rasters.NO_NUMBERS)

    total: Moments | None = None
    left_out: list[Unreadable] = []
    with ThreadPoolExecutor(workers) as pool:
        for start in range(0, len(source), _AHEAD * workers):
            places = range(start, min(start + _AHEAD * workers, len(source)))
            for place, found in zip(places, pool.map(moments, places), strict=True):
                if isinstance(found, Unreadable):
                    left_out.append(found)
                elif total is None:
                    total = found
                elif len(found.mean) != len(total.mean):
                    others = f"and those before it {len(total.mean)}"
                    raise UserError(f"{source.name(place)}: has {len(found.mean)} channels, {others}")
                else:
                    total += found
            progress(places.stop, len(source))
    if total is None:
        raise UserError(f"none of the {len(source)} images can be read; the first: {left_out[0]}")
    lines = [f"{len(source) - len(left_out):,} training images, {total.pixels:,} pixels, {len(total.mean)} channels"]
    if left_out:
        lines.append(f"{len(left_out):,} images could not be read; the first: {left_out[0]}")
    std = np.sqrt(total.squares / total.pixels)
    constant = std == 0
    if constant.any():
        lines.append(f"the same value everywhere: channels {', '.join(map(str, constant.nonzero()[0] + 1))}")
    options: dict[str, Any] = {} if len(std) == 3 and is_bytes else {"channels": len(std)}
    least, unit = np.zeros(len(std)), np.full(len(std), 255.0 if is_bytes else 1.0)
    if pixels.range is not None:
        options["range"] = pixels.range
    elif not is_bytes:
        least, unit = total.least, np.where(constant, 1, total.most - total.least)
        ends = (end.tolist() for end in (least, np.where(constant, least + 1, total.most)))
        options["range"] = [[int(value) if value.is_integer() else value for value in end] for end in ends]
    for name, values in (("mean", (total.mean - least) / unit), ("std", np.where(constant, 1, std / unit))):
        options[name] = [float(f"{value:.9g}") for value in values]
    return options, lines


def _reader(source: Source, pixels: PixelFormat) -> tuple[Callable[[int], np.ndarray], bool]:
    """What reads an image's values, (c, h, w), and whether they are bytes."""

    def taken(place: int) -> np.ndarray:
        return source.read(place).numpy()

    if pixels.range is not None:
        return taken, False
    kinds = {(len(image), image.dtype == np.uint8) for image in _sample(source)}
    if pixels.channels == 3 and (3, True) in kinds:  # photographs, of which some may be grey
        return taken, True
    return source.values, all(is_bytes for _, is_bytes in kinds)


def _sample(source: Source) -> Iterator[np.ndarray]:
    for place in range(0, len(source), max(1, len(source) // _SAMPLED)):
        try:
            yield source.values(place)
        except Unreadable:
            continue
