"""Compute cosine similarities of position embeddings (Dosovitskiy et al. 2021, Figure 7, centre).

Shapes use n patches, s prefix tokens, d width, y, x rows and columns of patches, r, k rows and columns of tiles.
"""

import math

import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from ssvit.errors import UserError
from ssvit.figures.matrices import Similarities
from ssvit.models.vit import ViT

_TILES = 16  # maximum number of tiles along a side


def similarity(encoder: ViT) -> Tensor:
    """Return the cosine similarities of the patches' position embeddings in the first layer that has them, (n, n).

    Raises:
        UserError: If the encoder has no additive position embeddings.
    """
    if not len(encoder.positions):
        raise UserError(f"positions: not available, since positions={encoder.arguments['positions']} has no embeddings")
    rows = F.normalize(encoder.positions[0]()[-encoder.patches :].detach().double(), dim=1)
    return rows @ rows.T


def plot(similarity: Tensor, grid: tuple[int, int]) -> Similarities:
    """Return a tile for each patch at its position in the image, with its similarity to all patches: (n, n), n = y x.

    For more than 16 patches along a side, a regular subset of them is plotted.
    """
    y, x = grid
    down, across = (-(-side // _TILES) for side in grid)
    gap = max(1, max(grid) // 8)
    tiles = similarity.reshape(y, x, y, x)[down // 2 :: down, across // 2 :: across]
    tiles = rearrange(F.pad(tiles, (0, gap, 0, gap), value=math.nan), "r k y x -> (r y) (k x)")[:-gap, :-gap]

    def ticks(side: int, step: int) -> dict[str, float]:
        shown = range(step // 2, side, step)
        return {str(number + 1): index * (side + gap) + (side - 1) / 2 for index, number in enumerate(shown)}

    title, low = "similarity of position embeddings", similarity.min().item()
    return Similarities(tiles.numpy(), ticks(x, across), ticks(y, down), low, title, "cosine similarity", "patch")
