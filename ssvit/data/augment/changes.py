"""Augmentations of training crops for complete batches: flips, rotations, colours, sharpness, and RandAugment.

Each class is called with images (b, c, h, w), uint8 or float32 in [0, 1], and slots (b,), and returns images of the
same shape and dtype. Colour augmentations take uint8 of 1 or 3 channels and skip saturation and hue for 1 channel. The
parameters of an image are hashed from (seed, slot, view), and its pixels do not depend on the batch: sums and products
have a fixed order. `geometry` returns the maps (b, 2, 3) of each geometric operation (`ssvit.data.augment.geometry`).

The operations follow torchvision. RandAugment (Cubuk et al. 2020) applies a few of 14 operations with one magnitude.

Letters: b images, c channels, h, w pixels, k taps of a filter, n consecutive operations.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ssvit.data.augment import geometry, options
from ssvit.engine.randomness import uniform

_RED, _GREEN, _BLUE = 0.2989, 0.587, 0.114  # luminance weights of torchvision
_LEVELS = 256 - 1e-3  # scale from [0, 1] to integers, which are then truncated
_CHUNK = 1 << 19  # values filtered at a time, so that they stay in a CPU's cache
TRIES = 10  # attempts to sample a rectangle that fits into the image, as in torchvision
_ERASED_RATIO = (0.3, 1 / 0.3)  # minimum and maximum aspect ratio of an erased rectangle (Zhong et al. 2020)
_SHEAR, _SHIFT, _TURN = 0.3, 150 / 331, 30  # at full magnitude: ratio, fraction of a side, degrees


class Change:
    """An augmentation of images of one size, which keeps their size."""

    def __call__(self, images: Tensor, slots: Tensor, seed: int, view: int = 0) -> Tensor:
        """Return the augmented images, (b, c, h, w)."""
        raise NotImplementedError

    def geometry(self, size: tuple[int, int], slots: Tensor, seed: int, view: int = 0) -> list[Tensor]:
        """Return the map of each operation that moves pixels, in the order of application.

        Args:
            size: Height and width of the images.
            slots: (b,) int64.
            seed: Seed of the run.
            view: Number of the view.

        Returns:
            Maps (b, 2, 3) from the images after an operation to those before it; none for a change of colours.
        """
        return []


@dataclass(frozen=True)
class VerticalFlip(Change):
    """Flip images from top to bottom."""

    probability: float

    def __call__(self, images: Tensor, slots: Tensor, seed: int, view: int = 0) -> Tensor:
        """Return the augmented images."""
        chosen = self.sample(seed, slots, view)
        return images.flip(2).where(chosen[:, None, None, None], images)

    def sample(self, seed: int, slots: Tensor, view: int = 0) -> Tensor:
        """Return which images are flipped, slots (b,) -> (b,) bool."""
        return uniform(seed, "vertical flip", slots, 1, view)[:, 0] < self.probability

    def geometry(self, size: tuple[int, int], slots: Tensor, seed: int, view: int = 0) -> list[Tensor]:
        """Return the maps (b, 2, 3) of the flips."""
        return [geometry.flipped(self.sample(seed, slots, view), size, axis=1)]


class QuarterTurns(Change):
    """Rotate square images by 0, 90, 180 or 270 degrees, with equal probabilities."""

    def sample(self, seed: int, slots: Tensor, view: int = 0) -> Tensor:
        """Return the number of counter-clockwise quarter turns, slots (b,) -> (b,) int64, 0 to 3."""
        return (4 * uniform(seed, "quarter turns", slots, 1, view)[:, 0]).long()

    def __call__(self, images: Tensor, slots: Tensor, seed: int, view: int = 0) -> Tensor:
        """Return the augmented images."""
        quarters = self.sample(seed, slots, view)
        rotated = images.clone()
        for quarter in (1, 2, 3):
            rows = (quarters == quarter).nonzero()[:, 0]
            rotated[rows] = images[rows].rot90(quarter, (2, 3))
        return rotated

    def geometry(self, size: tuple[int, int], slots: Tensor, seed: int, view: int = 0) -> list[Tensor]:
        """Return the maps (b, 2, 3) of the rotations."""
        return [geometry.rotated(90 * self.sample(seed, slots, view), size)]


@dataclass(frozen=True)
class Rotation(Change):
    """Rotate images by a random angle between -degrees and degrees."""

    degrees: float

    def sample(self, seed: int, slots: Tensor, view: int = 0) -> Tensor:
        """Return the counter-clockwise angles in degrees, slots (b,) -> (b,) float64."""
        return self.degrees * (2 * uniform(seed, "rotation", slots, 1, view)[:, 0] - 1)

    def __call__(self, images: Tensor, slots: Tensor, seed: int, view: int = 0) -> Tensor:
        """Return the augmented images."""
        return rotate(images, self.sample(seed, slots, view))

    def geometry(self, size: tuple[int, int], slots: Tensor, seed: int, view: int = 0) -> list[Tensor]:
        """Return the maps (b, 2, 3) of the rotations."""
        return [geometry.rotated(self.sample(seed, slots, view), size)]


def rotate(images: Tensor, degrees: Tensor) -> Tensor:
    """Rotate images counter-clockwise about their centre, with bilinear interpolation.

    Empty corners are filled by reflection, so that no black corner reveals the angle.

    Args:
        images: (b, c, h, w).
        degrees: (b,).

    Returns:
        (b, c, h, w).
    """
    h, w = images.shape[2:]
    angle = degrees.deg2rad()[:, None, None]
    cos, sin = angle.cos().float(), angle.sin().float()
    x = torch.arange(w, dtype=torch.float32, device=images.device) - (w - 1) / 2
    y = torch.arange(h, dtype=torch.float32, device=images.device)[:, None] - (h - 1) / 2
    # The source point of (y, x), in units of half the image's sides from its centre.
    shown = torch.stack(((cos * x - sin * y) * (2 / w), (sin * x + cos * y) * (2 / h)), dim=-1)
    rotated = F.grid_sample(images.float(), shown, padding_mode="reflection", align_corners=False)
    return rotated if images.is_floating_point() else rotated.round_().to(torch.uint8)


@dataclass(frozen=True)
class ColorJitter(Change):
    """Change brightness, contrast, saturation and hue in a random order, as in torchvision.

    The factors of the first three are in [max(0, 1 - x), 1 + x], the shift of the hue is in [-x, x]; x = 0 disables
    one.
    """

    probability: float
    brightness: float
    contrast: float
    saturation: float
    hue: float

    def sample(self, seed: int, slots: Tensor, view: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """Return which images are changed, (b,) bool, the factors (b, 4), and the order of the operations (b, 4)."""
        numbers = uniform(seed, "color jitter", slots, 9, view)
        strengths = slots.new_tensor([self.brightness, self.contrast, self.saturation, self.hue], dtype=torch.float32)
        middle = slots.new_tensor([1.0, 1.0, 1.0, 0.0], dtype=torch.float32)
        low = torch.where(middle > 0, (1 - strengths).clamp(min=0), -strengths)
        factors = low + (middle + strengths - low) * numbers[:, 1:5]
        return numbers[:, 0] < self.probability, factors.float(), numbers[:, 5:].argsort(dim=1)

    def __call__(self, images: Tensor, slots: Tensor, seed: int, view: int = 0) -> Tensor:
        """Return the augmented images."""
        changed, factors, order = self.sample(seed, slots, view)
        images = images.clone()
        operations = (adjust_brightness, adjust_contrast, adjust_saturation, adjust_hue)
        strengths = (self.brightness, self.contrast, self.saturation, self.hue)
        if images.shape[1] == 1:
            strengths = (self.brightness, self.contrast, 0, 0)
        for turn in range(len(operations)):
            for which, (operation, strength) in enumerate(zip(operations, strengths, strict=True)):
                rows = (changed & (order[:, turn] == which)).nonzero()[:, 0] if strength else ()
                if len(rows):
                    images[rows] = operation(images[rows], factors[rows, which])
        return images


@dataclass(frozen=True)
class Grayscale(Change):
    """Replace all channels by the luminance of the image."""

    probability: float

    def __call__(self, images: Tensor, slots: Tensor, seed: int, view: int = 0) -> Tensor:
        """Return the augmented images."""
        rows = (uniform(seed, "grayscale", slots, 1, view)[:, 0] < self.probability).nonzero()[:, 0]
        return images.index_copy(0, rows, _gray(images[rows]).to(torch.uint8).expand_as(images[rows]))


@dataclass(frozen=True)
class GaussianBlur(Change):
    """Blur images with a Gaussian filter of random standard deviation, between the values of `sigma`.

    The filter is truncated at twice the maximum standard deviation; images are padded by reflection.
    """

    probability: float
    sigma: Sequence[float]

    def sample(self, seed: int, slots: Tensor, view: int = 0) -> tuple[Tensor, Tensor]:
        """Return which images are blurred, (b,) bool, and the standard deviations (b,) float64."""
        numbers = uniform(seed, "gaussian blur", slots, 2, view)
        low, high = self.sigma
        return numbers[:, 0] < self.probability, low + (high - low) * numbers[:, 1]

    def __call__(self, images: Tensor, slots: Tensor, seed: int, view: int = 0) -> Tensor:
        """Return the augmented images."""
        blurred, sigma = self.sample(seed, slots, view)
        images = images.clone()
        for rows in blurred.nonzero()[:, 0].split(max(1, _CHUNK // images[0].numel())):
            images[rows] = blur(images[rows], sigma[rows], options.reach(self.sigma))
        return images


@dataclass(frozen=True)
class Solarize(Change):
    """Invert values of 128 and more."""

    probability: float

    def __call__(self, images: Tensor, slots: Tensor, seed: int, view: int = 0) -> Tensor:
        """Return the augmented images."""
        chosen = uniform(seed, "solarize", slots, 1, view) < self.probability
        full = 1 if images.is_floating_point() else 255
        bright = images >= 128 * (full / 255)
        return (full - images).where(chosen[:, :, None, None] & bright, images)


@dataclass(frozen=True)
class Erasing(Change):
    """Replace a rectangle of random area, aspect ratio and position by random pixels (Zhong et al. 2020).

    As in the paper, values are uniform; in timm and torchvision, they are normal and added after the normalisation.
    """

    probability: float
    area: Sequence[float]

    def sample(self, size: tuple[int, int], slots: Tensor, seed: int, view: int = 0) -> Tensor:
        """Return top, left, height and width of the erased rectangles, slots (b,) -> (b, 4) int64; 0 for none."""
        numbers = uniform(seed, "erasing", slots, 2 * TRIES + 3, view)
        sides = torch.tensor([size], dtype=torch.float64, device=slots.device)
        h, w, fits = first_fit(numbers, sides, sides - 1, self.area, _ERASED_RATIO)
        start = (numbers[:, -3:-1] * (sides - torch.stack((h, w), dim=1) + 1)).floor()
        boxes = torch.cat((start, h[:, None], w[:, None]), dim=1).long()
        return boxes * (fits & (numbers[:, -1] < self.probability))[:, None]

    def __call__(self, images: Tensor, slots: Tensor, seed: int, view: int = 0) -> Tensor:
        """Return the augmented images."""
        boxes = self.sample((images.shape[2], images.shape[3]), slots, seed, view)
        y, x = (torch.arange(side, device=images.device) for side in images.shape[2:])
        images = images.clone()
        for rows in boxes[:, 2].nonzero()[:, 0].split(max(1, _CHUNK // images[0].numel())):
            top, left, h, w = boxes[rows, :, None].unbind(1)
            inside = ((y >= top) & (y < top + h))[:, :, None] & ((x >= left) & (x < left + w))[:, None]
            noise = (256 * uniform(seed, "erasing pixels", slots[rows], images[0].numel(), view)).floor()
            noise = (noise / 255 if images.is_floating_point() else noise).to(images.dtype)
            images[rows] = noise.view(-1, *images.shape[1:]).where(inside[:, None], images[rows])
        return images


def first_fit(
    numbers: Tensor, sides: Tensor, limits: Tensor, area: Sequence[float], ratio: Sequence[float]
) -> tuple[Tensor, Tensor, Tensor]:
    """Sample the sides of rectangles: the first of `TRIES` attempts that fits.

    Args:
        numbers: Uniform random numbers, (b, 2 * TRIES) or more.
        sides: Height and width of the images in pixels, (b, 2) float64.
        limits: Maximum height and width of the rectangles, (b, 2).
        area: Minimum and maximum fraction of the image's area, sampled uniformly.
        ratio: Minimum and maximum aspect ratio, width / height, whose logarithm is sampled uniformly.

    Returns:
        Heights (b,) and widths (b,) as whole numbers in float64, and whether an attempt fits, (b,) bool.
    """
    areas = sides.prod(1, keepdim=True) * (area[0] + (area[1] - area[0]) * numbers[:, :TRIES])
    low, high = ratio
    ratios = torch.exp(math.log(low) + (math.log(high) - math.log(low)) * numbers[:, TRIES : 2 * TRIES])
    widths, heights = (areas * ratios).sqrt().round(), (areas / ratios).sqrt().round()
    fits = (widths > 0) & (heights > 0) & (widths <= limits[:, 1:]) & (heights <= limits[:, :1])
    first = fits.byte().argmax(dim=1, keepdim=True)
    return heights.gather(1, first)[:, 0], widths.gather(1, first)[:, 0], fits.gather(1, first)[:, 0]


def adjust_brightness(images: Tensor, factors: Tensor) -> Tensor:
    """Multiply images by factors (b,): (b, c, h, w) uint8 -> uint8."""
    return (images * _each(factors)).clamp_(0, 255).to(torch.uint8)


def adjust_contrast(images: Tensor, factors: Tensor) -> Tensor:
    """Interpolate between the mean luminance and the image by factors (b,): (b, 3, h, w) uint8 -> uint8."""
    # The sum of integers does not depend on their order.
    mean = _gray(images).sum((2, 3), keepdim=True, dtype=torch.float64) / images[0, 0].numel()
    return _between(mean.float(), images, factors)


def adjust_saturation(images: Tensor, factors: Tensor) -> Tensor:
    """Interpolate between the grey image and the image by factors (b,): (b, 3, h, w) uint8 -> uint8."""
    return _between(_gray(images), images, factors)


def adjust_hue(images: Tensor, turns: Tensor) -> Tensor:
    """Shift hues by `turns` (b,), fractions of the colour circle: (b, 3, h, w) uint8 -> uint8."""
    colors = images.float() / 255
    red, green, blue = colors.unbind(1)
    most, least = colors.amax(1), colors.amin(1)
    spread = most - least
    divisor = spread.where(spread > 0, 1)
    # Hue in sixths of the circle, from red by way of green and blue.
    hue = (red - green) / divisor + 4
    hue = torch.where(most == green, (blue - red) / divisor + 2, hue)
    hue = torch.where(most == red, (green - blue) / divisor, hue)
    hue = hue + turns[:, None, None] * 6
    channels = []
    for corner in (5, 3, 1):
        distance = (hue + corner).remainder(6)
        channels.append(most - spread * torch.minimum(distance, 4 - distance).clamp(0, 1))
    return (torch.stack(channels, 1) * _LEVELS).to(torch.uint8)


def blur(images: Tensor, sigma: Tensor, reach: int) -> Tensor:
    """Apply Gaussian filters of 2 * reach + 1 taps.

    Args:
        images: (b, c, h, w) uint8 or float.
        sigma: Standard deviations in pixels, (b,).
        reach: Radius of the filters in pixels.

    Returns:
        (b, c, h, w) of the same dtype.
    """
    distance = torch.arange(reach + 1, device=images.device)
    weights = torch.exp(-0.5 * (distance / sigma[:, None].double()).square())
    weights = (weights / (2 * weights.sum(1, keepdim=True) - 1)).float()
    x = F.pad(images.float(), (reach,) * 4, mode="reflect")
    for axis in (2, 3):
        size = x.shape[axis] - 2 * reach
        shifted = [x.narrow(axis, start, size) for start in range(2 * reach + 1)]
        x = shifted[reach] * _each(weights[:, 0])
        for step in range(1, reach + 1):
            x += (shifted[reach - step] + shifted[reach + step]).mul_(_each(weights[:, step]))
    return x if images.is_floating_point() else x.round_().to(torch.uint8)


def _each(factors: Tensor) -> Tensor:
    """Broadcast one number per image: (b,) -> (b, 1, 1, 1)."""
    return factors[:, None, None, None]


def _gray(images: Tensor) -> Tensor:
    """Return the luminance of each pixel, rounded down: (b, 3, h, w) or (b, 1, h, w) uint8 -> (b, 1, h, w) float32."""
    if images.shape[1] == 1:
        return images.float()
    red, green, blue = images.float().split(1, dim=1)
    return (red * _RED + green * _GREEN + blue * _BLUE).floor_()


def _between(first: Tensor, second: Tensor, factors: Tensor) -> Tensor:
    return (second * _each(factors) + first * _each(1 - factors)).clamp_(0, 255).to(torch.uint8)


def _torchvision() -> ModuleType:
    """Import torchvision's operations, which takes as long as importing torch."""
    from torchvision.transforms.v2 import functional

    return functional


