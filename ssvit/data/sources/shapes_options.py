"""Define the options of the rendered shapes."""

from collections.abc import Sequence
from typing import ClassVar

from ssvit.config.declaration import Count, Size, Whole
from ssvit.data.sources.base_options import DataSet


class Shapes(DataSet):
    """Rendered shapes: scenes with one large shape, whose form is the class."""

    image_channels: ClassVar[int] = 3
    labelled: ClassVar[bool] = True
    validated: ClassVar[bool] = False

    image_size: Size = 32
    """Pixels of an image's side, or [height, width]."""
    mean: float | Sequence[float] = 0.5
    """Mean of the channels, in [0, 1]: one number, or one for each."""
    std: float | Sequence[float] = 0.25
    """Standard deviation of the channels, in [0, 1]: one number, or one for each."""
    images: Count = 8192
    """Number of training images."""
    held_out_images: Count = 2048
    """Number of test images."""
    textures: bool = False
    """Whether the shape of an image has the texture of its class, so that both cues indicate the class; otherwise, its
    texture is independent of the class."""
    seed: Whole = 0
    """Seed of all scenes."""

    def count(self, at_most: int) -> int:
        """Return the number of training images, counting up to `at_most`."""
        return min(self.images, at_most)
