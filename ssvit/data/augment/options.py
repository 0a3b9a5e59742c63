"""The options of crops, colours and views. No torch."""

import math
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal, Self, get_args

from annotated_types import Ge, Le, Len
from pydantic import AfterValidator, model_validator

from ssvit.config.declaration import Count, Expect, Fraction, NotNegative, Options, Pair, Positive, Share, Whole
from ssvit.models.encoder_options import grid
from ssvit.models.vit_options import ViT
from ssvit.options import OptionError

Fit = Literal["cover", "squash"]
FITS = get_args(Fit)
MAGNITUDES = 30  # of RandAugment, the greatest
MAGNITUDE = 9  # the paper's for ResNet-50 on ImageNet
SIGMA = (0.1, 2.0)  # DINO's limits of a blur's standard deviation
Magnitude = Annotated[int, Ge(0), Le(MAGNITUDES)]
Hue = Annotated[float, Ge(0), Le(0.5)]
Angle = Annotated[float, Ge(0), Le(180)]


def _least_most(values: Sequence[float]) -> Sequence[float]:
    if values[0] > values[1]:
        raise OptionError("", values, "must be [least, most], and the first is larger")
    return values


_TWO = Len(2, 2), AfterValidator(_least_most)
Limits = Annotated[Sequence[Positive], *_TWO, Expect("two numbers above 0, [least, most]")]
Areas = Annotated[Sequence[Share], *_TWO, Expect("two numbers above 0 and at most 1, [least, most]")]
ByView = Annotated[Sequence[Fraction], Len(3, 3), Expect("three probabilities: first global view, second, local views")]


class Crop(Options):
    """What every crop has."""

    size: Pair
    """Pixels of an image's side, or [height, width]."""

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
        return 3 * math.prod(self.size)


class VerticalFlip(Options):
    """Top and bottom change places."""

    probability: Fraction = 0.5


class Rotation(Options):
    """Images turned by any angle."""

    degrees: Angle = 180.0
    """The greatest angle to either side."""


class RandAugment(Options):
    """Random operations of one strength, as torchvision's; the defaults are the paper's for ResNet-50 on ImageNet."""

    operations: Whole = 2
    magnitude: Magnitude = MAGNITUDE


class ColorChange(Options):
    """How much colours change; the defaults are DINO's."""

    brightness: NotNegative = 0.4
    """Largest change of the brightness' factor from 1."""
    contrast: NotNegative = 0.4
    """Largest change of the contrast's factor from 1."""
    saturation: NotNegative = 0.2
    """Largest change of the saturation's factor from 1."""
    hue: Hue = 0.1
    """Largest turn of the hue, as a part of the whole circle."""


class ColorJitter(ColorChange):
    """Brightness, contrast, saturation and hue changed at random, as torchvision's."""

    probability: Fraction = 0.8


class Grayscale(Options):
    """Images lose their colours."""

    probability: Fraction = 0.2


class GaussianBlur(Options):
    """A Gaussian filter of random width."""

    probability: Fraction = 0.5
    sigma: Limits = SIGMA
    """Least and greatest standard deviation, in pixels."""

    @property
    def reach(self) -> int:
        """Pixels on each side that the filter covers: two of the greatest standard deviations."""
        return math.ceil(2 * self.sigma[1])


class Solarize(Options):
    """Bright values are inverted."""

    probability: Fraction = 0.2
    threshold: Annotated[int, Ge(0), Le(255)] = 128
    """The least value that is inverted."""


