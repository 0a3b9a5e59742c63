"""The options of the data set."""

from typing import ClassVar

from ssvit.config.declaration import Count, Size
from ssvit.data.sources.base_options import DataSet


class Stripes(DataSet):
    """Noise with vertical or horizontal stripes."""

    also: ClassVar = {"/augment@data.augment": "mine"}
    sets: ClassVar = {"data": {"image_size": 32, "mean": 0.5, "std": 0.25}}

    images: Count = 1000
    """Training images."""
    held_out_images: Count = 200
    """Test images."""
    image_size: Size
    """Pixels of an image's side."""
