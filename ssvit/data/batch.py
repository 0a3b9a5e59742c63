"""What a training step takes: the views of some images. Letters: b images, v views, c channels, h, w pixels."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ssvit.options import UserError


class Transform(Protocol):
    """Makes views of images, (b, c, h, w) uint8 or a list of (c, h, w): one of each image, or groups by name."""

    def __call__(self, images: Tensor | Sequence[Tensor], slots: Tensor, seed: int) -> Tensor | dict[str, Tensor]: ...


class EvalTransform(Protocol):
    """Shows images as evaluation sees them, without randomness: -> (b, c, h, w) uint8."""

    def __call__(self, images: Tensor | Sequence[Tensor], slots: Tensor | None = None, seed: int = 0) -> Tensor: ...

    def mask(self, mask: Tensor) -> Tensor:
        """The mask of an image as that is shown: (h, w) uint8 -> (h, w) uint8."""
        ...


class Batch(NamedTuple):
    """Some images of a run, or of an evaluation.

    views: by name, uint8. A single view is called "image", (b, c, h, w); several of one size have a name together, as
    "global" and "local", (b, v, c, h, w). labels: (b,) int64; (b, k) bool where an image may have several classes; or
    None. slots: (b,) int64, which images of the run these are: all that is random about an image is a function of the
    seed, its slot and the view.
    """

    views: dict[str, Tensor]
    labels: Tensor | None
    slots: Tensor

    @classmethod
    def of(cls, images: Tensor, labels: Tensor | None = None, slots: Tensor | None = None) -> "Batch":
        """One view of images (b, c, h, w); slots: by default the first ones."""
        return cls({"image": images}, labels, torch.arange(len(images)) if slots is None else slots)

    @property
    def images(self) -> Tensor:
        """The only view, (b, c, h, w). UserError if there are several."""
        if "image" not in self.views:
            raise UserError(
                f"the augmentation gives the views {' and '.join(self.views)}, and what is trained takes one view of "
                "each image: choose another, as augment@data.augment=inception_crop"
            )
        return self.views["image"]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All of them."""
        return (*self.views.values(), *(() if self.labels is None else (self.labels,)), self.slots)

    def augmented(self, transform: Transform, seed: int) -> "Batch":
        """The views that a transform makes of the only view."""
        return self._replace(views=named(transform(self.images, self.slots, seed)))

    def to(self, device: torch.device | str) -> "Batch":
        """The same on a device."""
        views = {name: view.to(device, non_blocking=True) for name, view in self.views.items()}
        labels = None if self.labels is None else self.labels.to(device, non_blocking=True)
        return Batch(views, labels, self.slots.to(device, non_blocking=True))


def named(views: Tensor | dict[str, Tensor]) -> dict[str, Tensor]:
    """Views by name, of what an augmentation returns: a tensor alone is the only view."""
    return {"image": views} if isinstance(views, Tensor) else views
