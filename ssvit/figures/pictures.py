"""Arrange images (3, h, w) in [0, 1] in a gallery with captions or in a mosaic of columns.

Shapes use b images, h, w pixels, y, x rows and columns of patches.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ssvit.figures import style
from ssvit.figures.base import Figure
from ssvit.figures.style import DPI, INK, fitted
from ssvit.options import one_line

if TYPE_CHECKING:
    import matplotlib.figure
    from matplotlib.axes import Axes

GREY = 0.5  # grey level of masked patches
GREEN, RED = "#3a9d5d", "#c8372d"
_GAP, _LINE, _SIZE, _FRAME = 14, 24, 7, 5  # dots between images and of a line of text, points of text, dots of a frame
_MAT = 0.945


class Picture(NamedTuple):
    """Describe an image of a gallery, its caption lines, and the colour of captions and frame (None: no frame)."""

    image: Tensor
    captions: Sequence[str] = ()
    color: str | None = None


@dataclass(frozen=True)
class Gallery(Figure):
    """Show rows of images of any size in square tiles, with captions.

    Attributes:
        rows: The pictures of each row.
        title: The line above the images.
        titles: Titles of the columns; none by default.
        note: The line below the images.
        tile: Side of a tile in dots.
    """

    rows: Sequence[Sequence[Picture]]
    title: str = ""
    titles: Sequence[str] = ()
    note: str = ""
    tile: int = 170

    def draw(self) -> "matplotlib.figure.Figure":
        """Draw the gallery."""
        lines = max((len(picture.captions) for row in self.rows for picture in row), default=0)
        top = _GAP + _LINE * (bool(self.title) + bool(self.titles))
        column, row = self.tile + _GAP, self.tile + lines * _LINE + _GAP
        longest = max(map(len, (self.title, self.note)))
        width = max(_GAP + column * max(map(len, self.rows), default=0), 11 * longest)
        height = top + row * len(self.rows) + _LINE * bool(self.note) + _GAP
        pixels = np.ones((height, width, 3), np.float32)
        figure, axis = _canvas(width, height)

        def write(x: float, y: float, text: str, color: str | None = None, align: str = "center") -> None:
            axis.text(x, y, one_line(text), ha=align, va="center", fontsize=_SIZE, color=color or INK)

        write(_GAP, _GAP / 2 + _LINE / 2, self.title, align="left")
        for place, name in enumerate(self.titles):
            write(_GAP + place * column + self.tile / 2, top - _LINE / 2, fitted(name, _SIZE, self.tile))
        for number, pictures in enumerate(self.rows):
            for place, picture in enumerate(pictures):
                x, y = _GAP + place * column, top + number * row
                self._place(pixels[y : y + self.tile, x : x + self.tile], picture, axis, x, y)
                for line, text in enumerate(picture.captions):
                    below = y + self.tile + (line + 0.7) * _LINE
                    write(x + self.tile / 2, below, fitted(text, _SIZE, self.tile), picture.color)
        write(_GAP, height - _LINE / 2 - _GAP / 2, self.note, align="left")
        axis.imshow(pixels, extent=(0, width, height, 0), interpolation="nearest")
        return figure

    def _place(self, square: np.ndarray, picture: Picture, axis: "Axes", x: int, y: int) -> None:
        """Draw an image at the centre of its tile, enlarged by nearest neighbour or reduced, with its frame.

        Args:
            square: Pixels of the tile, modified in place.
            picture: The image.
            axis: Axis of the figure.
            x: Left edge of the tile in dots.
            y: Upper edge of the tile in dots.
        """
        square[:] = _MAT
        sides = picture.image.shape[1:]
        h, w = (max(1, round(self.tile * side / max(sides))) for side in sides)
        enlarged = 2 * max(sides) <= self.tile
        how = {"mode": "nearest"} if enlarged else {"mode": "bilinear", "antialias": True}
        image = F.interpolate(picture.image[None].float(), (h, w), **how)[0].movedim(0, -1).clamp(0, 1).numpy()
        top, left = (self.tile - h) // 2, (self.tile - w) // 2
        square[top : top + h, left : left + w] = image
        if picture.color is not None:
            from matplotlib.patches import Rectangle

            out = _FRAME / 2 + 1  # one dot for anti-aliasing, so that the frame does not cover pixels
            corner, side = (x - out, y - out), self.tile + 2 * out
            axis.add_patch(
                Rectangle(corner, side, side, fill=False, edgecolor=picture.color, linewidth=72 * _FRAME / DPI)
            )


@dataclass(frozen=True)
class Mosaic(Figure):
    """Show columns of images (b, 3, h, w) of several kinds, in two blocks for more than three images.

    Attributes:
        columns: The images of each kind, by its title.
        legend: Colours by label, as grey levels of matplotlib or RGB colours.
        frames: For labels of the legend, the patches with a frame in its colour, (b, y, x) bool.
        framed: The title of the column that has these frames.
    """

    columns: Mapping[str, Tensor]
    legend: Mapping[str, str | tuple[float, float, float]] = field(default_factory=dict)
    frames: Mapping[str, Tensor] = field(default_factory=dict)
    framed: str = ""

    def draw(self) -> "matplotlib.figure.Figure":
        """Draw the mosaic with its legend."""
        from matplotlib.colors import to_rgb
        from matplotlib.patches import Patch

        count, _, h, w = next(iter(self.columns.values())).shape
        dots, blocks = max(1, round(190 / w)), 2 if count > 3 else 1
        rows, tall, wide = -(-count // blocks), dots * h, dots * w
        block = len(self.columns) * (wide + _GAP) + 2 * _GAP
        size = rows * (tall + _GAP), blocks * block - 2 * _GAP
        pixels = np.ones((*size, 3), np.float32)
        top, bottom = 0.3 * DPI, 0.35 * DPI
        figure, (axis,) = style.framed(size[1] + _GAP, top + size[0] + bottom, (_GAP, bottom, size[1], size[0]))
        axis.set_axis_off()
        for place, (title, images) in enumerate(self.columns.items()):
            enlarged = images.repeat_interleave(dots, 2).repeat_interleave(dots, 3).movedim(1, -1).clamp(0, 1).numpy()
            for number, image in enumerate(enlarged):
                y, x = number % rows * (tall + _GAP), number // rows * block + place * (wide + _GAP)
                pixels[y : y + tall, x : x + wide] = image
                for label, patches in self.frames.items() if title == self.framed else ():
                    color, (down, across) = to_rgb(self.legend[label]), patches.shape[1:]
                    for row, column in patches[number].nonzero().tolist():
                        outline(pixels[y : y + tall, x : x + wide], row, column, tall // down, wide // across, color)
                if number % rows == 0:
                    axis.text(x + wide / 2, -0.06 * DPI, title, ha="center", va="bottom", color=INK)
        axis.imshow(pixels, interpolation="nearest")
        handles = [
            Patch(facecolor="none", edgecolor=color, label=label)
            if label in self.frames
            else Patch(color=color, label=one_line(label))
            for label, color in self.legend.items()
        ]
        figure.legend(
            handles=handles, loc="lower center", ncols=len(handles) or 1, frameon=False, fontsize=8, labelcolor=INK,
            borderaxespad=0.3, columnspacing=1.2, handlelength=1.2,
        )  # fmt: skip
        return figure


def outline(image: np.ndarray, row: int, column: int, tall: int, wide: int, color: tuple[float, ...]) -> None:
    """Draw a frame of three pixels inside a patch of an image (h, w, 3), in place.

    Args:
        image: The image.
        row: Row of the patch.
        column: Column of the patch.
        tall: Height of a patch in pixels.
        wide: Width of a patch in pixels.
        color: RGB in [0, 1].
    """
    patch = image[row * tall : (row + 1) * tall, column * wide : (column + 1) * wide]
    for edge in (patch[:3], patch[-3:], patch[:, :3], patch[:, -3:]):
        edge[:] = color


def masked(columns: Mapping[str, Tensor], *, masked_ids: Tensor, grid: tuple[int, int], note: str) -> Mosaic:
    """Return a mosaic of the last column's images with masked patches in grey, followed by all columns.

    Args:
        columns: Images (b, 3, h, w) by title.
        masked_ids: The masked patches of each image, (b, m).
        grid: Rows and columns of patches.
        note: The label of masked patches in the legend.
    """
    true = [*columns.values()][-1]
    ids = masked_ids.cpu()
    hidden = torch.zeros(len(true), grid[0] * grid[1]).scatter(1, ids, 1).view(-1, 1, *grid)
    hidden = F.interpolate(hidden, size=true.shape[2:], mode="nearest") > 0
    return Mosaic({"visible": torch.where(hidden, GREY, true), **columns}, {note: str(GREY)})


def _canvas(width: int, height: int) -> "tuple[matplotlib.figure.Figure, Axes]":
    figure, (axis,) = style.framed(width, height, (0, 0, width, height))
    axis.set(xlim=(0, width), ylim=(height, 0))
    axis.set_axis_off()
    return figure, axis
