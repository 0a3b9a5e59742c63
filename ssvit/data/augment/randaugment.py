"""RandAugment (Cubuk et al. 2020): a few operations, chosen at random of 14, all of one strength.

The operations and their strengths are those of torchvision.transforms.v2.RandAugment. Which ones an image gets, and
their signs, are hashed from (seed, slot, view).

Letters: b images, n operations one after the other, h, w pixels.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torchvision.transforms.v2.functional as tvf
from torch import Tensor

from ssvit.data.augment import geometry, randaugment_options
from ssvit.data.augment.color import adjust_contrast
from ssvit.randomness import uniform

_SHEAR, _SHIFT, _TURN = 0.3, 150 / 331, 30  # of full strength: pixels per pixel, parts of a side, degrees


def _affine(images: Tensor, **changed: Any) -> Tensor:
    unchanged = {"angle": 0.0, "translate": [0, 0], "scale": 1.0, "shear": [0.0, 0.0]}
    return tvf.affine(images, **(unchanged | changed))


def _shear(strength: float) -> float:
    return math.degrees(math.atan(_SHEAR * strength))


def _shift(strength: float, side: int) -> int:
    return int(_SHIFT * strength * side)


def _contrast(images: Tensor, factor: float) -> Tensor:
    # Not torchvision's: its mean of a large image may depend on the number of threads.
    return adjust_contrast(images, torch.full((len(images),), factor, device=images.device))


# Each takes images (b, 3, h, w) uint8 and a strength: from -1 to 1 of the first nine, from 0 to 1 of the others.
OPERATIONS: Mapping[str, Callable[[Tensor, float], Tensor]] = {
    "shear_x": lambda x, s: _affine(x, shear=[_shear(s), 0.0], center=[0, 0]),
    "shear_y": lambda x, s: _affine(x, shear=[0.0, _shear(s)], center=[0, 0]),
    "translate_x": lambda x, s: _affine(x, translate=[_shift(s, x.shape[3]), 0]),
    "translate_y": lambda x, s: _affine(x, translate=[0, _shift(s, x.shape[2])]),
    "rotate": lambda x, s: tvf.rotate(x, _TURN * s),
    "brightness": lambda x, s: tvf.adjust_brightness(x, 1 + 0.9 * s),
    "saturation": lambda x, s: tvf.adjust_saturation(x, 1 + 0.9 * s),
    "contrast": lambda x, s: _contrast(x, 1 + 0.9 * s),
    "sharpness": lambda x, s: tvf.adjust_sharpness(x, 1 + 0.9 * s),
    "identity": lambda x, s: x,
    "posterize": lambda x, s: tvf.posterize(x, bits=round(8 - 4 * s)),
    "solarize": lambda x, s: tvf.solarize(x, threshold=255 * (1 - s)),
    "autocontrast": lambda x, s: tvf.autocontrast(x),
    "equalize": lambda x, s: tvf.equalize(x),
}
_SIGNED = 9


class RandAugment(randaugment_options.RandAugment):
    """Random operations, one after the other. What a turned or shifted image leaves free is black."""

    def sample(self, seed: int, slots: Tensor, view: int = 0) -> tuple[Tensor, Tensor]:
        """slots (b,) -> places in `OPERATIONS` (b, n) int64, and strengths with their signs (b, n) float64."""
        numbers = uniform(seed, "randaugment", slots, 2 * self.operations, view)
        which = (len(OPERATIONS) * numbers[:, : self.operations]).long()
        negative = (which < _SIGNED) & (numbers[:, self.operations :] < 0.5)
        strength = torch.tensor(
            self.magnitude / randaugment_options.MAGNITUDES, dtype=torch.float64, device=slots.device
        )
        return which, (-strength).where(negative, strength)

    def __call__(self, images: Tensor, slots: Tensor, seed: int, view: int = 0) -> Tensor:
        which, strengths = self.sample(seed, slots, view)
        images, operations = images.clone(), tuple(OPERATIONS.values())
        for turn in range(self.operations):
            # Images with the same operation and the same sign go through it together.
            for place, strength in {*zip(which[:, turn].tolist(), strengths[:, turn].tolist(), strict=True)}:
                rows = ((which[:, turn] == place) & (strengths[:, turn] == strength)).nonzero()[:, 0]
                images[rows] = operations[place](images[rows], strength)
        return images

    def geometry(self, size: tuple[int, int], slots: Tensor, seed: int, view: int = 0) -> Tensor:
        """Return the maps (b, 2, 3) of images of one size; see `geometry`."""
        which, strengths = self.sample(seed, slots, view)
        (height, width), names = size, list(OPERATIONS)
        maps = geometry.turned(torch.zeros(len(slots), device=slots.device), size)
        for operation, strength in zip(which.unbind(1), strengths.unbind(1), strict=True):
            shares = {name: strength.where(operation == names.index(name), 0) for name in names[:5]}
            step = geometry.turned(_TURN * shares["rotate"], size)
            step[:, 0, 1] += _SHEAR * shares["shear_x"]
            step[:, 1, 0] += _SHEAR * shares["shear_y"]
            step[:, 0, 2] -= (_SHIFT * shares["translate_x"] * width).trunc()
            step[:, 1, 2] -= (_SHIFT * shares["translate_y"] * height).trunc()
            maps = geometry.composed(maps, step)
        return maps