def _affine(images: Tensor, **changed: Any) -> Tensor:
    unchanged = {"angle": 0.0, "translate": [0, 0], "scale": 1.0, "shear": [0.0, 0.0]}
    return _torchvision().affine(images, **(unchanged | changed))


def _shear(strength: float) -> float:
    return math.degrees(math.atan(_SHEAR * strength))


def _shift(strength: float, side: int) -> int:
    return int(_SHIFT * strength * side)


def _contrast(images: Tensor, factor: float) -> Tensor:
    # Not torchvision's, whose mean of a large image may depend on the number of threads.
    return adjust_contrast(images, torch.full((len(images),), factor, device=images.device))


# Each takes images (b, 3, h, w) uint8 and a strength: in [-1, 1] for the first nine, in [0, 1] after them.
OPERATIONS: Mapping[str, Callable[[Tensor, float], Tensor]] = {
    "shear_x": lambda x, s: _affine(x, shear=[_shear(s), 0.0], center=[0, 0]),
    "shear_y": lambda x, s: _affine(x, shear=[0.0, _shear(s)], center=[0, 0]),
    "translate_x": lambda x, s: _affine(x, translate=[_shift(s, x.shape[3]), 0]),
    "translate_y": lambda x, s: _affine(x, translate=[0, _shift(s, x.shape[2])]),
    "rotate": lambda x, s: _torchvision().rotate(x, _TURN * s),
    "brightness": lambda x, s: _torchvision().adjust_brightness(x, 1 + 0.9 * s),
    "saturation": lambda x, s: _torchvision().adjust_saturation(x, 1 + 0.9 * s),
    "contrast": lambda x, s: _contrast(x, 1 + 0.9 * s),
    "sharpness": lambda x, s: _torchvision().adjust_sharpness(x, 1 + 0.9 * s),
    "identity": lambda x, s: x,
    "posterize": lambda x, s: _torchvision().posterize(x, bits=round(8 - 4 * s)),
    "solarize": lambda x, s: _torchvision().solarize(x, threshold=255 * (1 - s)),
    "autocontrast": lambda x, s: _torchvision().autocontrast(x),
    "equalize": lambda x, s: _torchvision().equalize(x),
}
_SIGNED = 9


