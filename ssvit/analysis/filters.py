"""The principal components of the filters that embed a patch (paper, Figure 7, left).

Letters: d width, c channels, p, q height and width of a patch, m components.
"""

from typing import NamedTuple

import torch
from einops import rearrange
from matplotlib import colormaps
from matplotlib.figure import Figure
from torch import Tensor

from ssvit.figures.display import Display
from ssvit.figures.style import DPI, INK, canvas, scale_bar, show
from ssvit.models.vit import ViT
from ssvit.options import UserError

COMPONENTS = 28  # as many as the paper shows
_ACROSS, _TILE, _GAP, _LINE = 7, 120, 12, 24  # components in a row; dots of a longer side, between two, and of a line


class Components(NamedTuple):
    """The first components, (m, c, p, q) of length 1 each, and their share of the filters' variance, (m,)."""

    filters: Tensor
    shares: Tensor


def filters(encoder: ViT) -> Tensor:
    """The weights by which a patch's embedding multiplies the pixels, before normalisation: (d, c, p, q).

    UserError for an encoder whose patches are embedded by more than one linear map.
    """
    if encoder.stem is not None:
        raise UserError("filters: not available, since a hybrid embeds its patches by convolutions")
    p, q = encoder.patch_size
    weight = rearrange(encoder.patch.weight.detach(), "d (c p q) -> d c p q", p=p, q=q)
    return weight / encoder.std[:, None, None]


def components(filters: Tensor, count: int = COMPONENTS) -> Components:
    """The first principal components of filters (d, c, p, q), as many as there are; each one's largest entry is
    positive.
    """
    flat = filters.flatten(1).double()
    flat = flat - flat.mean(0)
    values, rows = torch.linalg.svd(flat, full_matrices=False)[1:]
    count = min(count, len(flat) - 1, flat.shape[1])
    rows = rows[:count]
    rows = rows * rows.gather(1, rows.abs().argmax(1, keepdim=True)).sign()
    variance = values.square()
    return Components(rows.unflatten(1, filters.shape[1:]), variance[:count] / variance.sum())


def plot(found: Components, display: Display) -> Figure:
    """Each component as a picture, its least entry black and its largest white, with its share of the variance."""
    low, high = (end((1, 2, 3), keepdim=True) for end in (found.filters.amin, found.filters.amax))
    pictures = display.rgb((found.filters - low) / (high - low).clamp(min=1e-12)).movedim(1, -1).numpy()
    h, w = pictures.shape[1:3]
    scale = max(1, _TILE // max(h, w))
    h, w, top = scale * h, scale * w, 0.42 * DPI
    column, row = max(w, 70) + _GAP, h + _LINE + _GAP
    bottom = -(-len(pictures) // _ACROSS) * row + top + _GAP
    figure, axis = canvas(_ACROSS * column + _GAP, bottom + _LINE)
    for number, (picture, share) in enumerate(zip(pictures, found.shares, strict=True)):
        x, y = _GAP + number % _ACROSS * column, top + number // _ACROSS * row
        show(axis, picture, x, y, w, h)
        axis.text(x + w / 2, y + h + 4, f"{100 * share:.1f} %", ha="center", va="top", fontsize=7, color=INK)
    title = (
        f"principal components of the filters: {len(pictures)} have {100 * found.shares.sum():.1f} % of the variance"
    )
    axis.text(_GAP, top / 2, title, va="center", fontsize=10, color=INK)
    ends = "least weight of a filter", "greatest"
    colors = "red, green and blue: the weights of these channels" if found.filters.shape[1] == 3 else ""
    scale_bar(axis, colormaps["gray"], _GAP, bottom, ends, colors)
    return figure
