"""The options of the crops, which check themselves. Standard library only."""

from collections.abc import Sequence
from dataclasses import dataclass

from ssvit.options import OptionError, number, one_of, pair, whole

FITS = ("cover", "squash")


@dataclass(frozen=True, kw_only=True)
class Crop:
    """What every crop has."""

    size: int | Sequence[int]
    """Pixels of the crop's side, or [height, width]; kept as the pair."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", pair("size", self.size))


@dataclass(frozen=True, kw_only=True)
class RandomCrop(Crop):
    """What every crop for training has."""

    flip: float = 0.5
    """Probability of a flip from left to right."""

    def __post_init__(self) -> None:
        super().__post_init__()
        number("flip", self.flip, 0, 1)


@dataclass(frozen=True, kw_only=True)
class InceptionCrop(RandomCrop):
    """A crop of random area and shape (Szegedy et al. 2015), resized."""

    scale: Sequence[float] = (0.08, 1.0)
    """Least and greatest part of the image's area; the authors have 0.05 (vit_jax: input_pipeline.py)."""
    ratio: Sequence[float] = (3 / 4, 4 / 3)
    """Least and greatest width / height."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value, high in (("scale", self.scale, 1), ("ratio", self.ratio, float("inf"))):
            if not isinstance(value, list | tuple) or len(value) != 2:
                raise OptionError(name, value, "must be two numbers, [least, most]")
            for part in value:
                number(name, part, 0, high, above=True)
            if value[0] > value[1]:
                raise OptionError(name, value, "must be [least, most], and the first is larger")


@dataclass(frozen=True, kw_only=True)
class ShiftCrop(RandomCrop):
    """A crop at a random place of the widened image."""

    padding: int = 4
    """Reflected pixels that each side of the image is widened by."""

    def __post_init__(self) -> None:
        super().__post_init__()
        whole("padding", self.padding, at_least=0)


@dataclass(frozen=True, kw_only=True)
class ResizeCrop(RandomCrop):
    """A crop at a random place of the image resized to a square."""

    resize: int
    """Pixels of the square's side."""

    def __post_init__(self) -> None:
        super().__post_init__()
        whole("resize", self.resize, max(self.size))


@dataclass(frozen=True, kw_only=True)
class CenterCrop(Crop):
    """What evaluation sees of an image. One that has the size already stays as it is."""

    resize: int | None = None
    """Pixels of the shorter side before the crop. None, or where that would leave less than `size`: as many as just
    cover it."""
    fit: str = "cover"
    """cover: the shorter side is resized, then the middle cut out; squash: the whole image is resized to `size`, out of
    proportion (vit_jax: input_pipeline.py)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.resize is not None:
            whole("resize", self.resize)
        one_of("fit", self.fit, FITS)
        if self.fit == "squash" and self.resize is not None:
            right = "must be null with fit=squash, which resizes the whole image to its size"
            raise OptionError("resize", self.resize, right)
