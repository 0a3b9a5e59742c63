"""Segment images by frozen patch features, measured by the mean intersection over union (mIoU).

Class scores of a patch are computed by a linear layer (Oquab et al. 2024, section 7.4) and upsampled bilinearly to the
size of the mask.

Shapes use n training images, m test images, h, w pixels, y, x rows and columns of patches, r patches, d width, k
classes.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from ssvit.data.sources.base import IGNORED
from ssvit.engine.randomness import permutation
from ssvit.errors import UserError
from ssvit.evaluation import segmentation
from ssvit.evaluation.features import Features
from ssvit.evaluation.probes.base import Probe, Result
from ssvit.evaluation.probes.logistic import fit
from ssvit.evaluation.probes.options import Segmentation as SegmentationOptions
from ssvit.evaluation.probes.scaler import Scaler

_SCORES = 1 << 24  # maximum number of upsampled scores in memory


class Segmentation(Probe):
    """Predict the class of each pixel; the penalty of the linear layer is chosen on validation images."""

    options: SegmentationOptions
    name: ClassVar[str] = "segmentation"
    chosen_by: ClassVar[str] = "the mIoU of held-out training images"
    is_accuracy: ClassVar[bool] = False
    features: ClassVar[str] = "patches"
    truth: ClassVar[str] = "masks"

    @torch.no_grad()
    def __call__(self, train: Features, test: Features, *, choose: bool = False) -> Result:
        """Return the mIoU of the most frequent training class and of the linear layer, one column for each.

        Predictions are taken from the linear layer.
        """
        counts, tested = (
            torch.bincount(images.known_masks.flatten(), minlength=256)[:IGNORED] for images in (train, test)
        )
        is_labelled = (train.known_masks != IGNORED).flatten(1).any(1)
        if is_labelled.sum() < 2 or counts.count_nonzero() < 2:
            raise UserError(
                "segmentation requires labelled pixels in two training images, and two classes in their masks"
            )
        train = replace(train, values=train.values[is_labelled], masks=train.known_masks[is_labelled])
        classes = 1 + int((counts + tested).nonzero().max())
        shares = class_shares(train.known_masks, train.values.shape[1:3], classes)
        truth = test.known_masks
        size = truth.shape[1:]

        layer, l2, validation = self._layer(train, shares)
        answers = {
            "constant": torch.full_like(truth, int(counts.argmax())),
            "linear": label(layer(test.values), size),
        }
        scores = {name: mean_iou(answer, truth, classes) for name, answer in answers.items()}
        return Result(
            scores=scores,
            choice=(validation,),
            numbers={**scores, "validation": validation, "l2": l2, "classes": classes},
            predictions=answers["linear"],
        )

    def _layer(self, train: Features, shares: Tensor) -> tuple["Layer", float, float]:
        """Return the layer fitted to all training images, its penalty, and the validation mIoU of that penalty."""
        count = len(train.values)
        order = permutation(self.options.seed, "segmentation, held out", count)
        size = min(max(1, round(self.options.held_out * count)), count - 1)
        held_out, trained = order[:size].sort().values, order[size:].sort().values
        l2s = sorted(self.options.l2s, reverse=True)
        layers = self.fit(train.values[trained], shares[trained], l2s)
        values, masks = train.values[held_out], train.known_masks[held_out]
        scores = [mean_iou(label(layer(values), masks.shape[1:]), masks, shares.shape[-1]) for layer in layers]
        chosen = scores.index(max(scores))
        (layer,) = self.fit(train.values, shares, [l2s[chosen]], layers[chosen].weights)
        return layer, l2s[chosen], scores[chosen]

    def fit(self, values: Tensor, shares: Tensor, l2s: Sequence[float], start: Tensor | None = None) -> list["Layer"]:
        """Fit the layers that minimise the mean cross-entropy of the patches' class frequencies + l2 / 2 |weights|^2.

        Args:
            values: Patches, (n, y, x, d).
            shares: Class frequencies, (n, y, x, k). Patches without a labelled pixel are excluded.
            l2s: Penalties.
            start: Initial layer of the first fit; None for zeros.
        """
        is_labelled = shares.sum(-1) > 0
        values, shares = values[is_labelled], shares[is_labelled]
        scaler = Scaler.of_features(values, self.options.standardize)
        rows = scaler(values)
        start = rows.new_zeros(shares.shape[-1], rows.shape[1]) if start is None else start
        layers, _ = fit(rows, shares, l2s, start, self.options.iterations)
        return [Layer(scaler, layer) for layer in layers]


class Layer(NamedTuple):
    """Apply a linear layer with weights (k, d + 1) to standardised features."""

    scaler: Scaler
    weights: Tensor

    def __call__(self, values: Tensor) -> Tensor:
        """Return the class scores of patches: (m, y, x, d) -> (m, y, x, k)."""
        return self.scaler(values) @ self.weights.T


def class_shares(masks: Tensor, grid: Sequence[int], classes: int) -> Tensor:
    """Return the class frequencies of each patch's labelled pixels, all 0 for a patch without one.

    If the mask is not divisible into the grid (the encoder resizes images), patches overlap and share pixels.

    Args:
        masks: Masks, (n, h, w) uint8.
        grid: Rows and columns of patches, (y, x).
        classes: Number of classes.

    Returns:
        Frequencies in [0, 1], (n, y, x, k).
    """
    (y, x), numbers = grid, torch.arange(classes)[:, None, None]
    counts = torch.stack([F.adaptive_avg_pool2d((mask == numbers).float(), (y, x)) for mask in masks])
    counts = rearrange(counts, "n k y x -> n y x k")
    return counts / counts.sum(-1, keepdim=True).clamp_min(torch.finfo(counts.dtype).tiny)


def label(scores: Tensor, size: Sequence[int]) -> Tensor:
    """Return the predicted class of each pixel: scores of patches (m, y, x, k) -> (m, h, w) uint8."""
    images = max(1, _SCORES // (scores.shape[-1] * size[0] * size[1]))
    return torch.cat([
        F.interpolate(rearrange(part, "m y x k -> m k y x"), size=size, mode="bilinear").argmax(1).to(torch.uint8)
        for part in scores.split(images)
    ])  # fmt: skip


def mean_iou(answers: Tensor, masks: Tensor, classes: int) -> float:
    """Return the mIoU over all images, (m, h, w) uint8, without pixels of value 255 and without absent classes."""
    return segmentation.mean_iou(segmentation.class_counts(answers, masks, classes)).item()
