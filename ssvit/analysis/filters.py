"""What the encoder sees first: the principal components of the filters that embed a patch (paper, Figure 7, left).

Letters: d width, c channels, p, q height and width of a patch, m components.
"""

import math
from typing import NamedTuple

import torch
from einops import rearrange
from matplotlib.figure import Figure
from torch import Tensor

from ssvit.figures.style import DPI, INK, rgb
from ssvit.models.vit import ViT
from ssvit.options import UserError

COMPONENTS = 28  # as many as the paper shows
_ACROSS, _TILE, _GAP = 7, 120, 12  # components in a row; dots of one's longer side, and between two


class Components(NamedTuple):
    """The first components, (m, c, p, q) of length 1 each, and their share of the filters' variance, (m,)."""

    filters: Tensor
    shares: Tensor


def filters(encoder: ViT) -> Tensor:
    """What each number of a patch's embedding multiplies the pixels by, before normalisation: (d, c, p, q).

    UserError for an encoder whose patches are embedded by more than one linear map.
    """
    if encoder.stem is not None:
        raise UserError("filters: not available, since a hybrid embeds its patches by convolutions")
    p, q = encoder.patch_size
    weight = rearrange(encoder.patch.weight.detach(), "d (c p q) -> d c p q", p=p, q=q)
    return weight / encoder.std[:, None, None]


def components(filters: Tensor, count: int = COMPONENTS) -> Components:
    """The principal components of filters (d, c, p, q) around their mean, the greatest first, as many as there are.

    Their sign, which is free, is that which makes the number that is furthest from zero positive.
    """
    flat = filters.flatten(1).double()
    flat = flat - flat.mean(0)
    values, rows = torch.linalg.svd(flat, full_matrices=False)[1:]
    count = min(count, len(flat) - 1, flat.shape[1])
    rows = rows[:count]
    rows = rows * rows.gather(1, rows.abs().argmax(1, keepdim=True)).sign()
    variance = values.square()
    return Components(rows.unflatten(1, filters.shape[1:]), variance[:count] / variance.sum())


def draw(found: Components) -> Figure:
    """Each component as a picture, its least number black and its greatest white, with its share of the variance."""
    low, high = (getattr(found.filters.flatten(1), end)(1)[:, None, None, None] for end in ("amin", "amax"))
    pictures = rgb((found.filters - low) / (high - low).clamp(min=1e-12))
    h, w = pictures.shape[1:3]
    scale = max(1, _TILE // max(h, w))
    rows, line, top = math.ceil(len(pictures) / _ACROSS), 24, 0.42 * DPI
    column, row = max(w * scale, 70) + _GAP, h * scale + line + _GAP
    width, height = _ACROSS * column + _GAP, rows * row + top + _GAP
    figure = Figure(figsize=(width / DPI, height / DPI), dpi=DPI)
    axis = figure.add_axes((0, 0, 1, 1))
    for number, picture in enumerate(pictures):
        left, upper = _GAP + number % _ACROSS * column, top + number // _ACROSS * row
        axis.imshow(picture, extent=(left, left + w * scale, upper + h * scale, upper), interpolation="nearest")
        share = f"{100 * found.shares[number]:.1f} %"
        axis.text(left + w * scale / 2, upper + h * scale + 4, share, ha="center", va="top", fontsize=7, color=INK)
    title = (
        f"principal components of the filters: {len(pictures)} have {100 * found.shares.sum():.1f} % of the variance"
    )
    axis.text(_GAP, top / 2, title, va="center", fontsize=10, color=INK)
    axis.set(xlim=(0, width), ylim=(height, 0))
    axis.set_axis_off()
    return figure
