"""Many images as one picture, since plotting an axis for each would take a second.

Letters: n images, h, w pixels.
"""

from collections.abc import Iterable, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from ssvit.figures.style import DPI, INK, framed

_LABEL, _TOP, _SIDE = 1.15 * DPI, 0.4 * DPI, 0.1 * DPI  # dots: beside a row, above and around the images


def collage(
    images: Iterable[tuple[int, int, np.ndarray]],
    size: tuple[int, int],
    dots: int,
    margins: tuple[float, float, float, float],
) -> tuple[Figure, Axes]:
    """Images (h, w, 3), each with the row and column of its first pixel, on white of `size` pixels.

    dots: of a pixel's side. margins: dots on the left, below, on the right and above.
    """
    pixels = np.ones((*size, 3), dtype=np.float32)
    for y, x, image in images:
        pixels[y : y + image.shape[0], x : x + image.shape[1]] = image.clip(0, 1)
    tall, wide = (dots * side for side in size)
    left, below, right, above = margins
    figure, (axis,) = framed(wide + left + right, tall + below + above, (left, below, wide, tall))
    axis.set_axis_off()
    axis.imshow(pixels, interpolation="nearest")
    return figure, axis


def rows(labelled: Sequence[tuple[str, Tensor]], title: str, *, across: int) -> Figure:
    """Rows of up to `across` images (n, 3, h, w) in [0, 1] of one size, each beside its label."""
    h, w = labelled[0][1].shape[2:]
    gap = max(1, w // 16)
    dots = max(1, round(110 / w))
    placed = [
        (row * (h + gap), column * (w + gap), image)
        for row, (_, images) in enumerate(labelled)
        for column, image in enumerate(images.movedim(1, -1).numpy())
    ]
    size = len(labelled) * (h + gap) - gap, across * (w + gap) - gap
    figure, axis = collage(placed, size, dots, (_LABEL + _SIDE, _SIDE, _SIDE, _TOP))
    for row, (label, _) in enumerate(labelled):
        middle = row * (h + gap) + h / 2
        axis.text(-1.5 * gap, middle, label, ha="right", va="center", color=INK, fontsize=8)
    axis.text(-0.5, -0.5 - 0.08 * DPI / dots, title, ha="left", va="bottom", color=INK, fontsize=9)
    return figure
