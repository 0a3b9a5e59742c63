"""The similarity of position embeddings, as cosines (paper, Figure 7, centre).

Letters: n patches, s prefix tokens, d width, y, x rows and columns of patches, r, k rows and columns of tiles.
"""

import math

import torch.nn.functional as F
from einops import rearrange
from matplotlib.figure import Figure
from torch import Tensor

from ssvit.figures.style import DPI, INK, framed
from ssvit.models.vit import ViT
from ssvit.options import UserError

_SIDE, _TILES = 900, 16  # dots of the picture, about; and tiles along a side, at most


def similarity(encoder: ViT) -> Tensor:
    """Cosines of the patches' position embeddings, of the first layer that has them: (n, n).

    UserError for an encoder that adds none.
    """
    if not len(encoder.positions):
        kind = encoder.arguments["positions"]
        raise UserError(f"positions: not available, since positions={kind} gives a place no embedding of its own")
    rows = F.normalize(encoder.positions[0]()[-encoder.patches :].detach().double(), dim=1)
    return rows @ rows.T


def plot(similarity: Tensor, grid: tuple[int, int]) -> Figure:
    """A tile for each patch, at its place in the image, of its similarity with all patches: (n, n), n = y x.

    Along a side of more than 16 patches every second, or fewer, has a tile.
    """
    y, x = grid
    down, across = (-(-side // _TILES) for side in grid)
    gap = max(1, max(grid) // 8)
    tiles = similarity.reshape(y, x, y, x)[down // 2 :: down, across // 2 :: across]
    most = max(tiles.shape[:2])
    tiles = rearrange(F.pad(tiles, (0, gap, 0, gap), value=math.nan), "r k y x -> (r y) (k x)")[:-gap, :-gap]
    dots = max(1, _SIDE // max(tiles.shape))
    tall, wide = (side * dots for side in tiles.shape)
    left, right, bottom, top = 0.6 * DPI, 1.0 * DPI, 0.55 * DPI, 0.45 * DPI
    width, height = left + max(wide, 2 * DPI) + right, bottom + tall + top
    boxes = (left, bottom, wide, tall), (left + wide + 0.12 * DPI, bottom, 0.12 * DPI, tall)
    figure, (axis, bar) = framed(width, height, *boxes)
    low = similarity.min().item()
    picture = axis.imshow(tiles.numpy(), vmin=low, vmax=1, cmap="viridis", interpolation="nearest")
    for set_ticks, side, step in ((axis.set_yticks, y, down), (axis.set_xticks, x, across)):
        kept = range(step // 2, side, step)
        set_ticks([place * (side + gap) + (side - 1) / 2 for place in range(len(kept))], [str(one + 1) for one in kept])
    axis.tick_params(length=0, labelsize=7 if most > 8 else 8)
    axis.set(xlabel="column of the patch", ylabel="row of the patch")
    title = "similarity of position embeddings"
    figure.text(left / width, 1 - top / 2 / height, title, va="center", fontsize=10, color=INK)
    figure.colorbar(picture, cax=bar)
    bar.tick_params(labelsize=8)
    bar.set_ylabel("cosine")
    for one in (axis, bar):
        one.spines[:].set_visible(False)
    return figure
