"""Colours and sharpness changed: the operations of torchvision, for whole batches.

Each class is called with images (b, 3, h, w) uint8, or (b, 1, h, w) without saturation and hue, and slots (b,), and
gives the same shape; blur and solarization take any channels, and float32 in [0, 1] too. An image's parameters are
hashed from (seed, slot, view), and its pixels do not depend on the images beside it: sums and products have a fixed
order.

Letters: b images, c = 3 channels, h, w pixels, k taps of a filter.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ssvit.data.augment import color_options
from ssvit.randomness import uniform

_RED, _GREEN, _BLUE = 0.2989, 0.587, 0.114  # of a grey, as torchvision has them
_LEVELS = 256 - 1e-3  # of a colour in [0, 1], cut off below
_CHUNK = 1 << 19  # values that are filtered at a time: they stay in a CPU's cache


class ColorJitter(color_options.ColorJitter):
    """Brightness, contrast, saturation and hue, changed one after the other in a random order, as torchvision's.

    The factors of the first three lie in [max(0, 1 - x), 1 + x], the turn of the hue in [-x, x]; x = 0 leaves it out.
    """

    def sample(self, seed: int, slots: Tensor, view: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """slots (b,) -> which images are changed (b,) bool, factors (b, 4), and the order of operations (b, 4)."""
        numbers = uniform(seed, "color jitter", slots, 9, view)
        strengths = slots.new_tensor([self.brightness, self.contrast, self.saturation, self.hue], dtype=torch.float32)
        middle = slots.new_tensor([1.0, 1.0, 1.0, 0.0], dtype=torch.float32)
        low = torch.where(middle > 0, (1 - strengths).clamp(min=0), -strengths)
        factors = low + (middle + strengths - low) * numbers[:, 1:5]
        return numbers[:, 0] < self.probability, factors.float(), numbers[:, 5:].argsort(dim=1)

    def __call__(self, images: Tensor, slots: Tensor, seed: int, view: int = 0) -> Tensor:
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


class Grayscale(color_options.Grayscale):
    """All three channels become the image's brightness."""

    def __call__(self, images: Tensor, slots: Tensor, seed: int, view: int = 0) -> Tensor:
        rows = (uniform(seed, "grayscale", slots, 1, view)[:, 0] < self.probability).nonzero()[:, 0]
        return images.index_copy(0, rows, _gray(images[rows]).to(torch.uint8).expand_as(images[rows]))


class GaussianBlur(color_options.GaussianBlur):
    """A Gaussian filter of random width `sigma`, cut off at twice the greatest, over reflected edges."""

    def sample(self, seed: int, slots: Tensor, view: int = 0) -> tuple[Tensor, Tensor]:
        """slots (b,) -> which images are blurred (b,) bool, and sigma (b,) float64."""
        numbers = uniform(seed, "gaussian blur", slots, 2, view)
        low, high = self.sigma
        return numbers[:, 0] < self.probability, low + (high - low) * numbers[:, 1]

    def __call__(self, images: Tensor, slots: Tensor, seed: int, view: int = 0) -> Tensor:
        blurred, sigma = self.sample(seed, slots, view)
        images = images.clone()
        for rows in blurred.nonzero()[:, 0].split(max(1, _CHUNK // images[0].numel())):
            images[rows] = blur(images[rows], sigma[rows], self.reach)
        return images


class Solarize(color_options.Solarize):
    """Values of `threshold` and more are inverted."""

    def __call__(self, images: Tensor, slots: Tensor, seed: int, view: int = 0) -> Tensor:
        chosen = uniform(seed, "solarize", slots, 1, view) < self.probability
        full = 1 if images.is_floating_point() else 255
        bright = images >= self.threshold * (full / 255)
        return (full - images).where(chosen[:, :, None, None] & bright, images)


def adjust_brightness(images: Tensor, factors: Tensor) -> Tensor:
    """Values times factors (b,): (b, c, h, w) uint8 -> uint8."""
    return (images * _each(factors)).clamp_(0, 255).to(torch.uint8)


def adjust_contrast(images: Tensor, factors: Tensor) -> Tensor:
    """Between the image's mean brightness and the image, at factors (b,): (b, 3, h, w) uint8 -> uint8."""
    # Whole numbers, whose sum is the same in any order.
    mean = _gray(images).sum((2, 3), keepdim=True, dtype=torch.float64) / images[0, 0].numel()
    return _between(mean.float(), images, factors)


def adjust_saturation(images: Tensor, factors: Tensor) -> Tensor:
    """Between the grey image and the image, at factors (b,): (b, 3, h, w) uint8 -> uint8."""
    return _between(_gray(images), images, factors)


def adjust_hue(images: Tensor, turns: Tensor) -> Tensor:
    """Colours turned by `turns` (b,) of the whole circle: (b, 3, h, w) uint8 -> uint8."""
    colors = images.float() / 255
    red, green, blue = colors.unbind(1)
    most, least = colors.amax(1), colors.amin(1)
    spread = most - least
    divisor = spread.where(spread > 0, 1)
    # Sixths of the circle, from red by way of green and blue.
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
    """Gaussian filters of widths sigma (b,), of 2 * reach + 1 taps: (b, c, h, w) uint8, or float, -> the same."""
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
    """One number for each image: (b,) -> (b, 1, 1, 1)."""
    return factors[:, None, None, None]


def _gray(images: Tensor) -> Tensor:
    """The brightness of each pixel, a whole number: (b, 3, h, w) or (b, 1, h, w) uint8 -> (b, 1, h, w) float32."""
    if images.shape[1] == 1:
        return images.float()
    red, green, blue = images.float().split(1, dim=1)
    return (red * _RED + green * _GREEN + blue * _BLUE).floor_()


def _between(first: Tensor, second: Tensor, factors: Tensor) -> Tensor:
    return (second * _each(factors) + first * _each(1 - factors)).clamp_(0, 255).to(torch.uint8)
