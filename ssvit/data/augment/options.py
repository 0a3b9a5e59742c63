"""The options of crops, colours and views, which check themselves. Standard library only."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ssvit.models.options import ViT, grid
from ssvit.options import OptionError, flag, number, one_of, pair, select, whole

FITS = ("cover", "squash")
MAGNITUDES = 30  # of RandAugment, the greatest


@dataclass(frozen=True, kw_only=True)
class Crop:
    """What every crop has."""

    size: int | Sequence[int]
    """Pixels of an image's side, or [height, width]."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", pair("size", self.size))

    def fits(self, encoder: ViT, name: str = "size") -> None:
        """OptionError unless the encoder's patches divide such an image."""
        size = getattr(self, name)
        try:
            grid(size, encoder.patch_size)
        except OptionError:
            right = f"must be divided by encoder.patch_size={encoder.patch_size}"
            raise OptionError(name, size, right) from None

    @property
    def bytes_per_image(self) -> int:
        """Of an image of three channels afterwards."""
        return 3 * math.prod(pair("size", self.size))


@dataclass(frozen=True, kw_only=True)
class VerticalFlip:
    """Top and bottom change places."""

    probability: float = 0.5

    def __post_init__(self) -> None:
        number("probability", self.probability, 0, 1)


@dataclass(frozen=True, kw_only=True)
class Rotation:
    """Images turned by any angle."""

    degrees: float = 180.0
    """The greatest angle to either side."""

    def __post_init__(self) -> None:
        number("degrees", self.degrees, 0, 180)


@dataclass(frozen=True, kw_only=True)
class RandAugment:
    """Random operations of one strength, as torchvision's; the defaults are the paper's for ResNet-50 on ImageNet."""

    operations: int = 2
    magnitude: int = 9

    def __post_init__(self) -> None:
        whole("operations", self.operations, at_least=0)
        whole("magnitude", self.magnitude, at_least=0)
        number("magnitude", self.magnitude, 0, MAGNITUDES)


@dataclass(frozen=True, kw_only=True)
class ColorJitter:
    """Brightness, contrast, saturation and hue changed at random, as torchvision's; the defaults are DINO's.

    The first three are the largest change of a factor from 1; hue is the largest turn, as a part of the whole circle.
    """

    brightness: float = 0.4
    contrast: float = 0.4
    saturation: float = 0.2
    hue: float = 0.1
    probability: float = 0.8

    def __post_init__(self) -> None:
        for name in ("brightness", "contrast", "saturation"):
            number(name, getattr(self, name), 0)
        number("hue", self.hue, 0, 0.5)
        number("probability", self.probability, 0, 1)


@dataclass(frozen=True, kw_only=True)
class Grayscale:
    """Images lose their colours."""

    probability: float = 0.2

    def __post_init__(self) -> None:
        number("probability", self.probability, 0, 1)


@dataclass(frozen=True, kw_only=True)
class GaussianBlur:
    """A Gaussian filter of random width."""

    probability: float = 0.5
    sigma: Sequence[float] = (0.1, 2.0)
    """Least and greatest standard deviation, in pixels."""

    def __post_init__(self) -> None:
        number("probability", self.probability, 0, 1)
        _least_most("sigma", self.sigma)

    @property
    def reach(self) -> int:
        """Pixels on each side that the filter covers: two of the greatest standard deviations."""
        return math.ceil(2 * self.sigma[1])


@dataclass(frozen=True, kw_only=True)
class Solarize:
    """Bright values are inverted."""

    probability: float = 0.2
    threshold: int = 128
    """The least value that is inverted."""

    def __post_init__(self) -> None:
        number("probability", self.probability, 0, 1)
        number("threshold", self.threshold, 0, 255)


