"""Targets of corrupted patches: the three of the paper's Appendix B.1.2, and histograms of oriented gradients.

Labels are made from the augmented image before any normalisation: float in [0, 1], or uint8, for which they are exact.

Letters: b images, c channels, h, w pixels, n patches of p x q pixels, g x g cells a patch, k classes or orientations;
... any leading shape.
"""

import math
from functools import cached_property
from typing import TYPE_CHECKING, Literal, Protocol

import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from torch import Tensor

from ssvit.objectives import targets_options
from ssvit.objectives.base import at_least_float32

BINS = 9  # orientations of gradients


class Target(Protocol):
    """The labels of patches, the loss of a prediction of `width` numbers, and what shows how good the prediction is."""

    score_name: str
    higher_is_better: bool

    @property
    def width(self) -> int:
        """Numbers that are predicted of a patch."""

    def labels(self, images: Tensor) -> Tensor:
        """(b, c, h, w) in [0, 1] or uint8 -> (b, n, ...)."""

    def losses(self, prediction: Tensor, labels: Tensor) -> Tensor:
        """The loss of each patch: (..., width) and the labels of those patches -> (...)."""

    def guess(self, prediction: Tensor) -> Tensor:
        """The likeliest labels: (..., width) -> (..., as labels)."""

    def score(self, guess: Tensor, labels: Tensor) -> Tensor:
        """How good a guess is, better when higher if `higher_is_better`: labels and labels -> (...)."""

    def constant(self, labels: Tensor) -> tuple[float, Tensor]:
        """The least loss of a constant prediction on these labels, and the constant guess that scores best."""

    def paint(self, labels: Tensor) -> Tensor:
        """Labels as pixels of the images' channels, or as RGB: (..., as labels) -> (..., c or 3, p, q) in [0, 1]."""


class Classes:
    """What targets share whose labels are classes, (..., cells) int64, one for each of the patch's cells."""

    score_name = "accuracy"
    higher_is_better = True
    cells = 1
    if TYPE_CHECKING:  # where a class has options, pydantic takes an annotation for one of them
        classes: int

    def losses(self, prediction: Tensor, labels: Tensor) -> Tensor:
        """Cross-entropy in nats, averaged over the cells of a patch: (..., width), (..., cells) -> (...)."""
        logits = at_least_float32(prediction.reshape(-1, self.classes))
        return F.cross_entropy(logits, labels.flatten(), reduction="none").view(labels.shape).mean(-1)

    def guess(self, prediction: Tensor) -> Tensor:
        """(..., width) -> (..., cells)."""
        return prediction.unflatten(-1, (self.cells, self.classes)).max(-1).indices

    def score(self, guess: Tensor, labels: Tensor) -> Tensor:
        """The share of cells that are right: (..., cells) twice -> (...)."""
        return (guess == labels).double().mean(-1)

    def constant(self, labels: Tensor) -> tuple[float, Tensor]:
        """The entropy of the classes in nats, averaged over the cells, and each cell's most frequent class."""
        counts = torch.stack([torch.bincount(cell, minlength=self.classes) for cell in labels.flatten(0, -2).T])
        share = counts.double() / counts.sum(1, keepdim=True)
        return -torch.xlogy(share, share).sum(1).mean().item(), counts.argmax(1)


