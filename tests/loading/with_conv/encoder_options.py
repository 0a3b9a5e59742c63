"""The options of the encoder."""

from typing import ClassVar

from ssvit.config.declaration import Count, Size
from ssvit.models.encoder_options import Normalized


class Conv(Normalized):
    """Two convolutions."""

    depth: ClassVar[int] = 2
    poolings: ClassVar[tuple[str, ...]] = ("patch_mean",)

    image_size: Size
    """Pixels."""
    width: Count = 8
    """Channels of the layers."""
    pooling: str = "patch_mean"
    """The mean of the feature map."""
