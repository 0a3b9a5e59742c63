"""Define the options that all encoders share."""

from collections.abc import Sequence
from typing import Any, ClassVar

from ssvit.config.declaration import FILLED, Count, Options, Size
from ssvit.errors import OptionError, number, pair

TOKENS = ("patch_mean", "class_token", "both")  # ways to pool tokens into one vector
POOLED = "pooled"  # the only pooling of a timm model, which pools itself
PATCHES = "patches"  # no pooling: the features of each patch
ANY_ENCODER = "objective=supervised, simclr, diet and distill accept any encoder"  # for messages
ByChannel = float | Sequence[float]  # one number for all channels, or one per channel


def grid(image_size: object, patch_size: object) -> tuple[int, int]:
    """Return the number of patches in a column and in a row of an image.

    Args:
        image_size: Pixels of an image's side, or [height, width].
        patch_size: Pixels of a patch's side, or [height, width].

    Returns:
        Rows and columns of the patch grid.

    Raises:
        OptionError: The patch size does not divide the image size.
    """
    height, width = pair("image_size", image_size)
    patch = pair("patch_size", patch_size)
    for side, pixels, step in (("height", height, patch[0]), ("width", width, patch[1])):
        if pixels % step:
            divisors = ", ".join(str(d) for d in range(2, pixels // 2 + 1) if pixels % d == 0) or pixels
            raise OptionError("patch_size", patch_size, f"must divide the image's {side} of {pixels} ({divisors})")
    return height // patch[0], width // patch[1]


class Encoder(Options):
    """The base class of the options of an encoder: of its architecture, or of the checkpoint that contains it."""

    def checkpoint(self) -> Any:
        """Return the `Checkpoint` that contains the encoder; None for an encoder with random weights."""
        return None


class Normalized(Encoder):
    """Define the options of an encoder that normalises the channels of its images.

    Attributes:
        has_patches: Whether the encoder has patches that can be masked and separate layers, as a ViT of ssvit has.
    """

    has_patches: ClassVar[bool] = False

    channels: Count = 3
    """Number of image channels."""
    mean: ByChannel = 0.5
    """Mean of the image channels, in [0, 1]: one number, or one per channel."""
    std: ByChannel = 0.5
    """Standard deviation of the image channels, in [0, 1]: one number, or one per channel."""
    image_size: Size = FILLED
    """Pixels of an image's side, or [height, width]."""

    @property
    def label(self) -> str:
        """Return the name of the model for messages."""
        return type(self).__name__

    def check_consistency(self) -> None:
        """Check that mean and std have one value, or one per channel, in their ranges."""
        for name, option in (("mean", self.mean), ("std", self.std)):
            values = list(option) if isinstance(option, Sequence) else [option]
            if len(values) not in (1, self.channels):
                raise OptionError(name, values, f"must be one number, or one for each of the {self.channels} channels")
            for value in values:
                number(name, value, 0, 1, above=name == "std")
