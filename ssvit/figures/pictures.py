"""Arrange images (3, h, w) in [0, 1] in a gallery with captions or in a mosaic of columns.

Shapes use b images, h, w pixels, y, x rows and columns of patches.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import NamedTuple, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ssvit.errors import one_line
from ssvit.figures import style
from ssvit.figures.base import Axes, Canvas, Figure
from ssvit.figures.style import DPI, INK, fitted

T = TypeVar("T")
GREY = 0.5  # grey level of masked patches
GREEN, RED = "#3a9d5d", "#c8372d"
_GAP, _LINE, _SIZE, _FRAME = 14, 24, 7, 5  # dots between images and of a line of text, points of text, dots of a frame
_PATCH, _NAMES = 75, 3  # dots of a colour of a legend and its gaps, and names of maximum width next to each other
_MAT = 0.945


class Picture(NamedTuple):
    """Describe an image of a gallery, its caption lines, and the colour of captions and frame (None: no frame)."""

    image: Tensor
    captions: Sequence[str] = ()
    color: str | None = None


def in_rows(items: Sequence[T], across: int) -> list[Sequence[T]]:
    """Return consecutive items in rows of `across` items; the last row may be shorter."""
    return [items[start : start + across] for start in range(0, len(items), across)]


@dataclass(frozen=True)
class Gallery(Figure):
    """Show rows of images of any size in square tiles, with captions.

    Attributes:
        rows: The pictures of each row.
        title: The line above the images.
        titles: Titles of the columns; none by default.
        note: The line below the images.
        lines: Number of lines for which there is room below the images.
        tile: Side of a tile in dots.
        blocks: Number of blocks of equally many columns, with wider gaps between them.
    """

    rows: Sequence[Sequence[Picture]]
    title: str = ""
    titles: Sequence[str] = ()
    note: str = ""
    lines: int = 1
    tile: int = 170
    blocks: int = 1

    @property
    def width(self) -> int:
        """Return the width of the figure in dots."""
        # Text in a figure is up to 10 % wider than its outline, because letters start at integer pixels.
        longest = 1.1 * max(style.width_of(one_line(line), _SIZE) for line in (self.title, self.note))
        columns = max(map(len, self.rows), default=0)
        return max(_GAP + (self.tile + _GAP) * columns + 2 * _GAP * (self.blocks - 1), math.ceil(longest) + 2 * _GAP)

    def draw(self) -> Canvas:
        """Draw the gallery."""
        from matplotlib.figure import Figure as MatplotlibFigure

        lines = max((len(picture.captions) for row in self.rows for picture in row), default=0)
        top = _GAP + _LINE * (bool(self.title) + bool(self.titles))
        column, row = self.tile + _GAP, self.tile + lines * _LINE + _GAP
        columns, width = max(map(len, self.rows), default=0), self.width
        lefts = [_GAP + index * column + index * self.blocks // columns * 2 * _GAP for index in range(columns)]
        height = top + row * len(self.rows) + _LINE * self.lines * bool(self.note) + _GAP
        pixels = np.ones((height, width, 3), np.float32)
        figure = MatplotlibFigure(figsize=(width / DPI, height / DPI), dpi=DPI)
        axis = figure.add_axes((0, 0, 1, 1))
        axis.set(xlim=(0, width), ylim=(height, 0))
        axis.set_axis_off()

        def write(x: float, y: float, text: str, color: str | None = None, align: str = "center") -> None:
            axis.text(x, y, one_line(text), ha=align, va="center", fontsize=_SIZE, color=color or INK)

        write(_GAP, _GAP / 2 + _LINE / 2, self.title, align="left")
        for left, name in zip(lefts, self.titles, strict=False):
            write(left + self.tile / 2, top - _LINE / 2, fitted(name, _SIZE, self.tile))
        for number, pictures in enumerate(self.rows):
            for index, picture in enumerate(pictures):
                x, y = lefts[index], top + number * row
                self._place(pixels[y : y + self.tile, x : x + self.tile], picture, axis, x, y)
                for line, text in enumerate(picture.captions):
                    below = y + self.tile + (line + 0.7) * _LINE
                    write(x + self.tile / 2, below, fitted(text, _SIZE, self.tile), picture.color)
        write(_GAP, height - _LINE / 2 - _GAP / 2, self.note, align="left")
        figure.figimage((255 * pixels + 0.5).astype(np.uint8), origin="upper", zorder=-1)
        return figure

    def _place(self, tile_pixels: np.ndarray, picture: Picture, axis: Axes, x: int, y: int) -> None:
        """Draw an image at the centre of its tile, enlarged by nearest neighbour or reduced, with its frame.

        Args:
            tile_pixels: Pixels of the tile, modified in place.
            picture: The image.
            axis: Axis of the figure.
            x: Left edge of the tile in pixels of the figure.
            y: Upper edge of the tile in pixels of the figure.
        """
        tile_pixels[:] = _MAT
        height_width = picture.image.shape[1:]
        h, w = (max(1, round(self.tile * side / max(height_width))) for side in height_width)
        is_enlarged = 2 * max(height_width) <= self.tile
        resampling = {"mode": "nearest"} if is_enlarged else {"mode": "bilinear", "antialias": True}
        image = F.interpolate(picture.image[None].float(), (h, w), **resampling)[0].movedim(0, -1).clamp(0, 1).numpy()
        top, left = (self.tile - h) // 2, (self.tile - w) // 2
        tile_pixels[top : top + h, left : left + w] = image
        if picture.color is not None:
            from matplotlib.patches import Rectangle

            out = _FRAME / 2 + 1  # one dot for anti-aliasing, so that the frame does not cover pixels
            corner, side = (x - out, y - out), self.tile + 2 * out
            axis.add_patch(
                Rectangle(corner, side, side, fill=False, edgecolor=picture.color, linewidth=72 * _FRAME / DPI)
            )


def heat_map(image: Tensor, values: Tensor) -> Tensor:
    """Return an image (3, h, w) in grey, half covered by the colours of values (y, x) in [0, 1]; bright is high."""
    from matplotlib import colormaps

    shown = F.interpolate(values[None, None].float(), image.shape[1:], mode="nearest")[0, 0]
    colors = torch.from_numpy(colormaps["inferno"](shown.numpy())[..., :3]).movedim(-1, 0).float()
    return (image.mean(0, keepdim=True) + colors) / 2


def outlined(image: Tensor, cells: Sequence[tuple[int, int]], grid: tuple[int, int], side: int) -> Tensor:
    """Return an image (3, h, w), resized to a longer side, with red frames around cells (row, column) of a grid."""
    h, w = (max(1, side * length // max(image.shape[1:])) for length in image.shape[1:])
    image = F.interpolate(image[None], (h, w), mode="nearest" if h > image.shape[1] else "area")[0]
    for row, column in cells:
        top, left, bottom, right = (
            row * h // grid[0],
            column * w // grid[1],
            (row + 1) * h // grid[0],
            (column + 1) * w // grid[1],
        )
        frame = torch.zeros(h, w, dtype=torch.bool)
        frame[max(0, top - _FRAME // 2) : bottom + _FRAME // 2, max(0, left - _FRAME // 2) : right + _FRAME // 2] = True
        frame[top:bottom, left:right] = False
        image[:, frame] = torch.tensor([1.0, 0.1, 0.1])[:, None]
    return image


@dataclass(frozen=True)
class Mosaic(Figure):
    """Show columns of images (b, 3, h, w) of several kinds, in two blocks for more than three images.

    Attributes:
        columns: The images of each kind, by its title.
        legend: Colours by label, as grey levels of matplotlib or RGB colours.
    """

    columns: Mapping[str, Tensor]
    legend: Mapping[str, str | tuple[float, float, float]] = field(default_factory=dict)

    def draw(self) -> Canvas:
        """Draw the mosaic with its legend."""
        from matplotlib.patches import Patch

        _, _, h, w = next(iter(self.columns.values())).shape
        rows = [[Picture(image) for image in images] for images in zip(*self.columns.values(), strict=True)]
        blocks = 2 if len(rows) > 3 else 1
        half = -(-len(rows) // blocks)
        side_by_side = [list(chain(*rows[start::half])) for start in range(half)]
        tile = max(1, round(190 / w)) * max(h, w)
        gallery = Gallery(side_by_side, titles=[*self.columns] * blocks, note=" ", tile=tile, blocks=blocks)
        room = gallery.width / max(1, min(_NAMES, len(self.legend))) - _PATCH
        names = [fitted(label, _SIZE, room) for label in self.legend]
        widest = _PATCH + max((1.1 * style.width_of(name, _SIZE) for name in names), default=0)
        across = max(1, min(len(names), int(gallery.width / widest)))
        figure = replace(gallery, lines=-(-len(names) // across)).draw()
        handles = [Patch(color=color, label=name) for name, color in zip(names, self.legend.values(), strict=True)]
        figure.legend(handles=handles, loc="lower center", ncols=across, frameon=False, fontsize=_SIZE)
        return figure


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
