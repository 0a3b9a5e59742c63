"""Histograms of oriented gradients of a patch as its target (MaskFeat: Wei et al. 2022, section 3.2).

Gradients by Sobel filters, each channel for itself; 9 unsigned orientations; histograms of cells, each of length 1
(facebookresearch/SlowFast: slowfast/models/operators.py, HOGLayerC).

Letters: b images, c channels, h, w pixels, k orientations, n patches of p x q pixels; ... any leading shape.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ssvit.objectives import hog_options
from ssvit.objectives.targets import Regression

BINS = 9


class Hog(hog_options.Hog, Regression):
    """Regression of the histograms of a window's cells, with L2. A cell without gradient is zero."""

    @property
    def cells(self) -> tuple[int, int]:
        """Rows and columns of a window's cells."""
        return self.window_size[0] // self.cell[0], self.window_size[1] // self.cell[1]

    @property
    def width(self) -> int:
        """Numbers of a window: of each channel, orientation and cell."""
        return self.channels * BINS * math.prod(self.cells)

    @property
    def _margin(self) -> tuple[int, int]:
        """Pixels of the window above, and left of, the patch."""
        return (self.window_size[0] - self.patch_size[0]) // 2, (self.window_size[1] - self.patch_size[1]) // 2

    def labels(self, images: Tensor) -> Tensor:
        """(b, c, h, w) in [0, 1] or uint8 -> (b, n, c * k * cells) float32 in [0, 1]; outside of the image zeros.

        Fractions are rounded to bytes: else rounding errors would tell the first orientation from the last.
        """
        x = (images if images.dtype == torch.uint8 else (images * 255).round()).float()
        length, orientation = _gradients(x)
        patch, cell, (above, left) = self.patch_size, self.cell, self._margin
        # Sums of tiles, of which patches, cells and margins are made, are the same for all cells that overlap.
        tile = math.gcd(patch[0], cell[0], above), math.gcd(patch[1], cell[1], left)
        sums = torch.stack([_sums(length * (orientation == k), tile) for k in range(BINS)], 2)
        (above, left), size, stride = (
            (side[0] // tile[0], side[1] // tile[1]) for side in ((above, left), cell, patch)
        )
        tiles = F.pad(sums.flatten(0, 1), (left, left, above, above))
        histograms = F.normalize(F.avg_pool2d(tiles, size, stride=1), dim=1)
        of_images = histograms.unflatten(0, images.shape[:2]).flatten(1, 2)
        return F.unfold(of_images, self.cells, dilation=size, stride=stride).mT

    def paint(self, labels: Tensor) -> Tensor:
        """Each cell's edges as grey strokes, the brighter the clearer they are: (..., width) -> (..., 3, p, q)."""
        histograms = labels.unflatten(-1, (self.channels, BINS, *self.cells))
        (height, width), (above, left), (p, q) = self.cell, self._margin, self.patch_size
        y, x = torch.arange(above, above + p, device=labels.device), torch.arange(left, left + q, device=labels.device)
        shares = histograms.clamp(min=0).square().mean(-4)[..., y // height, :][..., x // width]
        strokes = _strokes(height, width).to(labels.device)[:, y % height][..., x % width]
        grey = (shares * strokes).sum(-3).clamp(0, 1)
        return grey[..., None, :, :].expand(*labels.shape[:-1], 3, p, q)


def _gradients(x: Tensor) -> tuple[Tensor, Tensor]:
    """Each pixel's gradient, (b, c, h, w) twice: its length, and the number of its orientation (uint8).

    Outside of the image x is mirrored.
    """
    x = F.pad(x, (1, 1, 1, 1), mode="reflect")
    down = x[..., :-2, :] + 2 * x[..., 1:-1, :] + x[..., 2:, :]
    right = x[..., :-2] + 2 * x[..., 1:-1] + x[..., 2:]
    dx, dy = down[..., :-2] - down[..., 2:], right[..., :-2, :] - right[..., 2:, :]
    turns = torch.atan2(dx, dy) / math.pi * BINS  # from -9 to 9; opposite directions have the same orientation
    return torch.hypot(dx, dy), (turns.floor() + BINS).to(torch.uint8) % BINS


def _sums(x: Tensor, tile: tuple[int, int]) -> Tensor:
    """(b, c, h, w) -> (b, c, h / tile[0], w / tile[1])."""
    return x.unflatten(2, (-1, tile[0])).sum(3).unflatten(3, (-1, tile[1])).sum(4)


def _strokes(height: int, width: int) -> Tensor:
    """A line through the middle of a cell for each orientation, across its gradient: (k, height, width) in [0, 1]."""
    angle = (torch.arange(BINS) + 0.5)[:, None, None] * math.pi / BINS
    y, x = (torch.arange(side) - (side - 1) / 2 for side in (height, width))
    return (1 - (angle.sin() * x + angle.cos() * y[:, None]).abs()).clamp(min=0)
