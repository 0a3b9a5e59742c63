"""The options of the encoder."""

from typing import Annotated, ClassVar

from ssvit.config.declaration import Count, From, Size
from ssvit.models.encoder_options import Normalized


class Conv(Normalized):
    """Two convolutions."""

    depth: ClassVar[int] = 2
    poolings: ClassVar[tuple[str, ...]] = ("patch_mean",)

    image_size: Annotated[Size, From("data.image_size")]
    """Pixels."""
    width: Count = 8
    """Channels of the layers."""
    pooling: str = "patch_mean"
    """The mean of the feature map."""