@dataclass(frozen=True)
class RandAugment(Change):
    """Apply random operations one after another. Empty areas after a rotation, shear or translation are black."""

    operations: int
    magnitude: int

    def sample(self, seed: int, slots: Tensor, view: int = 0) -> tuple[Tensor, Tensor]:
        """Return indices into `OPERATIONS`, (b, n) int64, and signed magnitudes, (b, n) float64, for slots (b,)."""
        numbers = uniform(seed, "randaugment", slots, 2 * self.operations, view)
        operation_ids = (len(OPERATIONS) * numbers[:, : self.operations]).long()
        negative = (operation_ids < _SIGNED) & (numbers[:, self.operations :] < 0.5)
        strength = torch.tensor(self.magnitude / options.MAGNITUDES, dtype=torch.float64, device=slots.device)
        return operation_ids, (-strength).where(negative, strength)

    def __call__(self, images: Tensor, slots: Tensor, seed: int, view: int = 0) -> Tensor:
        """Return the augmented images."""
        operation_ids, strengths = self.sample(seed, slots, view)
        images, operations = images.clone(), tuple(OPERATIONS.values())
        for turn in range(self.operations):
            # Images with the same operation and sign are processed in one call.
            for operation, strength in {
                *zip(operation_ids[:, turn].tolist(), strengths[:, turn].tolist(), strict=True)
            }:
                rows = ((operation_ids[:, turn] == operation) & (strengths[:, turn] == strength)).nonzero()[:, 0]
                images[rows] = operations[operation](images[rows], strength)
        return images

    def geometry(self, size: tuple[int, int], slots: Tensor, seed: int, view: int = 0) -> list[Tensor]:
        """Return the maps (b, 2, 3) of each operation; the identity for images whose operation changes colours."""
        operation_ids, strengths = self.sample(seed, slots, view)
        (height, width), names = size, list(OPERATIONS)
        maps = []
        for operation, strength in zip(operation_ids.unbind(1), strengths.unbind(1), strict=True):
            shares = {name: strength.where(operation == names.index(name), 0) for name in names[:5]}
            operation_maps = geometry.rotated(_TURN * shares["rotate"], size)
            operation_maps[:, 0, 1] += _SHEAR * shares["shear_x"]
            operation_maps[:, 1, 0] += _SHEAR * shares["shear_y"]
            operation_maps[:, 0, 2] -= (_SHIFT * shares["translate_x"] * width).trunc()
            operation_maps[:, 1, 2] -= (_SHIFT * shares["translate_y"] * height).trunc()
            maps.append(operation_maps)
        return maps


def enabled(crop: options.RandomCrop) -> tuple[Change, ...]:
    """Return the augmentations whose option of a crop is not 0, in the order in which they are applied."""
    every: tuple[tuple[float, Change], ...] = (
        (crop.vertical_flip, VerticalFlip(crop.vertical_flip)),
        (crop.quarter_turns, QuarterTurns()),
        (crop.rotation, Rotation(crop.rotation)),
        (crop.randaugment, RandAugment(crop.randaugment, crop.magnitude)),
        (crop.jitter, ColorJitter(crop.jitter, crop.brightness, crop.contrast, crop.saturation, crop.hue)),
        (crop.grayscale, Grayscale(crop.grayscale)),
        (crop.blur, GaussianBlur(crop.blur, crop.sigma)),
        (crop.solarize, Solarize(crop.solarize)),
        (crop.erasing, Erasing(crop.erasing, crop.erased_area)),
    )
    return tuple(change for wanted, change in every if wanted)
