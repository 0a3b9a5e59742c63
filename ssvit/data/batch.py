"""Batches of views, the input of a training step.

Letters: b images, v views, c channels, h, w pixels.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ssvit.data.augment import geometry
from ssvit.data.sources.base import IGNORED
from ssvit.errors import UserError


class Transform(Protocol):
    """Transform images, (b, c, h, w) uint8 or a list of (c, h, w), to one view of each or to named groups of views."""

    def __call__(self, images: Tensor | Sequence[Tensor], slots: Tensor, seed: int) -> Tensor | dict[str, Tensor]:
        """Return one view of each image, (b, c, h, w) uint8, or groups of views by name, (b, v, c, h, w) uint8."""
        ...


class EvalTransform(Protocol):
    """Transform images to the encoder input of evaluation, without randomness: -> (b, c, h, w) uint8."""

    def __call__(self, images: Tensor | Sequence[Tensor], slots: Tensor | None = None, seed: int = 0) -> Tensor:
        """Return the transformed images, (b, c, h, w) uint8; slots and seed have no effect."""
        ...

    def mask(self, mask: Tensor) -> Tensor:
        """Transform the mask of an image in the same way as the image: (h, w) uint8 -> (h, w) uint8."""
        ...

    def geometry(self, sides: Tensor) -> Tensor:
        """Return the maps from transformed images to images of some heights and widths: (b, 2) -> (b, 2, 3)."""
        ...


class Batch(NamedTuple):
    """Views, labels and targets of some images of a run or an evaluation.

    Attributes:
        views: Views by name, uint8. A single view is called "image", (b, c, h, w); several views of one size form a
            group with one name, such as "global" or "local", (b, v, c, h, w).
        labels: (b,) int64; (b, k) bool for multi-label classification; or None.
        slots: (b,) int64, the position of each image in the training order. All randomness of an image is a function of
            the seed, its slot and the view.
        targets: Further targets by name, or None: "masks" (b, h, w) uint8, the class of each pixel, and "boxes" (b, m,
            4) float32, top, left, height and width in pixels, padded with boxes of height 0 to m per image.
        seed: Seed of the run.
        indices: (b,) int64, the index of each image in its source, or None.
    """

    views: dict[str, Tensor]
    labels: Tensor | None
    slots: Tensor
    targets: dict[str, Tensor] | None = None
    seed: int = 0
    indices: Tensor | None = None

    @classmethod
    def of_view(cls, images: Tensor, labels: Tensor | None = None, slots: Tensor | None = None) -> "Batch":
        """Return the batch of one view of images.

        Args:
            images: (b, c, h, w).
            labels: (b,) int64, (b, k) bool, or None.
            slots: (b,) int64; default: 0 to b - 1.
        """
        return cls({"image": images}, labels, torch.arange(len(images)) if slots is None else slots)

    def only_view(self) -> Tensor:
        """Return the single view, (b, c, h, w).

        This is a method, since torch.compile of torch 2.10 traces methods of named tuples, but not their properties.

        Raises:
            UserError: The batch has several views.
        """
        if "image" not in self.views:
            raise UserError(
                f"data.augment: must return one view of each image, not {' and '.join(self.views)}, "
                "such as augment@data.augment=inception_crop"
            )
        return self.views["image"]

    @property
    def images(self) -> Tensor:
        """Return the single view, (b, c, h, w), for code that is not compiled; see `only_view`."""
        return self.only_view()

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Return all tensors, in the order views, labels, targets, slots, indices."""
        labels, indices = (() if tensor is None else (tensor,) for tensor in (self.labels, self.indices))
        return (*self.views.values(), *labels, *(self.targets or {}).values(), self.slots, *indices)

    def map(self, function: Callable[[Tensor], Tensor]) -> "Batch":
        """Return the batch with a function applied to each tensor, in the order of `tensors`."""
        views = {name: function(view) for name, view in self.views.items()}
        labels = None if self.labels is None else function(self.labels)
        targets = None if self.targets is None else {name: function(tensor) for name, tensor in self.targets.items()}
        slots = function(self.slots)
        indices = None if self.indices is None else function(self.indices)
        return self._replace(views=views, labels=labels, slots=slots, targets=targets, indices=indices)

    @staticmethod
    def joined(parts: "Sequence[Batch]") -> "Batch":
        """Concatenate batches that have the same views and targets."""
        columns = zip(*(part.tensors for part in parts), strict=True)
        return parts[0].map(lambda _: torch.cat(next(columns)))

    def augmented(self, transform: Transform, seed: int) -> "Batch":
        """Return the batch with the single view replaced by the views that a transform makes of it, and its masks."""
        targets = self.targets
        if targets is not None:
            targets = {"masks": masks_of_views(targets["masks"], transform, self.slots, seed)}
        return self._replace(views=named(transform(self.images, self.slots, seed)), targets=targets)

    def to(self, device: torch.device | str) -> "Batch":
        """Return the batch on a device."""
        return self.map(lambda tensor: tensor.to(device, non_blocking=True))


def named(views: Tensor | dict[str, Tensor]) -> dict[str, Tensor]:
    """Return views by name; a single tensor becomes {"image": tensor}."""
    return {"image": views} if isinstance(views, Tensor) else views


def masks_of_views(masks: Sequence[Tensor] | Tensor, transform: Any, slots: Tensor, seed: int) -> Tensor:
    """Return the masks, (b, h, w) uint8, of the single views that an augmentation makes of images with these masks.

    Args:
        masks: Mask of each image, (h, w) uint8.
        transform: A crop of `ssvit.data.augment.crop`.
        slots: (b,) int64.
        seed: Seed of the run.

    Returns:
        Masks, `IGNORED` for pixels that are not in the image and for reflected or black pixels.
    """
    sides = torch.tensor([mask.shape for mask in masks], device=slots.device)
    views = geometry.warped(masks, transform.geometry(sides, slots, seed), transform.size)
    if hasattr(transform, "valid_pixels"):  # optional for transforms that fill no corners
        views = views.where(transform.valid_pixels(slots, seed), IGNORED)
    return views
