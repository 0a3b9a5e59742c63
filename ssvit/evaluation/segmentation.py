"""Predict the class of each pixel of images of any size, and measure such predictions.

Windows of the encoder's image size cover an image, on the grid of its patches. The scores of windows that overlap are
averaged before they are interpolated, so that the memory depends on the number of patches instead of pixels.

Shapes use h, w pixels, y, x cells of scores, k classes, n images.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ssvit.data.augment.crop import resize
from ssvit.data.sources.base import IGNORED
from ssvit.data.windows import Box, boxes
from ssvit.errors import OptionError
from ssvit.objectives.segment import Segment

_SCORES = 1 << 22  # maximum number of interpolated scores in memory
_SAMPLES, _LEVEL = 1000, 0.95  # bootstrap samples, and the level of their interval


@dataclass(frozen=True)
class LabelMaps:
    """Predict label maps with a segmentation model.

    Attributes:
        model: The model, in eval mode.
        transform: Transform of the evaluation, by which images are resized with `resize=True`.
        scores: Returns the scores of windows (b, c, h, w), on the CPU: (b, k, y, x).
        batch_size: Maximum number of windows in a batch.
    """

    model: Segment
    transform: Any
    scores: Callable[[Tensor], Tensor]
    batch_size: int

    @torch.no_grad()
    def __call__(self, images: Sequence[Tensor]) -> list[Tensor]:
        """Return the label map of each image, (h, w) uint8, for images (c, h, w) of any size.

        An image that is smaller than a window is padded with zeros at its right and lower border.
        """
        places: list[tuple[int, Box]] = []
        sized, fitted, sums = [], [], []
        patch, window = self.model.encoder.patch_size, self.model.encoder.image_size
        grid = window[0] // patch[0], window[1] // patch[1]
        overlap, factor = _overlap(self.model.options.overlap, min(grid)), self.model.head.factor
        for number, image in enumerate(images):
            size = image.shape[1], image.shape[2]
            if min(size) == 0:
                raise OptionError("images", size, "must have pixels")
            if self.model.options.resize:
                height, width = self.transform.fitted(*size)
                size = -(-height // patch[0]) * patch[0], -(-width // patch[1]) * patch[1]
                image = resize(image[None], size)[0]
            cells = [max(-(-n // p), g) for n, p, g in zip(size, patch, grid, strict=True)]
            height, width = (n * p for n, p in zip(cells, patch, strict=True))
            sized.append(image)
            fitted.append((size[0] / height, size[1] / width))
            places += [(number, box) for box in boxes((cells[0], cells[1]), grid, overlap)]
            sums.append(torch.zeros(len(self.model.classes) + 1, factor * cells[0], factor * cells[1]))
        for start in range(0, len(places), self.batch_size):
            part = places[start : start + self.batch_size]
            crops = (_scaled(box, patch).of(sized[number]) for number, box in part)
            padded = [F.pad(crop, (0, window[1] - crop.shape[2], 0, window[0] - crop.shape[1])) for crop in crops]
            for (number, box), scores in zip(part, self.scores(torch.stack(padded)), strict=True):
                # The last channel counts the windows.
                _scaled(box, (factor, factor)).of(sums[number]).add_(F.pad(scores, (0, 0, 0, 0, 0, 1), value=1.0))
        answers = zip(sums, fitted, images, strict=True)
        return [_labels(x[:-1] / x[-1], shares, image.shape[1:]) for x, shares, image in answers]


def _overlap(share: float, side: int) -> int:
    """Return the fewest patches of a side that are at least a share of it, but fewer than the side."""
    return min(side - 1, math.ceil(round(share * side, 6)))  # without the error of a product such as 0.07 * 100


def _scaled(box: Box, factor: tuple[int, int]) -> Box:
    (y, x), (top, left, height, width) = factor, box
    return Box(top * y, left * x, height * y, width * x)


def _labels(scores: Tensor, shares: tuple[float, float], size: Sequence[int]) -> Tensor:
    """Return the class of each pixel from bilinearly interpolated scores.

    Args:
        scores: Scores of the padded image, (k, y, x).
        shares: Shares of its height and width that the image takes.
        size: Height and width of the image in pixels.

    Returns:
        (h, w) uint8.
    """
    rows, columns = (((torch.arange(n) + 0.5) * (2 * share / n) - 1) for n, share in zip(size, shares, strict=True))
    labels = torch.empty(len(rows), len(columns), dtype=torch.uint8)
    count = max(1, _SCORES // (len(scores) * len(columns)))
    for part, chunk in zip(labels.split(count), rows.split(count), strict=True):
        points = torch.stack(torch.meshgrid(columns, chunk, indexing="xy"), -1)[None]
        pixels = F.grid_sample(scores[None], points, padding_mode="border", align_corners=False)
        part.copy_(pixels[0].argmax(0))
    return labels


def class_counts(answer: Tensor, mask: Tensor, classes: int) -> Tensor:
    """Count the pixels of each class in a prediction and a mask, without ignored pixels.

    Args:
        answer: Predicted classes, (h, w) uint8.
        mask: True classes, (h, w) uint8.
        classes: Number of classes, k.

    Returns:
        Correct, predicted and true pixels of each class, (3, k) int64.
    """
    known = mask != IGNORED
    answer, mask = answer[known], mask[known]
    parts = (mask[answer == mask], answer, mask)
    return torch.stack([part.long().bincount(minlength=classes)[:classes] for part in parts])


def intersections_over_unions(counts: Tensor) -> Tensor:
    """Return the IoU of each class from counts (…, 3, k): (…, k) float64; NaN for a class without pixels."""
    correct, predicted, true = counts.double().unbind(-2)
    return correct / (predicted + true - correct)


def mean_iou(counts: Tensor) -> Tensor:
    """Return the mean IoU over the classes that have true or predicted pixels, from counts (…, 3, k): (…,) float64."""
    return intersections_over_unions(counts).nanmean(-1)


def interval_of_miou(counts: Tensor) -> tuple[float, float]:
    """Return the 95 % interval of the mean IoU over images, by the percentile bootstrap, from counts (n, 3, k).

    A class that a resample lacks has its IoU over all images there: the mean over the other classes would be higher,
    since rare classes often have a low IoU. The interval is NaN if all pixels are ignored.
    """
    generator = torch.Generator().manual_seed(0)
    counts = counts[counts[:, 2].any(1)]  # without images whose pixels are all ignored
    if not (n := len(counts)):
        return math.nan, math.nan
    drawn = torch.randint(n, (_SAMPLES, n), generator=generator)
    weights = torch.zeros(_SAMPLES, n, dtype=torch.float64).scatter_add_(1, drawn, torch.ones(_SAMPLES, n).double())
    resampled = intersections_over_unions((weights @ counts.double().flatten(1)).unflatten(1, counts.shape[1:]))
    values = resampled.where(~resampled.isnan(), intersections_over_unions(counts.sum(0))).nanmean(-1)
    tails = torch.tensor([(1 - _LEVEL) / 2, (1 + _LEVEL) / 2], dtype=torch.float64)
    low, high = values.quantile(tails).tolist()
    return low, high
