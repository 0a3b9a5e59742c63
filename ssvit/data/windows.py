"""Divide images into overlapping windows.

Shapes use c channels, h, w pixels.
"""

import os
from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from ssvit.data.sources.base import Source, Unreadable
from ssvit.data.sources.decode import upright_size

_MARK = "#xywh="  # W3C Media Fragments URI 1.0, section 4.2.2


class Box(NamedTuple):
    """Describe a window by its first row, its first column, its height and its width in pixels of the image."""

    top: int
    left: int
    height: int
    width: int

    def of(self, image: Tensor) -> Tensor:
        """Return the window of an image or of a mask, (…, h, w)."""
        return image[..., self.top : self.top + self.height, self.left : self.left + self.width]


def boxes(image: tuple[int, int], size: tuple[int, int], overlap: int = 0) -> Iterator[Box]:
    """Yield the fewest windows of a size that cover an image, from left to right and from top to bottom.

    Windows are evenly spaced, up to one pixel; the first begins and the last ends at the border of the image. A window
    is as high (wide) as the image if the image is less high (wide) than `size`.

    Args:
        image: Height and width of the image in pixels.
        size: Height and width of a window in pixels.
        overlap: Minimum number of pixels that adjacent windows share, less than each side of `size`.
    """
    sides = [min(pair) for pair in zip(image, size, strict=True)]
    for top, left in product(*(_starts(length, side, overlap) for length, side in zip(image, sides, strict=True))):
        yield Box(top, left, *sides)


def _starts(length: int, side: int, overlap: int) -> list[int]:
    steps = 0 if length == side else -(-(length - side) // (side - overlap))
    return [step * (length - side) // max(1, steps) for step in range(steps + 1)]


class Windows(Source):
    """Windows of the images of a source, each as an image with the label of its image.

    The name of a window is that of its image, followed by #xywh=LEFT,TOP,WIDTH,HEIGHT. The last image that was read is
    kept, so that the windows of an image decode it once. An unreadable image counts as one window.

    Args:
        source: The images.
        size: Height and width of a window in pixels.
        overlap: Minimum number of pixels that adjacent windows share.

    Attributes:
        indices: Index of the image of each window.
        boxes: Box of each window.
    """

    def __init__(self, source: Source, size: tuple[int, int], overlap: int = 0) -> None:
        self.source, self.classes, self._last = source, source.classes, (-1, torch.empty(0))
        places = [(index, box) for index in range(len(source)) for box in self._of_image(index, size, overlap)]
        self.indices, self.boxes = [index for index, _ in places], [box for _, box in places]
        self.labels = None if source.labels is None else source.labels[self.indices]

    def _of_image(self, index: int, size: tuple[int, int], overlap: int) -> Iterator[Box]:
        name = self.source.name(index)
        sides = upright_size(name) if os.path.isfile(name) else None  # the header suffices
        try:
            height, width = sides or self._image(index).shape[1:]
        except Unreadable:
            height, width = size
        return boxes((height, width), size, overlap)

    def _image(self, index: int) -> Tensor:
        if self._last[0] != index:
            self._last = -1, torch.empty(0)  # released before the next image is decoded
            self._last = index, self.source.read(index)
        return self._last[1]

    def __len__(self) -> int:
        return len(self.indices)

    def read(self, index: int) -> Tensor:
        """Return a window, (c, h, w)."""
        return self.boxes[index].of(self._image(self.indices[index]))

    def name(self, index: int) -> str:
        """Return the name of the image with the box of the window."""
        return window_name(self.source.name(self.indices[index]), self.boxes[index])

    def content(self, index: int) -> str:
        """Return the checksum of the content of the image."""
        return self.source.content(self.indices[index])


def window_name(image: str, box: Box) -> str:
    """Return the name of a window: IMAGE#xywh=LEFT,TOP,WIDTH,HEIGHT."""
    return f"{image}{_MARK}{box.left},{box.top},{box.width},{box.height}"


def parsed_name(name: str) -> tuple[str, Box | None]:
    """Return the name of an image and the box of its window; None if the name is not that of a window."""
    image, mark, text = name.rpartition(_MARK)
    numbers = text.split(",")
    if not mark or len(numbers) != 4 or not all(number.isdecimal() for number in numbers):
        return name, None
    left, top, width, height = map(int, numbers)
    return image, Box(top, left, height, width)
