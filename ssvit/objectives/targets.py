"""Implement the targets of corrupted patches: the paper's three (Appendix B.1.2) and histograms of oriented gradients.

Labels are computed from the augmented image before any normalisation: float in [0, 1], or uint8, for which they are
exact.

Letters: b images, c channels, h, w pixels, n patches of p x q pixels, g x g cells per patch, k classes or orientations;
... any leading shape.
"""

import math
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from torch import Tensor

from ssvit.models.vit import ViT
from ssvit.objectives import targets_options
from ssvit.objectives.base import at_least_float32

BINS = 9  # number of unsigned gradient orientations


class Target(Protocol):
    """Define the interface of targets: labels of patches, the loss of a prediction, and its score.

    A target is constructed with its options and `encoder`, whose patches are predicted.

    Attributes:
        score_name: Name of the score in the logs.
    """

    score_name: str

    @property
    def width(self) -> int:
        """Return the number of values that are predicted per patch."""

    def labels(self, images: Tensor) -> Tensor:
        """Return the labels of all patches: (b, c, h, w) in [0, 1] or uint8 -> (b, n, ...)."""

    def losses(self, prediction: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of each patch from predictions (..., width) and the labels of these patches: -> (...)."""

    def guess(self, prediction: Tensor) -> Tensor:
        """Return the most probable labels: (..., width) -> (..., as labels)."""

    def score(self, guess: Tensor, labels: Tensor) -> Tensor:
        """Return the score of predicted labels, by the true labels of the same shape: -> (...)."""

    def constant(self, labels: Tensor) -> tuple[float, Tensor]:
        """Return the minimum loss of a constant prediction on labels, and the constant labels with the best score."""

    def paint(self, labels: Tensor) -> Tensor:
        """Convert labels to pixels, image channels or RGB: (..., as labels) -> (..., c or 3, p, q) in [0, 1]."""


class Classes:
    """Implement targets whose labels are classes, (..., cells) int64, one for each cell of a patch.

    Attributes:
        cells: Number of cells per patch.
        classes: Number of classes of a cell.
    """

    score_name = "accuracy"
    cells = 1
    classes: int

    def losses(self, prediction: Tensor, labels: Tensor) -> Tensor:
        """Return the cross-entropy in nats, averaged over the cells of a patch: (..., width), (..., cells) -> (...)."""
        logits = at_least_float32(prediction.reshape(-1, self.classes))
        return F.cross_entropy(logits, labels.flatten(), reduction="none").view(labels.shape).mean(-1)

    def guess(self, prediction: Tensor) -> Tensor:
        """Return the most probable class of each cell: (..., width) -> (..., cells)."""
        return prediction.unflatten(-1, (self.cells, self.classes)).max(-1).indices

    def score(self, guess: Tensor, labels: Tensor) -> Tensor:
        """Return the fraction of cells that are predicted correctly: (..., cells) and (..., cells) -> (...)."""
        return (guess == labels).double().mean(-1)

    def constant(self, labels: Tensor) -> tuple[float, Tensor]:
        """Return the entropy of the classes in nats, averaged over cells, and the most frequent class of each cell."""
        counts = torch.stack([torch.bincount(cell, minlength=self.classes) for cell in labels.flatten(0, -2).T])
        share = counts.double() / counts.sum(1, keepdim=True)
        return -torch.xlogy(share, share).sum(1).mean().item(), counts.argmax(1)


class MeanColor(Classes):
    """Predict the mean colour of each cell of a grid as a class, with 2^bits levels per channel.

    The level of a channel is min(floor(levels * mean), levels - 1), and the class of three channels is levels^2 R +
    levels G + B. The paper's targets are one cell, and a grid of 4 x 4 cells: 16 predictions of 512 classes.
    """

    def __init__(self, options: targets_options.MeanColor, *, encoder: ViT) -> None:
        self.patch_size, self.channels, self.grid = encoder.patch_size, encoder.channels, options.grid
        self.levels, self.cells = 2**options.bits, options.grid**2
        self.classes = self.levels**self.channels
        self.width = self.cells * self.classes

    def labels(self, images: Tensor) -> Tensor:
        """Return the class of each cell: (b, c, h, w) in [0, 1] or uint8 -> (b, n, g * g) int64."""
        # float64 makes the levels of uint8 images exact; float32 also sums bytes exactly up to 2^24.
        full = 255.0 if images.dtype == torch.uint8 else 1.0
        cell = self.patch_size[0] // self.grid, self.patch_size[1] // self.grid
        exact = images.dtype == torch.uint8 and 255 * math.prod(cell) <= 2**24
        sums = _sums(images.float() if exact else images.double(), cell).double()
        levels = (sums * self.levels / (math.prod(cell) * full)).long().clamp(0, self.levels - 1)
        weight = self.levels ** torch.arange(self.channels - 1, -1, -1, device=images.device)
        classes = (levels * weight[:, None, None]).sum(1)
        return rearrange(classes, "b (y g) (x h) -> b (y x) (g h)", g=self.grid, h=self.grid)

    def paint(self, labels: Tensor) -> Tensor:
        """Fill each cell with the central colour of its class: (..., g * g) -> (..., c, p, q)."""
        weight = self.levels ** torch.arange(self.channels - 1, -1, -1, device=labels.device)
        colors = ((labels[..., None] // weight) % self.levels + 0.5) / self.levels
        cells = colors.unflatten(-2, (self.grid, self.grid))
        p, q = self.patch_size[0] // self.grid, self.patch_size[1] // self.grid
        return repeat(cells, "... y x c -> ... c (y p) (x q)", p=p, q=q)


class Regression:
    """Implement targets with real-valued labels, whose score is the loss: squared (l2) or absolute error (l1)."""

    def __init__(self, loss: Literal["l2", "l1"] = "l2") -> None:
        self.loss = loss
        self.score_name = "squared_error" if loss == "l2" else "absolute_error"

    def losses(self, prediction: Tensor, labels: Tensor) -> Tensor:
        """Return the error, averaged over the values of a patch: (..., width) and (..., width) -> (...)."""
        difference = at_least_float32(prediction) - labels
        return (difference.square() if self.loss == "l2" else difference.abs()).mean(-1)

    def guess(self, prediction: Tensor) -> Tensor:
        """Return the prediction itself, in float32 or finer: (..., width)."""
        return at_least_float32(prediction)

    def score(self, guess: Tensor, labels: Tensor) -> Tensor:
        """Return the error: (..., width) and (..., width) -> (...)."""
        return self.losses(guess, labels).double()

    def constant(self, labels: Tensor) -> tuple[float, Tensor]:
        """Return the loss of the best constant patch, and this patch: the mean patch for l2, the median for l1."""
        exact = labels.flatten(0, -2).double()
        middle = exact.mean(0) if self.loss == "l2" else exact.median(0).values
        distance = exact - middle
        return (distance.square() if self.loss == "l2" else distance.abs()).mean().item(), middle.float()


class Pixels(Regression):
    """Predict every pixel in the range [-1, 1], the range of the authors' images."""

    def __init__(self, options: targets_options.Pixels, *, encoder: ViT) -> None:
        super().__init__(options.loss)
        self.patch_size, self.channels = encoder.patch_size, encoder.channels
        self.width = self.channels * math.prod(self.patch_size)

    def labels(self, images: Tensor) -> Tensor:
        """Return the pixels of each patch: (b, c, h, w) in [0, 1] or uint8 -> (b, n, c * p * q) float32 in [-1, 1]."""
        p, q = self.patch_size
        patches = rearrange(images.float(), "b c (y p) (x q) -> b (y x) (c p q)", p=p, q=q)
        return patches * (2 / 255 if images.dtype == torch.uint8 else 2) - 1

    def paint(self, labels: Tensor) -> Tensor:
        """Convert labels to pixels: (..., c * p * q) -> (..., c, p, q) in [0, 1]."""
        return ((labels + 1) / 2).clamp(0, 1).unflatten(-1, (self.channels, *self.patch_size))


class Hog(Regression):
    """Predict the histograms of oriented gradients of a window's cells (MaskFeat: Wei et al. 2022, section 3.2).

    Gradients are computed by Sobel filters for each channel, with 9 unsigned orientations. The histogram of a cell is
    L2-normalised, and zero for a cell without gradients (facebookresearch/SlowFast: slowfast/models/operators.py,
    HOGLayerC).
    """

    def __init__(self, options: targets_options.Hog, *, encoder: ViT) -> None:
        super().__init__()
        self.patch_size, self.channels, self.cell = encoder.patch_size, encoder.channels, options.cell
        (p, q), (height, width) = self.patch_size, options.window_size(self.patch_size)
        self.cells = height // options.cell[0], width // options.cell[1]  # rows and columns of cells in a window
        self.margin = (height - p) // 2, (width - q) // 2  # pixels of the window above, and left of, the patch
        self.width = self.channels * BINS * math.prod(self.cells)

    def labels(self, images: Tensor) -> Tensor:
        """Return the histograms of each patch's window, with zeros outside of the image.

        Float images are rounded to bytes: rounding errors could otherwise exchange the first and the last orientation.

        Args:
            images: Images, (b, c, h, w), uint8 or float in [0, 1].

        Returns:
            Histograms, (b, n, c * k * cells), float32 in [0, 1].
        """
        x = (images if images.dtype == torch.uint8 else (images * 255).round()).float()
        length, orientation = _gradients(x)
        patch, cell, (above, left) = self.patch_size, self.cell, self.margin
        # Patches, cells and margins consist of tiles, whose sums are shared by overlapping cells.
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
        """Draw the edges of each cell as grey strokes, brighter for strong edges: (..., width) -> (..., 3, p, q)."""
        histograms = labels.unflatten(-1, (self.channels, BINS, *self.cells))
        (height, width), (above, left), (p, q) = self.cell, self.margin, self.patch_size
        y, x = torch.arange(above, above + p, device=labels.device), torch.arange(left, left + q, device=labels.device)
        shares = histograms.clamp(min=0).square().mean(-4)[..., y // height, :][..., x // width]
        strokes = _strokes(height, width).to(labels.device)[:, y % height][..., x % width]
        grey = (shares * strokes).sum(-3).clamp(0, 1)
        return grey[..., None, :, :].expand(*labels.shape[:-1], 3, p, q)


def _gradients(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the magnitude and the orientation (uint8) of each pixel's gradient, both (b, c, h, w).

    Borders are mirrored.
    """
    x = F.pad(x, (1, 1, 1, 1), mode="reflect")
    down = x[..., :-2, :] + 2 * x[..., 1:-1, :] + x[..., 2:, :]
    right = x[..., :-2] + 2 * x[..., 1:-1] + x[..., 2:]
    dx, dy = down[..., :-2] - down[..., 2:], right[..., :-2, :] - right[..., 2:, :]
    turns = torch.atan2(dx, dy) / math.pi * BINS  # in [-9, 9]; opposite directions have the same orientation
    return torch.hypot(dx, dy), (turns.floor() + BINS).to(torch.uint8) % BINS


def _sums(x: Tensor, tile: tuple[int, int]) -> Tensor:
    """Sum the pixels of each tile: (b, c, h, w) -> (b, c, h / tile[0], w / tile[1])."""
    return x.unflatten(2, (-1, tile[0])).sum(3).unflatten(3, (-1, tile[1])).sum(4)


def _strokes(height: int, width: int) -> Tensor:
    """Return for each orientation a line through the middle of a cell, perpendicular to its gradient, in [0, 1].

    The result is (k, height, width).
    """
    angle = (torch.arange(BINS) + 0.5)[:, None, None] * math.pi / BINS
    y, x = (torch.arange(side) - (side - 1) / 2 for side in (height, width))
    return (1 - (angle.sin() * x + angle.cos() * y[:, None]).abs()).clamp(min=0)
