"""Several views of one image, in groups by name.

Each view hashes its randomness from (seed, slot, view): the same in any batch, of a list of images or one tensor.

Letters: b images, v views, c channels, h, w pixels.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from ssvit.config.declaration import select
from ssvit.data.augment import views_options
from ssvit.data.augment.crop import InceptionCrop


class Augmentation(Protocol):
    """What makes one view of each image.

    Called with (b, c, h, w) uint8, or a list of (c, h, w), with slots (b,), a seed and the number of the view; returns
    (b, c, h', w') uint8. For views with masks or boxes it also has a method `geometry`, which takes the sides (b, 2) of
    images in their place, and returns maps (b, 2, 3); see `ssvit.data.augment.geometry`.
    """

    @property
    def bytes_per_image(self) -> int:
        """Of an image afterwards."""
        ...

    def __call__(self, images: Tensor | Sequence[Tensor], slots: Tensor, seed: int, view: int = 0) -> Tensor: ...


class Views:
    """Groups of views by name, each made by an augmentation of its own; those of a group have one size."""

    def __init__(self, groups: Mapping[str, Sequence[Augmentation]]) -> None:
        self.groups = {name: tuple(views) for name, views in groups.items()}
        self.bytes_per_image = sum(view.bytes_per_image for views in self.groups.values() for view in views)

    def __call__(self, images: Tensor | Sequence[Tensor], slots: Tensor, seed: int) -> dict[str, Tensor]:
        """(b, c, h, w) or a list of (c, h, w), uint8, with slots (b,) -> for each group (b, v, c, h', w') uint8."""
        if isinstance(images, Tensor) and not images.is_cuda:
            images = list(images)  # as files come: crops of a batch as a whole may differ by a grey level
        number = itertools.count()
        return {
            name: torch.stack([view(images, slots, seed, next(number)) for view in views], dim=1)
            for name, views in self.groups.items()
        }

    def geometry(self, sides: Tensor, slots: Tensor, seed: int) -> dict[str, Tensor]:
        """Return where the points of views lie in their images: sides (b, 2) -> for each group (b, v, 2, 3)."""
        number = itertools.count()
        return {
            name: torch.stack([view.geometry(sides, slots, seed, next(number)) for view in views], dim=1)  # type: ignore[attr-defined]
            for name, views in self.groups.items()
        }


class MultiCrop(Views):
    """DINO's views (Caron et al. 2021, main_dino.py), but bilinear where DINO's are bicubic.

    The options are those of `views_options.MultiCrop`.
    """

    def __init__(self, options: views_options.MultiCrop) -> None:
        self.options = options
        values = vars(options)
        local = {"size": options.local_size, "scale": options.local_scale}
        first, second, small = (
            select(InceptionCrop, values | box | {"blur": blur, "solarize": solarize})
            for box, blur, solarize in zip(({}, {}, local), options.blur, options.solarize, strict=True)
        )
        groups = {"global": [first, second], "local": [small] * options.local_views}
        super().__init__({name: views for name, views in groups.items() if views})
