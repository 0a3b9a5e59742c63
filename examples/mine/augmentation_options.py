"""The options of the augmentation."""

from ssvit.config.declaration import Fraction
from ssvit.data.augment.options import Crop


class Dim(Crop):
    """A centre crop with reduced brightness."""

    least: Fraction = 0.5
    """The smallest factor of the brightness."""
