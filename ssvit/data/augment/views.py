"""Several views of one image: augmentations one after the other, and groups of them by name.

The views of an image are numbered, and each hashes its randomness from (seed, slot, view): the same image, slot and
seed give the same views in any batch, whether images come as a list or as one tensor.

Letters: b images, v views, c channels, h, w pixels.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ssvit.data.augment import options
from ssvit.data.augment.color import ColorJitter, GaussianBlur, Grayscale, Solarize
from ssvit.data.augment.crop import InceptionCrop


class Augmentation(Protocol):
    """What makes one view of each image.

    Called with (b, c, h, w) uint8, or a list of (c, h, w), with slots (b,), a seed and the number of the view; returns
    (b, c, h', w') uint8. bytes_per_image: what one image takes afterwards.
    """

    bytes_per_image: int

    def __call__(self, images: Tensor | Sequence[Tensor], slots: Tensor, seed: int, view: int = 0) -> Tensor: ...


class Chain:
    """A crop, and what changes its colours, one after the other."""

    def __init__(self, crop: Augmentation, *steps: Augmentation) -> None:
        self.steps = (crop, *steps)
        self.bytes_per_image = crop.bytes_per_image

    def __call__(self, images: Tensor | Sequence[Tensor], slots: Tensor, seed: int, view: int = 0) -> Tensor:
        """As an `Augmentation`."""
        for step in self.steps:
            images = step(images, slots, seed, view)
        return images


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


class MultiCrop(Views):
    """DINO's views (Caron et al. 2021, main_dino.py): "global", two large crops, and "local", several small ones.

    Each is flipped, its colours changed, made grey, blurred and solarised with some probability; see `options`. Where
    DINO resizes by cubic interpolation, this is bilinear.
    """

    def __init__(self, **given: Any) -> None:
        self.options = told = options.MultiCrop(**given)
        crop = {"ratio": told.ratio, "flip": told.flip}
        large = InceptionCrop(size=told.size, scale=told.scale, **crop)
        small = InceptionCrop(size=told.local_size, scale=told.local_scale, **crop)
        first, second, local = (
            Chain(
                cut,
                ColorJitter(**told.colors, probability=told.jitter),
                Grayscale(probability=told.grayscale),
                GaussianBlur(probability=blur, sigma=told.sigma),
                Solarize(probability=solarize),
            )
            for cut, blur, solarize in zip((large, large, small), told.blur, told.solarize, strict=True)
        )
        locals_ = {"local": [local] * told.local_views} if told.local_views else {}
        super().__init__({"global": [first, second], **locals_})
