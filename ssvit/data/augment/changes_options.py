"""Define the options of the augmentations after a training crop."""

import math
from typing import Annotated

from annotated_types import Ge, Le

from ssvit.config.declaration import Fraction, Limits, NotNegative, Options, Whole

Angle = Annotated[float, Ge(0), Le(180)]


class VerticalFlip(Options):
    """Flip images from top to bottom."""

    probability: Fraction = 0.5


class Rotation(Options):
    """Rotate images by a random angle."""

    degrees: Angle = 180.0
    """Maximum angle to either side, in degrees."""


SIGMA = (0.1, 2.0)  # DINO's range of the standard deviation of a blur
Hue = Annotated[float, Ge(0), Le(0.5)]


class ColorChange(Options):
    """The strength of colour jitter; the defaults are DINO's."""

    brightness: NotNegative = 0.4
    """Maximum deviation of the brightness factor from 1."""
    contrast: NotNegative = 0.4
    """Maximum deviation of the contrast factor from 1."""
    saturation: NotNegative = 0.2
    """Maximum deviation of the saturation factor from 1."""
    hue: Hue = 0.1
    """Maximum shift of the hue, as a fraction of the colour circle."""


class ColorJitter(ColorChange):
    """Change brightness, contrast, saturation and hue at random, as in torchvision."""

    probability: Fraction = 0.8


class Grayscale(Options):
    """Convert images to grey."""

    probability: Fraction = 0.2


class GaussianBlur(Options):
    """Blur images with a Gaussian filter of random width."""

    probability: Fraction = 0.5
    sigma: Limits = SIGMA
    """Minimum and maximum standard deviation, in pixels."""

    @property
    def reach(self) -> int:
        """Return the radius of the filter in pixels: twice the maximum standard deviation, rounded up."""
        return math.ceil(2 * self.sigma[1])


class Solarize(Options):
    """Invert bright values."""

    probability: Fraction = 0.2
    threshold: Annotated[int, Ge(0), Le(255)] = 128
    """Smallest value that is inverted."""


MAGNITUDES = 30  # RandAugment's maximum magnitude
MAGNITUDE = 9  # the paper's for ResNet-50 on ImageNet
Magnitude = Annotated[int, Ge(0), Le(MAGNITUDES)]


class RandAugment(Options):
    """Apply random operations of one magnitude, as in torchvision; defaults of the paper for ResNet-50 on ImageNet."""

    operations: Whole = 2
    magnitude: Magnitude = MAGNITUDE
