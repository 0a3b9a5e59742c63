"""The options of flips and rotations."""

from typing import Annotated

from annotated_types import Ge, Le

from ssvit.config.declaration import Fraction, Options

Angle = Annotated[float, Ge(0), Le(180)]


class VerticalFlip(Options):
    """Top and bottom change places."""

    probability: Fraction = 0.5


class Rotation(Options):
    """Images turned by any angle."""

    degrees: Angle = 180.0
    """The greatest angle to either side."""