class RandomCrop(ColorChange, Crop):
    """What every crop for training has, and what changes it afterwards, in this order; 0 leaves a change out."""

    flip: Fraction = 0.5
    """Probability of a flip from left to right."""
    vertical_flip: Fraction = 0.0
    """Probability of a flip from top to bottom."""
    quarter_turns: bool = False
    """Whether images are turned by 0, 90, 180 or 270 degrees, each as likely."""
    rotation: Angle = 0.0
    """Greatest angle in degrees of a turn to either side; 180 for any angle. What it leaves free is reflected."""
    randaugment: Whole = 0
    """Number of RandAugment's operations (Cubuk et al. 2020); usual are 2."""
    magnitude: Magnitude = MAGNITUDE
    """Strength of RandAugment's operations, 0 to 30."""
    jitter: Fraction = 0.0
    """Probability of changed colours; how much they change: brightness, contrast, saturation and hue."""
    grayscale: Fraction = 0.0
    """Probability of an image without colours."""
    blur: Fraction = 0.0
    """Probability of a blur."""
    sigma: Limits = SIGMA
    """Least and greatest standard deviation of a blur, in pixels; [0.1, 0.5] for images of about 32 pixels."""
    solarize: Fraction = 0.0
    """Probability of inverted bright values."""

    @model_validator(mode="after")
    def _check_changes(self) -> Self:
        side, reach = min(map(min, self.sizes)), GaussianBlur(sigma=self.sigma).reach
        if self.blur and reach >= side:
            raise OptionError("sigma", self.sigma, f"its filter needs images of more than {reach} pixels, not {side}")
        if self.quarter_turns and any(h != w for h, w in self.sizes):
            raise OptionError("quarter_turns", True, "needs square crops; rotation=180 turns others")
        return self

    @property
    def sizes(self) -> tuple[tuple[int, int], ...]:
        """Height and width of each kind of view."""
        return (self.size,)

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


class InceptionCrop(RandomCrop):
    """A crop of random area and shape (Szegedy et al. 2015), resized."""

    scale: Areas = (0.08, 1.0)
    """Least and greatest part of the image's area; the authors have 0.05 (vit_jax: input_pipeline.py)."""
    ratio: Limits = (3 / 4, 4 / 3)
    """Least and greatest width / height."""


class ShiftCrop(RandomCrop):
    """A crop at a random place of the widened image."""

    padding: Whole = 4
    """Reflected pixels that each side of the image is widened by."""


class ResizeCrop(RandomCrop):
    """A crop at a random place of the image resized to a square."""

    resize: Count
    """Pixels of the square's side."""

    @model_validator(mode="after")
    def _check_resize(self) -> Self:
        if self.resize < (least := max(self.size)):
            raise OptionError("resize", self.resize, f"must be a whole number, {least} or more")
        return self


class CenterCrop(Crop):
    """What evaluation sees of an image. One that has the size already stays as it is."""

    resize: Count | None = None
    """Pixels of the shorter side before the crop. None, or where those are too few: as many as just cover `size`."""
    fit: Fit = "cover"
    """cover: the shorter side is resized, then the middle cut out; squash: the whole image is resized to `size`, out of
    proportion (vit_jax: input_pipeline.py)."""

    @model_validator(mode="after")
    def _check_fit(self) -> Self:
        if self.fit == "squash" and self.resize is not None:
            right = "must be null with fit=squash, which resizes the whole image to its size"
            raise OptionError("resize", self.resize, right)
        return self


class MultiCrop(InceptionCrop):
    """DINO's views of an image (Caron et al. 2021): two large crops, "global", and several small ones, "local".

    The options of `InceptionCrop` hold for all views, but for size and scale, which are the global ones'; blur and
    solarize have a probability for the first global view, the second, and each local one.
    """

    views: ClassVar[tuple[str, ...]] = ("global", "local")

    scale: Areas = (0.4, 1.0)
    """Least and greatest part of the image's area that a global view shows."""
    local_size: Pair
    """Pixels of a local view's side, or [height, width]."""
    local_scale: Areas = (0.05, 0.4)
    """Least and greatest part of the image's area that a local view shows."""
    local_views: Whole = 8
    """Local views of an image; 0 for none."""
    jitter: Fraction = 0.8
    """Probability of changed colours."""
    grayscale: Fraction = 0.2
    """Probability of a view without colours."""
    blur: ByView = (1.0, 0.1, 0.5)  # type: ignore[assignment]
    """Probabilities of a blur: of the first global view, the second, each local one."""
    solarize: ByView = (0.0, 0.2, 0.0)  # type: ignore[assignment]
    """Probabilities of inverted bright values: of the first global view, the second, each local one."""

    @property
    def sizes(self) -> tuple[tuple[int, int], ...]:
        return self.size, self.local_size

    def fits(self, encoder: ViT, name: str = "size") -> None:
        super().fits(encoder, name)
        if self.local_views:
            super().fits(encoder, "local_size")
