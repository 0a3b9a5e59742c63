"""Implement semantic segmentation: an encoder, and a head that predicts the class of each pixel from patch features.

The scores of a head have one or more cells for each patch. They are upsampled bilinearly to the pixels (Oquab et al.
2024, section 7.4).

Letters: b images, c channels, h, w pixels, y, x rows and columns of patches, d width, m maps, k classes.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ssvit.data.batch import Batch
from ssvit.data.sources.base import IGNORED, Source, count_pixels
from ssvit.data.sources.base_options import NO_MASKS
from ssvit.errors import UserError
from ssvit.models import lora
from ssvit.models.backbone import feature_maps
from ssvit.models.vit import ViT
from ssvit.objectives import segment_options
from ssvit.objectives.base import EMPTY, Objective, at_least_float32

_WIDTH = 256  # channels of the head `maps`


class LinearHead(nn.Module):
    """Compute the scores of each patch by a linear layer with zero initial weights.

    Args:
        width: Width of the encoder, d.
        maps: Number of feature maps, m.
        classes: Number of classes, k.

    Attributes:
        factor: Number of cells of the scores along each side of a patch.
    """

    factor = 1

    def __init__(self, width: int, maps: int, classes: int) -> None:
        super().__init__()
        self.output = _zero(nn.Linear(maps * width, classes))

    def forward(self, maps: Sequence[Tensor]) -> Tensor:
        """Return scores (b, k, y, x) from m maps (b, d, y, x)."""
        return self.output(torch.cat([*maps], 1).movedim(1, -1)).movedim(-1, 1)


class MapsHead(nn.Module):
    """Compute scores at twice the resolution of the patches by convolutions on the sum of projected maps.

    Args:
        width: Width of the encoder, d.
        maps: Number of feature maps, m.
        classes: Number of classes, k.

    Attributes:
        factor: Number of cells of the scores along each side of a patch.
    """

    factor = 2

    def __init__(self, width: int, maps: int, classes: int) -> None:
        super().__init__()
        self.projections = nn.ModuleList(nn.Conv2d(width, _WIDTH, 1) for _ in range(maps))
        self.layers = nn.Sequential(
            nn.GELU(),
            nn.Conv2d(_WIDTH, _WIDTH, 3, padding=1),
            nn.GELU(),
            nn.ConvTranspose2d(_WIDTH, _WIDTH // 2, 2, stride=2),
            nn.GELU(),
            nn.Conv2d(_WIDTH // 2, _WIDTH // 2, 3, padding=1),
            nn.GELU(),
            _zero(nn.Conv2d(_WIDTH // 2, classes, 1)),
        )

    def forward(self, maps: Sequence[Tensor]) -> Tensor:
        """Return scores (b, k, 2 y, 2 x) from m maps (b, d, y, x)."""
        projected = [project(features) for project, features in zip(self.projections, maps, strict=True)]
        return self.layers(torch.stack(projected).sum(0))


def _zero(layer: nn.Linear | nn.Conv2d) -> nn.Module:
    for parameter in layer.parameters():
        nn.init.zeros_(parameter)
    return layer


HEADS: dict[str, type[LinearHead | MapsHead]] = {"linear": LinearHead, "maps": MapsHead}


class Segment(Objective):
    """Train a segmentation model by the cross-entropy of each labelled pixel.

    Args:
        options: Options of the model; `classes` must be set here or by the argument.
        encoder: The encoder.
        classes: Class names; None: as in the options.
        masks: Training images with masks, which determine class_weights=balanced; None for a model that is not trained.

    Raises:
        OptionError: An option does not fit the encoder or the classes.
    """

    encoder: ViT
    options: segment_options.Segment
    class_weights: Tensor | None
    head: LinearHead | MapsHead

    def __init__(
        self,
        options: segment_options.Segment,
        *,
        encoder: ViT,
        classes: Sequence[str] | None = None,
        masks: Source | None = None,
    ) -> None:
        super().__init__(options if classes is None else options.changed(classes=classes), encoder)
        assert self.options.classes is not None
        self.classes, self.maps = tuple(self.options.classes), self.options.maps(encoder.depth)
        weights = self.options.class_weights
        if weights == "balanced":
            weights = balanced(masks, len(self.classes))
        buffer = None if weights is None else torch.tensor(weights, dtype=torch.float64)
        self.register_buffer("class_weights", buffer, persistent=False)
        self.head = HEADS[options.head](encoder.width, len(self.maps), len(self.classes))
        lora.restrict(encoder, options.trained, options.lora)
        for unused in (encoder.blocks, encoder.positions):  # not computed
            unused[max(self.maps) :].requires_grad_(False)

    @property
    def metadata(self) -> dict[str, object]:
        """Return the base class's metadata and "segmenter" (options of the head and of windows)."""
        kept = {name: getattr(self.options, name) for name in ("head", "resize", "overlap")}
        return super().metadata | {"segmenter": {"classes": [*self.classes], "layers": [*self.maps], **kept}}

    def scores(self, images: Tensor, depth_noise: Tensor | None = None) -> Tensor:
        """Return the scores of the head.

        Args:
            images: Images, (b, c, h, w), whose sides are multiples of the patch size.
            depth_noise: Random numbers of stochastic depth, (b, 2 * depth), or None.

        Returns:
            (b, k, y, x), or a multiple of y and x, in float32 or finer.
        """
        return at_least_float32(self.head(feature_maps(self.encoder, images, self.maps, depth_noise=depth_noise)))

    def logits(self, images: Tensor) -> Tensor:
        """Return the logits of each pixel: (b, c, h, w) -> (b, k, h, w), in float32 or finer."""
        return upsampled(self.scores(images), images)

    def forward(self, batch: Batch | Tensor, noise: Any = (), scheduled: Mapping[str, Tensor] = EMPTY) -> Any:
        """Return the loss and the share of labelled pixels that are predicted correctly.

        The cross-entropy is summed over the labelled pixels and divided by the number of all pixels, so that
        micro-batches sum to the batch. Class weights multiply the loss of a pixel.

        Args:
            batch: Micro-batch with masks; or in eval mode images (b, c, h, w).
            noise: Not used.
            scheduled: Not used.

        Returns:
            Loss and metric by name, or for images in eval mode their `logits`, (b, k, h, w).

        Raises:
            UserError: The images have no masks.
        """
        if isinstance(batch, Tensor) and not self.training:
            return self.logits(batch)
        if isinstance(batch, Tensor) or batch.targets is None:
            raise UserError(f"objective: each image {NO_MASKS}")
        images, masks = batch.only_view(), batch.targets["masks"].long()
        logits = upsampled(self.scores(images, self.depth_noise(batch)), images)
        weights = None if self.class_weights is None else self.class_weights.to(logits.dtype)
        loss = F.cross_entropy(logits, masks, weights, ignore_index=IGNORED, reduction="sum") / masks.numel()
        with torch.no_grad():
            correct, labelled = (logits.argmax(1) == masks).sum(), (masks != IGNORED).sum()
        return {"loss": loss, "pixel_accuracy": correct / labelled.clamp(min=1)}


def upsampled(scores: Tensor, images: Tensor) -> Tensor:
    """Return scores (b, k, y, x) at the pixels of images (b, c, h, w), by bilinear interpolation: (b, k, h, w)."""
    return F.interpolate(scores, size=images.shape[-2:], mode="bilinear")


def balanced(masks: Source | None, classes: int) -> list[float]:
    """Return for each class labelled pixels / (classes * its pixels) of training masks; 0 for a class without pixels.

    Raises:
        UserError: There are no masks.
    """
    if masks is None:
        raise UserError("objective.class_weights=balanced: requires the masks of the training images")
    counts = count_pixels(masks)[:classes].tolist()
    return [sum(counts) / (classes * count) if count else 0.0 for count in counts]
