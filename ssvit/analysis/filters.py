"""Compute principal components of the patch embedding's filters (Dosovitskiy et al. 2021, Figure 7, left).

Shapes use d width, c channels, p, q height and width of a patch, m components.
"""

from typing import NamedTuple

import torch
from einops import rearrange
from torch import Tensor

from ssvit.errors import UserError
from ssvit.figures.display import Display
from ssvit.figures.pictures import Gallery, Picture, in_rows
from ssvit.models.vit import ViT

COMPONENTS = 28  # number of components in the paper
_ACROSS = 7  # components in a row


class Components(NamedTuple):
    """Store the first components, (m, c, p, q), of unit length, and their shares of the variance, (m,)."""

    filters: Tensor
    shares: Tensor


def filters(encoder: ViT) -> Tensor:
    """Return the filters of the patch embedding with respect to unnormalised pixels, (d, c, p, q).

    Raises:
        UserError: If the patch embedding is not a single linear map.
    """
    if encoder.stem is not None:
        raise UserError("filters: not available, since a hybrid embeds its patches by convolutions")
    p, q = encoder.patch_size
    weight = rearrange(encoder.patch.weight.detach(), "d (c p q) -> d c p q", p=p, q=q)
    return weight / encoder.std[:, None, None]


def components(filters: Tensor, count: int = COMPONENTS) -> Components:
    """Return the first principal components of filters (d, c, p, q), at most `count`.

    Signs are such that the entry of largest magnitude is positive.
    """
    flat = filters.flatten(1).double()
    flat = flat - flat.mean(0)
    values, rows = torch.linalg.svd(flat, full_matrices=False)[1:]
    count = min(count, len(flat) - 1, flat.shape[1])
    rows = rows[:count]
    rows = rows * rows.gather(1, rows.abs().argmax(1, keepdim=True)).sign()
    variance = values.square()
    return Components(rows.unflatten(1, filters.shape[1:]), variance[:count] / variance.sum())


def plot(principal: Components, display: Display) -> Gallery:
    """Return the components as images from minimum (black) to maximum (white), with their shares of variance."""
    low, high = (end((1, 2, 3), keepdim=True) for end in (principal.filters.amin, principal.filters.amax))
    pictures = display.rgb((principal.filters - low) / (high - low).clamp(min=1e-12))
    shown = [
        Picture(picture, (f"{100 * share:.1f} %",)) for picture, share in zip(pictures, principal.shares, strict=True)
    ]
    explained = f"{len(shown)} explain {100 * principal.shares.sum():.1f} % of the variance"
    colors = "; red, green and blue: the weights of these channels" if principal.filters.shape[1] == 3 else ""
    return Gallery(
        in_rows(shown, _ACROSS),
        f"principal components of the filters: {explained}",
        note=f"black: minimum weight of a filter; white: maximum{colors}",
        tile=120,
    )
