"""The options of RandAugment."""

from typing import Annotated

from annotated_types import Ge, Le

from ssvit.config.declaration import Options, Whole

MAGNITUDES = 30  # of RandAugment, the greatest
MAGNITUDE = 9  # the paper's for ResNet-50 on ImageNet
Magnitude = Annotated[int, Ge(0), Le(MAGNITUDES)]


class RandAugment(Options):
    """Random operations of one strength, as torchvision's; the defaults are the paper's for ResNet-50 on ImageNet."""

    operations: Whole = 2
    magnitude: Magnitude = MAGNITUDE