@dataclass(frozen=True, kw_only=True)
class RandomCrop(Crop):
    """What every crop for training has, and what changes it afterwards, in this order; 0 leaves a change out."""

    probabilities: ClassVar[tuple[str, ...]] = ("flip", "vertical_flip", "jitter", "grayscale", "blur", "solarize")

    flip: float = 0.5
    """Probability of a flip from left to right."""
    vertical_flip: float = 0.0
    """Probability of a flip from top to bottom."""
    quarter_turns: bool = False
    """Whether images are turned by 0, 90, 180 or 270 degrees, each as likely."""
    rotation: float = 0.0
    """Greatest angle in degrees of a turn to either side; 180 for any angle. What it leaves free is reflected."""
    randaugment: int = 0
    """Number of RandAugment's operations (Cubuk et al. 2020); usual are 2."""
    magnitude: int = RandAugment.magnitude
    """Strength of RandAugment's operations, 0 to 30."""
    jitter: float = 0.0
    """Probability of changed colours; how much they change: brightness, contrast, saturation and hue."""
    brightness: float = ColorJitter.brightness
    """Largest change of the brightness' factor from 1."""
    contrast: float = ColorJitter.contrast
    """Largest change of the contrast's factor from 1."""
    saturation: float = ColorJitter.saturation
    """Largest change of the saturation's factor from 1."""
    hue: float = ColorJitter.hue
    """Largest turn of the hue, as a part of the whole circle."""
    grayscale: float = 0.0
    """Probability of an image without colours."""
    blur: float = 0.0
    """Probability of a blur."""
    sigma: Sequence[float] = GaussianBlur.sigma
    """Least and greatest standard deviation of a blur, in pixels; [0.1, 0.5] for images of about 32 pixels."""
    solarize: float = 0.0
    """Probability of inverted bright values."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.probabilities:
            number(name, getattr(self, name), 0, 1)
        flag("quarter_turns", self.quarter_turns)
        number("rotation", self.rotation, 0, 180)
        whole("randaugment", self.randaugment, at_least=0)
        select(RandAugment, vars(self))
        select(ColorJitter, vars(self))
        _least_most("sigma", self.sigma)
        side, reach = min(map(min, self.sizes)), GaussianBlur(sigma=self.sigma).reach
        if self.blur and reach >= side:
            raise OptionError("sigma", self.sigma, f"its filter needs images of more than {reach} pixels, not {side}")
        if self.quarter_turns and any(h != w for h, w in self.sizes):
            raise OptionError("quarter_turns", True, "needs square crops; rotation=180 turns others")

    @property
    def sizes(self) -> tuple[tuple[int, int], ...]:
        """Height and width of each kind of view."""
        return (pair("size", self.size),)

    def fits(self, encoder: ViT, name: str = "size") -> None:
        super().fits(encoder, name)
        for change in ("randaugment", "jitter", "grayscale"):
            if getattr(self, change) and encoder.channels not in (1, 3):
                right = f"must be 0 for images of {encoder.channels} channels: it changes red, green and blue"
                raise OptionError(change, getattr(self, change), right)

    def check_floats(self) -> None:
        """OptionError if a change is defined for bytes alone, not for images with a range of values."""
        for change in ("randaugment", "jitter", "grayscale"):
            if getattr(self, change):
                raise OptionError(change, getattr(self, change), "must be 0 with data.range: it changes bytes")


@dataclass(frozen=True, kw_only=True)
class InceptionCrop(RandomCrop):
    """A crop of random area and shape (Szegedy et al. 2015), resized."""

    scale: Sequence[float] = (0.08, 1.0)
    """Least and greatest part of the image's area; the authors have 0.05 (vit_jax: input_pipeline.py)."""
    ratio: Sequence[float] = (3 / 4, 4 / 3)
    """Least and greatest width / height."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _least_most("scale", self.scale, 1)
        _least_most("ratio", self.ratio)


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
        whole("resize", self.resize, max(pair("size", self.size)))


@dataclass(frozen=True, kw_only=True)
class CenterCrop(Crop):
    """What evaluation sees of an image. One that has the size already stays as it is."""

    resize: int | None = None
    """Pixels of the shorter side before the crop. None, or where those are too few: as many as just cover `size`."""
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


@dataclass(frozen=True, kw_only=True)
class MultiCrop(InceptionCrop):
    """DINO's views of an image (Caron et al. 2021): two large crops, "global", and several small ones, "local".

    The options of `InceptionCrop` hold for all views, but for size and scale, which are the global ones'; blur and
    solarize have a probability for the first global view, the second, and each local one.
    """

    probabilities: ClassVar[tuple[str, ...]] = ("flip", "vertical_flip", "jitter", "grayscale")
    views: ClassVar[tuple[str, ...]] = ("global", "local")

    scale: Sequence[float] = (0.4, 1.0)
    local_size: int | Sequence[int]
    """Pixels of a local view's side, or [height, width]."""
    local_scale: Sequence[float] = (0.05, 0.4)
    """Least and greatest part of the image's area that a local view shows."""
    local_views: int = 8
    """Local views of an image; 0 for none."""
    jitter: float = 0.8
    """Probability of changed colours."""
    grayscale: float = 0.2
    """Probability of a view without colours."""
    blur: Sequence[float] = (1.0, 0.1, 0.5)  # type: ignore[assignment]
    """Probabilities of a blur: of the first global view, the second, each local one."""
    solarize: Sequence[float] = (0.0, 0.2, 0.0)  # type: ignore[assignment]
    """Probabilities of inverted bright values: of the first global view, the second, each local one."""

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "local_size", pair("local_size", self.local_size))
        _least_most("local_scale", self.local_scale, 1)
        whole("local_views", self.local_views, at_least=0)
        for name, values in (("blur", self.blur), ("solarize", self.solarize)):
            if not isinstance(values, list | tuple) or len(values) != 3:
                raise OptionError(name, values, "must be three probabilities: first global view, second, local views")
            for part in values:
                number(name, part, 0, 1)

    @property
    def sizes(self) -> tuple[tuple[int, int], ...]:
        return pair("size", self.size), pair("local_size", self.local_size)

    def fits(self, encoder: ViT, name: str = "size") -> None:
        super().fits(encoder, name)
        if self.local_views:
            super().fits(encoder, "local_size")


def _least_most(name: str, value: Sequence[float], high: float = float("inf")) -> None:
    """OptionError unless these are two numbers above 0, none above `high`, and the first no larger than the second."""
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise OptionError(name, value, "must be two numbers, [least, most]")
    for part in value:
        number(name, part, 0, high, above=True)
    if value[0] > value[1]:
        raise OptionError(name, value, "must be [least, most], and the first is larger")
