"""Pictures of attention: how far each head looks, and what of an image is looked at (paper, Figures 6, 7, 11 and 14).

Letters: b images, c channels, h, w pixels, or h heads of l layers, n patches of a grid.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch.nn.functional as F
from matplotlib import colormaps
from matplotlib.figure import Figure
from torch import Tensor

from ssvit.figures.style import COLORS, DPI, INK, PALE, fitted, rgb

_TILE, _GAP, _LINE, _SIZE = 180, 10, 26, 7  # dots: a picture's longer side, between two, a line; points of its text


def draw_distances(found: Mapping[str, Tensor], uniform: float) -> Figure:
    """Each head's mean attention distance over the depth: {name of an encoder: (l, h) in pixels}, the first in front.

    uniform: the distance of a head that attends to all patches alike.
    """
    figure = Figure(figsize=(6.4, 4), dpi=DPI, layout="constrained")
    axis = figure.subplots()
    styles = ({"color": COLORS["model"]}, {"facecolor": "white", "edgecolor": COLORS["replaced"]})
    apart = 0.16 * (len(found) - 1)  # layers between the two, so that neither hides the other
    for (name, distances), style, side in zip(found.items(), styles, (-0.5, 0.5), strict=False):
        depth, heads = distances.shape
        layers = np.repeat(np.arange(1, depth + 1), heads) + side * apart
        label = f"a head of {fitted(name, 8, 260)}"
        axis.scatter(layers, distances.flatten().numpy(), s=24, label=label, zorder=3, **style)
    axis.axhline(uniform, color=INK, linewidth=1, linestyle="--", label=f"all patches alike: {uniform:.1f}")
    axis.set_ylabel("mean attention distance (pixels)")
    axis.set_xlabel("layer")
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.set_ylim(0, 1.08 * max(uniform, *(distances.max().item() for distances in found.values())) or 1)
    axis.grid(color=PALE, linewidth=0.8)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper left", ncols=3, frameon=False, fontsize=8)
    return figure


def over_pixels(attention: Tensor, grid: tuple[int, int], size: tuple[int, int]) -> Tensor:
    """Attention to patches laid bilinearly over the image, its greatest number 1: (b, n) -> (b, 1, *size)."""
    maps = F.interpolate(attention.float().unflatten(1, grid)[:, None], size, mode="bilinear", align_corners=False)
    return maps / maps.amax((2, 3), keepdim=True)


def draw_rollout(images: Tensor, attention: Tensor, grid: tuple[int, int], names: Sequence[str]) -> Figure:
    """Each image (b, c, h, w) uint8, beside it as bright as it is attended to, (b, n), and the attention alone."""
    size = tuple(images.shape[2:])
    pixels = images / 255
    lit = pixels * over_pixels(attention, grid, size)
    panels = np.stack([rgb(pixels), rgb(lit), _colored(attention, grid, size)], axis=1)
    return _sheet(panels, ["image", "attended to", "attention"], names, blocks=2 if len(images) > 3 else 1)


def draw_heads(images: Tensor, attention: Tensor, grid: tuple[int, int], names: Sequence[str], layer: int) -> Figure:
    """Each image (b, c, h, w) uint8 beside what the heads of a layer attend to in it, (b, h, n)."""
    size = tuple(images.shape[2:])
    maps = [_colored(attention[:, head], grid, size) for head in range(attention.shape[1])]
    titles = [f"layer {layer}", *(f"head {head}" for head in range(1, len(maps) + 1))]
    blocks = 2 if len(images) > 3 and len(maps) < 6 else 1
    return _sheet(np.stack([rgb(images / 255), *maps], axis=1), titles, names, blocks=blocks)


def _colored(attention: Tensor, grid: tuple[int, int], size: tuple[int, int]) -> np.ndarray:
    """A square for each patch, from what is attended to least to what is most: (b, n) -> (b, *size, 3)."""
    maps = attention.float().unflatten(1, grid)
    low, high = maps.amin((1, 2), keepdim=True), maps.amax((1, 2), keepdim=True)
    shares = (maps - low) / (high - low).clamp(min=1e-12)
    shares = shares.repeat_interleave(size[0] // grid[0], 1).repeat_interleave(size[1] // grid[1], 2)
    return colormaps["viridis"](shares.numpy())[..., :3]


def _sheet(panels: np.ndarray, titles: Sequence[str], names: Sequence[str], *, blocks: int) -> Figure:
    """Rows of pictures (b, panels, h, w, 3) below their titles, each over its image's name, in blocks side by side."""
    b, across, h, w = panels.shape[:4]
    tall, wide = (_TILE * side / max(h, w) for side in (h, w))
    rows = -(-b // blocks)
    line = _LINE if any(names) else 0
    row, column, block = tall + line + _GAP, wide + _GAP, across * (wide + _GAP) + 3 * _GAP
    width, height = blocks * block - 2 * _GAP, rows * row + _LINE + 2 * _GAP
    figure = Figure(figsize=(width / DPI, height / DPI), dpi=DPI)
    axis = figure.add_axes((0, 0, 1, 1))
    style = {"fontsize": _SIZE, "color": INK, "va": "center", "parse_math": False}
    for number, (pictures, name) in enumerate(zip(panels, names, strict=True)):
        left, upper = _GAP + number // rows * block, _LINE + _GAP + number % rows * row
        for place, picture in enumerate(pictures):
            x = left + place * column
            axis.imshow(picture, extent=(x, x + wide, upper + tall, upper), interpolation=_smooth(h, w))
            if number % rows == 0:
                axis.text(x + wide / 2, (_LINE + _GAP) / 2, titles[place], ha="center", **style)
        axis.text(left, upper + tall + line / 2 + 2, fitted(name, _SIZE, across * column - _GAP), **style)
    axis.set(xlim=(0, width), ylim=(height, 0))
    axis.set_axis_off()
    return figure


def _smooth(h: int, w: int) -> str:
    """Pixels that are smaller than the tile's are averaged; larger ones keep their edges."""
    return "antialiased" if max(h, w) > _TILE / 2 else "nearest"
