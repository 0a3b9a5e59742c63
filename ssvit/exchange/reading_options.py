"""Define the options of reading another project's weights."""

from collections.abc import Sequence

from ssvit.config.declaration import Count, Size
from ssvit.models.encoder_options import Encoder

# Suffixes of weight files; all but the first two are torch's. The last one is that of .pth.tar.
FORMATS = (".safetensors", ".npz", ".pth", ".pt", ".bin", ".ckpt", ".tar")
TIMM = "timm:"  # prefix of the names of timm's models with their tags
HUB = ("hf://", TIMM)  # prefixes of addresses on the Hugging Face Hub


class ForeignEncoder(Encoder):
    """Set values that another project's weights may not contain; null: from the files next to them, or the default."""

    heads: Count | None = None
    """Number of attention heads, for a file of another project's weights; null: the usual number for its width."""
    mean: float | Sequence[float] | None = None
    """Mean of the image channels in [0, 1], for such a file; null: from the files next to it, or the usual value."""
    std: float | Sequence[float] | None = None
    """Standard deviation of the channels in [0, 1], for such a file; null: as for mean."""
    trained_size: Size | None = None
    """Pixels, or [height, width], of the training images of such an encoder; null: derived from its positions."""
    checkpoint_key: str | None = None
    """Key of one of several encoders in such a file, such as student; null: the teacher, or averaged weights."""


FOREIGN_OPTIONS = tuple(ForeignEncoder.model_fields)
