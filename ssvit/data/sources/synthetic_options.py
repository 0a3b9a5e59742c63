"""The options of the embedded data set."""

from typing import ClassVar, Literal

from ssvit.config.declaration import Count, Pair, Whole
from ssvit.data.sources.base_options import DataSet


class Synthetic(DataSet):
    """The embedded set."""

    image_channels: ClassVar[int] = 3
    labelled: ClassVar[bool] = True
    validated: ClassVar[bool] = False

    size: Pair = (32, 32)
    """Pixels of an image's side, or [height, width]; kept as the pair."""
    images: Count = 8192
    """Images to train on."""
    held_out_images: Count = 2048
    """Images to measure on."""
    seed: Whole = 0
    """Seed of all scenes."""
    version: Literal[1, 2] = 2
    """1: small shapes at any angle; 2: large ones, nearly upright."""

    def count(self, at_most: int) -> int:
        return min(self.images, at_most)
