"""The options of what changes a training crop."""

import math
from typing import Annotated

from annotated_types import Ge, Le

from ssvit.config.declaration import Fraction, Limits, NotNegative, Options, Whole

Angle = Annotated[float, Ge(0), Le(180)]


class VerticalFlip(Options):
    """Top and bottom change places."""

    probability: Fraction = 0.5


class Rotation(Options):
    """Images turned by any angle."""

    degrees: Angle = 180.0
    """The greatest angle to either side."""


SIGMA = (0.1, 2.0)  # DINO's limits of a blur's standard deviation
Hue = Annotated[float, Ge(0), Le(0.5)]


class ColorChange(Options):
    """How much colours change; the defaults are DINO's."""

    brightness: NotNegative = 0.4
    """Largest change of the brightness' factor from 1."""
    contrast: NotNegative = 0.4
    """Largest change of the contrast's factor from 1."""
    saturation: NotNegative = 0.2
    """Largest change of the saturation's factor from 1."""
    hue: Hue = 0.1
    """Largest turn of the hue, as a part of the whole circle."""


class ColorJitter(ColorChange):
    """Brightness, contrast, saturation and hue changed at random, as torchvision's."""

    probability: Fraction = 0.8


class Grayscale(Options):
    """Images lose their colours."""

    probability: Fraction = 0.2


class GaussianBlur(Options):
    """A Gaussian filter of random width."""

    probability: Fraction = 0.5
    sigma: Limits = SIGMA
    """Least and greatest standard deviation, in pixels."""

    @property
    def reach(self) -> int:
        """Pixels on each side that the filter covers: two of the greatest standard deviations."""
        return math.ceil(2 * self.sigma[1])


class Solarize(Options):
    """Bright values are inverted."""

    probability: Fraction = 0.2
    threshold: Annotated[int, Ge(0), Le(255)] = 128
    """The least value that is inverted."""


MAGNITUDES = 30  # of RandAugment, the greatest
MAGNITUDE = 9  # the paper's for ResNet-50 on ImageNet
Magnitude = Annotated[int, Ge(0), Le(MAGNITUDES)]


class RandAugment(Options):
    """Random operations of one strength, as torchvision's; the defaults are the paper's for ResNet-50 on ImageNet."""

    operations: Whole = 2
    magnitude: Magnitude = MAGNITUDE
