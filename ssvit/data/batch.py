"""What a training step takes: the views of some images. Letters: b images, v views, c channels, h, w pixels."""

from collections.abc import Callable, Sequence
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

    Attributes:
        views: The views by name, uint8. A single view is called "image", (b, c, h, w); several of one size have a name
            together, as "global" and "local", (b, v, c, h, w).
        labels: (b,) int64; (b, k) bool where an image may have several classes; or None.
        slots: (b,) int64, the numbers of the images in the order of training. All that is random about an image is a
            function of the seed, its slot and the view.
        targets: What a model predicts of an image besides its class, by name, or None: "masks" (b, h, w) uint8, the
            class of each pixel, and "boxes" (b, m, 4) float32, top, left, height and width in pixels, of height 0 where
            an image has fewer than m.
        seed: The seed of the run.
    """

    views: dict[str, Tensor]
    labels: Tensor | None
    slots: Tensor
    targets: dict[str, Tensor] | None = None
    seed: int = 0

    @classmethod
    def of(cls, images: Tensor, labels: Tensor | None = None, slots: Tensor | None = None) -> "Batch":
        """One view of images (b, c, h, w); slots: by default the first ones."""
        return cls({"image": images}, labels, torch.arange(len(images)) if slots is None else slots)

    def only_view(self) -> Tensor:
        """Return the only view, (b, c, h, w). UserError if there are several.

        A method, since torch.compile of torch 2.10 traces methods of named tuples, but not their properties.
        """
        if "image" not in self.views:
            raise UserError(
                f"the augmentation gives the views {' and '.join(self.views)}, and what is trained takes one view of "
                "each image: choose another, as augment@data.augment=inception_crop"
            )
        return self.views["image"]

    @property
    def images(self) -> Tensor:
        """The only view, outside of what is compiled."""
        return self.only_view()

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors: views, labels, targets and slots."""
        labels = () if self.labels is None else (self.labels,)
        return (*self.views.values(), *labels, *(self.targets or {}).values(), self.slots)

    def map(self, function: Callable[[Tensor], Tensor]) -> "Batch":
        """Return the batch of what a function makes of each tensor, in the order of `tensors`."""
        views = {name: function(view) for name, view in self.views.items()}
        labels = None if self.labels is None else function(self.labels)
        targets = None if self.targets is None else {name: function(one) for name, one in self.targets.items()}
        return self._replace(views=views, labels=labels, slots=function(self.slots), targets=targets)

    @staticmethod
    def joined(parts: "Sequence[Batch]") -> "Batch":
        """Concatenate batches that have the same views and targets."""
        columns = zip(*(part.tensors for part in parts), strict=True)
        return parts[0].map(lambda _: torch.cat(next(columns)))

    def augmented(self, transform: Transform, seed: int) -> "Batch":
        """The views that a transform makes of the only view."""
        return self._replace(views=named(transform(self.images, self.slots, seed)))

    def to(self, device: torch.device | str) -> "Batch":
        """Return the batch on a device."""
        return self.map(lambda tensor: tensor.to(device, non_blocking=True))


def named(views: Tensor | dict[str, Tensor]) -> dict[str, Tensor]:
    """Views by name, of what an augmentation returns: a tensor alone is the only view."""
    return {"image": views} if isinstance(views, Tensor) else views
