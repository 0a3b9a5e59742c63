"""How alike the encoder's places are: the cosine of each position embedding with all others (paper, Figure 7, centre).

Letters: n patches, s prefix tokens, d width, y, x rows and columns of patches.
"""

import numpy as np
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor

from ssvit.figures.style import DPI, INK
from ssvit.models.vit import ViT
from ssvit.options import UserError

_SIDE, _TILES = 900, 16  # dots of the picture, about; and places along a side whose tiles are drawn, at most


def similarity(encoder: ViT) -> Tensor:
    """Cosine of the position embeddings of the patches, of the first layer that has them: (n, n).

    UserError for an encoder that adds none.
    """
    if not len(encoder.positions):
        kind = encoder.arguments["positions"]
        raise UserError(f"positions: not available, since positions={kind} gives a place no embedding of its own")
    rows = F.normalize(encoder.positions[0]()[encoder.num_prefix_tokens :].detach().double(), dim=1)
    return rows @ rows.T


def draw(similarity: Tensor, grid: tuple[int, int]) -> Figure:
    """A tile for each place, where it stands in the image, that shows how like it all places are: (n, n), n = y x.

    Along a side of more than 16 places every second, or fewer, has a tile.
    """
    y, x = grid
    tiles = similarity.reshape(y, x, y, x).numpy()
    steps = [-(-side // _TILES) for side in grid]
    kept = [range(step // 2, side, step) for side, step in zip(grid, steps, strict=True)]
    gap = max(1, max(grid) // 8)
    canvas = np.full((len(kept[0]) * (y + gap) - gap, len(kept[1]) * (x + gap) - gap), np.nan)
    for down, row in enumerate(kept[0]):
        for right, column in enumerate(kept[1]):
            top, left = down * (y + gap), right * (x + gap)
            canvas[top : top + y, left : left + x] = tiles[row, column]
    dots = max(1, _SIDE // max(canvas.shape))
    tall, wide = (side * dots for side in canvas.shape)
    left, right, bottom, top = 0.6 * DPI, 1.0 * DPI, 0.55 * DPI, 0.45 * DPI
    width, height = left + max(wide, 2 * DPI) + right, bottom + tall + top
    figure = Figure(figsize=(width / DPI, height / DPI), dpi=DPI)
    axis = figure.add_axes((left / width, bottom / height, wide / width, tall / height))
    picture = axis.imshow(canvas, vmin=similarity.min().item(), vmax=1, cmap="viridis", interpolation="nearest")
    for ticks, side, places in ((axis.set_yticks, y, kept[0]), (axis.set_xticks, x, kept[1])):
        ticks([place * (side + gap) + (side - 1) / 2 for place in range(len(places))], [one + 1 for one in places])
    axis.tick_params(length=0, labelsize=7 if max(map(len, kept)) > 8 else 8)
    axis.set(xlabel="column of the patch", ylabel="row of the patch")
    figure.text(
        left / width, 1 - top / 2 / height, "similarity of position embeddings", va="center", fontsize=10, color=INK
    )
    bar = figure.add_axes(((left + wide + 0.12 * DPI) / width, bottom / height, 0.12 * DPI / width, tall / height))
    figure.colorbar(picture, cax=bar)
    bar.tick_params(labelsize=8)
    bar.set_ylabel("cosine")
    for spine in (*axis.spines.values(), bar.spines["outline"]):
        spine.set_visible(False)
    return figure