class MeanColor(targets_options.MeanColor, Classes):
    """The mean colours of a grid of cells, each channel in 2^bits levels, one class a cell; here the grid is one cell.

    level = min(floor(levels * mean), levels - 1) and class = levels^2 R + levels G + B (for three channels).
    """

    @cached_property
    def levels(self) -> int:
        """Levels of a channel."""
        return 2**self.bits

    @cached_property
    def classes(self) -> int:  # type: ignore[override]  # others set it
        """Colours of a cell."""
        return self.levels**self.channels

    @property
    def cells(self) -> int:  # type: ignore[override]  # others set it
        """Cells of a patch."""
        return self.side**2

    @property
    def width(self) -> int:
        """Numbers that are predicted of a patch."""
        return self.cells * self.classes

    def labels(self, images: Tensor) -> Tensor:
        """(b, c, h, w) in [0, 1] or uint8 -> (b, n, g * g) int64."""
        # In float64, so that the levels of bytes are exact; float32 too sums bytes exactly up to 2^24.
        full = 255.0 if images.dtype == torch.uint8 else 1.0
        cell = self.patch_size[0] // self.side, self.patch_size[1] // self.side
        exact = images.dtype == torch.uint8 and 255 * math.prod(cell) <= 2**24
        rows = (images.float() if exact else images.double()).unflatten(2, (-1, cell[0])).sum(3)
        sums = rows.unflatten(3, (-1, cell[1])).sum(4).double()
        levels = (sums * self.levels / (math.prod(cell) * full)).long().clamp(0, self.levels - 1)
        weight = self.levels ** torch.arange(self.channels - 1, -1, -1, device=images.device)
        classes = (levels * weight[:, None, None]).sum(1)
        return rearrange(classes, "b (y g) (x h) -> b (y x) (g h)", g=self.side, h=self.side)

    def paint(self, labels: Tensor) -> Tensor:
        """Each cell in the middle colour of its class: (..., g * g) -> (..., c, p, q)."""
        weight = self.levels ** torch.arange(self.channels - 1, -1, -1, device=labels.device)
        colors = ((labels[..., None] // weight) % self.levels + 0.5) / self.levels
        cells = colors.unflatten(-2, (self.side, self.side))
        p, q = self.patch_size[0] // self.side, self.patch_size[1] // self.side
        return repeat(cells, "... y x c -> ... c (y p) (x q)", p=p, q=q)


class ColorGrid(targets_options.ColorGrid, MeanColor):
    """The same of a larger grid: the paper's 4x4 downsized patch has 16 predictions of 512 classes."""


class Regression:
    """A target that is numbers. Its score is its loss: l2, the squared error, or l1, the absolute error."""

    higher_is_better = False
    if TYPE_CHECKING:  # as in `Classes`
        loss: Literal["l2", "l1"]
        patch_size: tuple[int, int]
    else:
        loss = "l2"

    @property
    def score_name(self) -> str:
        return "squared_error" if self.loss == "l2" else "absolute_error"

    def losses(self, prediction: Tensor, labels: Tensor) -> Tensor:
        """The error, averaged over the numbers of a patch: (..., width) twice -> (...)."""
        difference = at_least_float32(prediction) - labels
        return (difference.square() if self.loss == "l2" else difference.abs()).mean(-1)

    def guess(self, prediction: Tensor) -> Tensor:
        """The prediction itself: (..., width)."""
        return at_least_float32(prediction)

    def score(self, guess: Tensor, labels: Tensor) -> Tensor:
        """The error: (..., width) twice -> (...)."""
        return self.losses(guess, labels).double()

    def constant(self, labels: Tensor) -> tuple[float, Tensor]:
        """The variance about the mean patch, or the mean distance from the median one, and that patch."""
        exact = labels.flatten(0, -2).double()
        middle = exact.mean(0) if self.loss == "l2" else exact.median(0).values
        distance = exact - middle
        return (distance.square() if self.loss == "l2" else distance.abs()).mean().item(), middle.float()


class Pixels(targets_options.Pixels, Regression):
    """Regression of every pixel, in the range [-1, 1] that the authors' images have."""

    @property
    def width(self) -> int:
        """Values of a patch."""
        return self.channels * math.prod(self.patch_size)

    def labels(self, images: Tensor) -> Tensor:
        """(b, c, h, w) in [0, 1] or uint8 -> (b, n, c * p * q) float32 in [-1, 1]."""
        p, q = self.patch_size
        patches = rearrange(images.float(), "b c (y p) (x q) -> b (y x) (c p q)", p=p, q=q)
        return patches * (2 / 255 if images.dtype == torch.uint8 else 2) - 1

    def paint(self, labels: Tensor) -> Tensor:
        """(..., c * p * q) -> (..., c, p, q) in [0, 1]."""
        return ((labels + 1) / 2).clamp(0, 1).unflatten(-1, (self.channels, *self.patch_size))


class Hog(targets_options.Hog, Regression):
    """Regression of the histograms of oriented gradients of a window's cells, with L2 (MaskFeat: Wei et al. 2022,
    section 3.2).

    Gradients by Sobel filters, each channel for itself; 9 unsigned orientations; histograms of cells, each of length 1,
    zero for a cell without gradient (facebookresearch/SlowFast: slowfast/models/operators.py, HOGLayerC).
    """

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
