"""The options of reading another project's weights."""

from collections.abc import Sequence

from ssvit.config.declaration import Count, Options, Size

FORMATS = (".safetensors", ".npz", ".pth", ".pt", ".bin")  # suffixes of files of weights; the last three are torch's
HUB = "hf://"  # at the beginning of an address in the Hugging Face Hub


class ForeignEncoder(Options):
    """What a file of another project's weights may not contain; null: what the files next to it have, or the usual."""

    heads: Count | None = None
    """Heads of attention, for a file of another project's weights; null: the usual number for its width."""
    mean: float | Sequence[float] | None = None
    """Mean of the images' channels in [0, 1], for such a file; null: that in the files next to it, or the usual one."""
    std: float | Sequence[float] | None = None
    """Standard deviation of the channels in [0, 1], for such a file; null: as for mean."""
    trained_size: Size | None = None
    """Pixels, or [height, width], of the images that such an encoder was trained on; null: those that its positions
    fit."""


# Options that a user may give for a foreign file: of a ViT, and of a model of timm.
FOREIGN_OPTIONS = (*ForeignEncoder.model_fields, "model", "arguments")
