"""Pictures of attention: the mean distance of each head, and the attention maps (paper, Figures 6, 7, 11, 14).

Letters: b images, h, w pixels, or h heads of l layers, n patches of a grid.
"""

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
import torch.nn.functional as F
from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from ssvit.figures.style import COLORS, INK, baseline, canvas, fitted, panels, scale_bar, show, tidy

_TILE, _GAP, _LINE, _SIZE = 180, 10, 26, 7  # dots: a picture's longer side, between two, a line; points of its text

_WIDE = 600  # dots of a sheet at least, for its last line
_COLORS = colormaps["viridis"]


def plot_distances(distances: Mapping[str, Tensor], uniform: float) -> Figure:
    """Each head's mean attention distance over the depth: {name of an encoder: (l, h) in pixels}, the first in front.

    uniform: the distance of a head that attends to all patches alike.
    """
    figure, (axis,) = panels(1, 6.4, 4)
    colors = (COLORS["model"], COLORS["model"]), ("white", COLORS["replaced"])  # inside, and around it
    apart = 0.16 * (len(distances) - 1)  # layers between the two, so that neither hides the other
    for (name, values), (face, edge), side in zip(distances.items(), colors, (-0.5, 0.5), strict=False):
        depth, heads = values.shape
        layers = np.repeat(np.arange(1, depth + 1), heads) + side * apart
        label = f"a head of {fitted(name, 8, 260)}"
        axis.scatter(layers, values.flatten().numpy(), s=24, label=label, zorder=3, facecolors=face, edgecolors=edge)
    baseline(axis, uniform, "all patches alike", "--", "{:.1f}")
    tidy(axis, "layer", "mean attention distance (pixels)", legend=False)
    locator = axis.xaxis.get_major_locator()
    assert isinstance(locator, MaxNLocator)
    locator.set_params(integer=True)
    axis.set_ylim(0, 1.08 * max(uniform, *(values.max().item() for values in distances.values())) or 1)
    figure.legend(loc="outside upper left", ncols=3, frameon=False, fontsize=8)
    return figure


def plot_rollout(images: Tensor, attention: Tensor, grid: tuple[int, int], names: Sequence[str]) -> Figure:
    """Each image (b, 3, h, w) in [0, 1], the same as bright as it is attended to, (b, n), and the attention alone."""
    height, width = images.shape[2:]
    size = height, width
    smooth = F.interpolate(attention.float().unflatten(1, grid)[:, None], size, mode="bilinear", align_corners=False)
    lit = images * (smooth / smooth.amax((2, 3), keepdim=True))
    columns = {"image": _pixels(images), "attended to": _pixels(lit), "attention": _colored(attention, grid, size)}
    return _sheet(columns, names, {"attention": _range(attention)}, blocks=2 if len(images) > 3 else 1)


def plot_heads(images: Tensor, attention: Tensor, grid: tuple[int, int], names: Sequence[str], layer: int) -> Figure:
    """Each image (b, 3, h, w) in [0, 1] beside what the heads of a layer attend to in it, (b, h, n)."""
    height, width = images.shape[2:]
    size = height, width
    maps = {f"head {head}": _colored(one, grid, size) for head, one in enumerate(attention.unbind(1), start=1)}
    ranges = dict(zip(maps, map(_range, attention.unbind(1)), strict=True))
    blocks = 2 if len(images) > 3 and len(maps) < 6 else 1
    return _sheet({f"layer {layer}": _pixels(images), **maps}, names, ranges, blocks=blocks)


def _pixels(images: Tensor) -> np.ndarray:
    return images.movedim(1, -1).numpy()


def _colored(attention: Tensor, grid: tuple[int, int], size: tuple[int, int]) -> np.ndarray:
    """A square for each patch, from the least attention to the most: (b, n) -> (b, *size, 3)."""
    maps = attention.float().unflatten(1, grid)
    low, high = maps.amin((1, 2), keepdim=True), maps.amax((1, 2), keepdim=True)
    shares = (maps - low) / (high - low).clamp(min=1e-12)
    shares = shares.repeat_interleave(size[0] // grid[0], 1).repeat_interleave(size[1] // grid[1], 2)
    return _COLORS(shares.numpy())[..., :3]


def _range(attention: Tensor) -> list[str]:
    """The least and the most of each map, (b, n), where attention to all patches alike is 1."""
    scaled = attention.float() * attention.shape[1]
    return [f"{low:.1f} to {high:.1f}" for low, high in zip(scaled.amin(1), scaled.amax(1), strict=True)]


def _sheet(
    columns: Mapping[str, np.ndarray], names: Sequence[str], ranges: Mapping[str, Sequence[str]], *, blocks: int
) -> Figure:
    """Columns of pictures (b, h, w, 3) below their titles, in blocks side by side; each row over its image's name.

    ranges: by the title of a column of maps, what stands under each map. The colours' scale is below all.
    """
    b, h, w = next(iter(columns.values())).shape[:3]
    tall, wide = (_TILE * side / max(h, w) for side in (h, w))
    rows = -(-b // blocks)
    row, column = tall + _LINE + _GAP, wide + _GAP
    block = len(columns) * column + 3 * _GAP
    bottom = rows * row + _LINE + 2 * _GAP
    figure, axis = canvas(max(blocks * block - 2 * _GAP, _WIDE), bottom + 2 * _LINE)
    write = partial(axis.text, fontsize=_SIZE, color=INK, va="center")
    for number, name in enumerate(names):
        left, y = _GAP + number // rows * block, _LINE + _GAP + number % rows * row
        for place, (title, pictures) in enumerate(columns.items()):
            x = left + place * column
            show(axis, pictures[number], x, y, wide, tall)
            if number % rows == 0:
                write(x + wide / 2, (_LINE + _GAP) / 2, title, ha="center")
            if title in ranges:
                write(x + wide / 2, y + tall + _LINE / 2 + 2, ranges[title][number], ha="center")
        write(left, y + tall + _LINE / 2 + 2, fitted(name, _SIZE, (len(columns) - len(ranges)) * column - _GAP))
    scale_bar(axis, _COLORS, _GAP, bottom + _LINE / 2, ("least attention in a map", "most"), "")
    write(_GAP, bottom + 1.5 * _LINE, "under a map: both ends, where attention to all patches alike is 1")
    return figure
