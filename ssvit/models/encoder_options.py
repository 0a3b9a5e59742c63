"""The options that every encoder has."""

from collections.abc import Sequence
from typing import ClassVar

from ssvit.config.declaration import Count, Options, Size
from ssvit.options import OptionError, number, pair

TOKENS = ("patch_mean", "class_token", "both")  # ways to make one vector of tokens
POOLED = "pooled"  # the only way of a model of timm, which pools by itself
PATCHES = "patches"  # no pooling: the features of each patch
# Short forms of options: a model of timm may have any arguments.
ALIASES = {f"encoder.arguments{mark}": f"++encoder.arguments{mark}" for mark in ".="}
ByChannel = float | Sequence[float]  # a number, or one for each channel


def grid(image_size: object, patch_size: object) -> tuple[int, int]:
    """Patches in a column and in a row of an image: (rows, columns). OptionError unless the patch divides it."""
    height, width = pair("image_size", image_size)
    patch = pair("patch_size", patch_size)
    for side, pixels, step in (("height", height, patch[0]), ("width", width, patch[1])):
        if step > pixels:
            raise OptionError("patch_size", patch_size, f"must be at most the image's {side} of {pixels} pixels")
        if pixels % step:
            divisors = ", ".join(str(d) for d in range(2, pixels // 2 + 1) if pixels % d == 0) or pixels
            raise OptionError("patch_size", patch_size, f"must divide the image's {side} of {pixels} ({divisors})")
    return height // patch[0], width // patch[1]


class Normalized(Options):
    """An encoder, which normalises the channels of its images.

    Attributes:
        has_patches: Whether it has patches that can be masked and layers of their own, as a ViT of ssvit has.
    """

    has_patches: ClassVar[bool] = False

    channels: Count = 3
    """Channels of the images."""
    mean: ByChannel = 0.5
    """Mean of the images' channels, in [0, 1]: one number, or one for each."""
    std: ByChannel = 0.5
    """Standard deviation of the images' channels, in [0, 1]: one number, or one for each."""
    image_size: Size
    """Pixels of an image's side, or [height, width]."""

    @property
    def label(self) -> str:
        """The name of the model in messages."""
        return type(self).__name__

    def check_consistency(self) -> None:
        """Check the options against each other."""
        for name, given in (("mean", self.mean), ("std", self.std)):
            values = list(given) if isinstance(given, Sequence) else [given]
            if len(values) not in (1, self.channels):
                raise OptionError(name, values, f"must be one number, or one for each of the {self.channels} channels")
            for value in values:
                number(name, value, 0, 1, above=name == "std")
