"""Make several views of each image, in groups by name.

The randomness of a view is hashed from (seed, slot, view): it is the same in any batch, for a list of images as for one
tensor.

Letters: b images, v views, c channels, h, w pixels.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from ssvit.config.declaration import select
from ssvit.data.augment.crop import InceptionCrop
from ssvit.data.augment.options import InceptionCrop as InceptionCropOptions
from ssvit.data.augment.options import MultiCrop as MultiCropOptions


class Augmentation(Protocol):
    """Make one view of each image.

    For views with masks or boxes, an augmentation also needs the method `geometry` of
    `ssvit.data.augment.crop.RandomCrop`, which takes the sides (b, 2) of the images and returns maps (b, 2, 3). If it
    shows reflected or black pixels that these maps take into the image, masks also need the method `valid_pixels`.
    """

    @property
    def bytes_per_image(self) -> int:
        """Return the bytes of an augmented image."""
        ...

    def __call__(self, images: Tensor | Sequence[Tensor], slots: Tensor, seed: int, view: int = 0) -> Tensor:
        """Return one view of each image.

        Args:
            images: (b, c, h, w) uint8, or a list of (c, h, w).
            slots: (b,) int64.
            seed: Seed of the run.
            view: Number of the view.

        Returns:
            (b, c, h', w') uint8.
        """
        ...


class Views:
    """Groups of views by name, each view made by an augmentation; the views of a group have one size."""

    def __init__(self, groups: Mapping[str, Sequence[Augmentation]]) -> None:
        self.groups = {name: tuple(views) for name, views in groups.items()}
        self.bytes_per_image = sum(view.bytes_per_image for views in self.groups.values() for view in views)

    def __call__(self, images: Tensor | Sequence[Tensor], slots: Tensor, seed: int) -> dict[str, Tensor]:
        """Return the views of each group.

        Args:
            images: (b, c, h, w) uint8, or a list of (c, h, w).
            slots: (b,) int64.
            seed: Seed of the run.

        Returns:
            For each group, (b, v, c, h', w') uint8.
        """
        if isinstance(images, Tensor) and not images.is_cuda:
            images = list(images)  # like images from files: resizing a batch at once may differ by a grey level
        number = itertools.count()
        return {
            name: torch.stack([view(images, slots, seed, next(number)) for view in views], dim=1)
            for name, views in self.groups.items()
        }

    def geometry(self, sides: Tensor, slots: Tensor, seed: int) -> dict[str, Tensor]:
        """Return the maps from views to their images.

        Args:
            sides: (b, 2), height and width of each image.
            slots: (b,) int64.
            seed: Seed of the run.

        Returns:
            For each group, (b, v, 2, 3).
        """
        number = itertools.count()
        return {
            name: torch.stack([view.geometry(sides, slots, seed, next(number)) for view in views], dim=1)  # type: ignore[attr-defined]
            for name, views in self.groups.items()
        }


class MultiCrop(Views):
    """DINO's multi-crop (Caron et al. 2021, main_dino.py), with bilinear instead of bicubic interpolation.

    Args:
        options: The options.
    """

    def __init__(self, options: MultiCropOptions) -> None:
        self.options = options
        values = vars(options)
        local = {"size": options.local_size, "scale": options.local_scale}
        first, second, small = (
            InceptionCrop(select(InceptionCropOptions, values | box | {"blur": blur, "solarize": solarize}))
            for box, blur, solarize in zip(({}, {}, local), options.blur, options.solarize, strict=True)
        )
        groups = {"global": [first, second], "local": [small] * options.local_views}
        super().__init__({name: views for name, views in groups.items() if views})
