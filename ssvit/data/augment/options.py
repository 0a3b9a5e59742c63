"""Define the options of augmentations: crops, the augmentations after a training crop, and several views."""

import math
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal, Self

from annotated_types import Ge, Le, Len
from pydantic import BeforeValidator, Field

from ssvit.config.declaration import Count, Expect, Fraction, Limits, NotNegative, Pair, ShareLimits, Tree, Whole
from ssvit.data.sources.base_options import Augmentation, View
from ssvit.data.sources.decode_options import PixelFormat
from ssvit.errors import OptionError
from ssvit.models.encoder_options import Normalized, grid
from ssvit.models.vit_options import ViT

_STORED = {"crop": "cover", "stretch": "squash"}  # values in checkpoints, by the names of data.fit
_stored = BeforeValidator(lambda value: _STORED.get(str(value), value))
Fit = Annotated[Literal["cover", "pad", "squash"], _stored, Expect("one of crop, pad, stretch")]
ByView = Annotated[Sequence[Fraction], Len(3, 3), Expect("three probabilities: first global view, second, local views")]
SIGMA = (0.1, 2.0)  # DINO's range of the standard deviation of a blur
MAGNITUDES = 30  # RandAugment's maximum magnitude


def reach(sigma: Sequence[float]) -> int:
    """Return the radius of a blur's filter in pixels: twice the maximum standard deviation, rounded up."""
    return math.ceil(2 * sigma[1])


class Crop(Augmentation):
    """The base class of crops."""

    def check(self, tree: Tree) -> None:
        """Check that the encoder's patch size divides the size of the crop."""
        self.check_patches(tree, "size")

    def check_patches(self, tree: Tree, name: str) -> None:
        """Check that the encoder's patch size divides an image whose size is the option `name`."""
        if isinstance(tree.encoder, ViT):
            size, patch_size = getattr(self, name), tree.encoder.patch_size
            try:
                grid(size, patch_size)
            except OptionError:
                raise OptionError(name, size, f"must be divided by encoder.patch_size={patch_size}") from None

    @property
    def bytes_per_image(self) -> int:
        """Return the bytes of a crop with three channels."""
        return 3 * math.prod(self.size)


class RandomCrop(Crop):
    """A training crop and the augmentations after it, applied in this order; 0 disables one."""

    flip: Fraction = 0.5
    """Probability of a horizontal flip."""
    vertical_flip: Fraction = 0.0
    """Probability of a vertical flip."""
    quarter_turns: bool = False
    """Whether to rotate images by 0, 90, 180 or 270 degrees, with equal probabilities."""
    rotation: Annotated[float, Ge(0), Le(180)] = 0.0
    """Maximum angle of a rotation to either side, in degrees; 180 for any angle. Corners are filled by reflection."""
    randaugment: Whole = 0
    """Number of RandAugment operations (Cubuk et al. 2020), usually 2."""
    magnitude: Annotated[int, Ge(0), Le(MAGNITUDES)] = 9
    """Magnitude of the RandAugment operations, 0 to 30; the paper has 9 for ResNet-50 on ImageNet."""
    jitter: Fraction = 0.0
    """Probability of colour jitter, as in torchvision; the defaults of its four options are DINO's."""
    brightness: NotNegative = 0.4
    """Maximum deviation of the brightness factor from 1."""
    contrast: NotNegative = 0.4
    """Maximum deviation of the contrast factor from 1."""
    saturation: NotNegative = 0.2
    """Maximum deviation of the saturation factor from 1."""
    hue: Annotated[float, Ge(0), Le(0.5)] = 0.1
    """Maximum shift of the hue, as a fraction of the colour circle."""
    grayscale: Fraction = 0.0
    """Probability of conversion to grey."""
    blur: Fraction = 0.0
    """Probability of a Gaussian blur."""
    sigma: Limits = SIGMA
    """Minimum and maximum standard deviation of a blur, in pixels; [0.1, 0.5] for images of about 32 pixels."""
    solarize: Fraction = 0.0
    """Probability of solarisation, which inverts bright values."""
    erasing: Fraction = 0.0
    """Probability of random erasing (Zhong et al. 2020): a rectangle is replaced by random pixels. DeiT has 0.25."""
    erased_area: ShareLimits = (0.02, 0.3333)
    """Minimum and maximum fraction of the image's area that is erased; the paper has [0.02, 0.4], timm the default."""

    def check_consistency(self) -> None:
        """Check the blur and the rotations against the size of the crop."""
        side, radius = min(map(min, self.sizes)), reach(self.sigma)
        if any(self.blur if isinstance(self.blur, Sequence) else [self.blur]) and radius >= side:
            raise OptionError("sigma", self.sigma, f"must be smaller: the filter's radius is {radius} pixels")
        if self.quarter_turns and any(h != w for h, w in self.sizes):
            raise OptionError("quarter_turns", True, "requires square crops; rotation=180 rotates crops of any shape")

    @property
    def sizes(self) -> tuple[tuple[int, int], ...]:
        """Return height and width of each kind of view."""
        return (self.size,)

    def check(self, tree: Tree) -> None:
        """Check also that the augmentations are defined for the channels and the dtype of the images."""
        super().check(tree)
        channels = tree.encoder.channels if isinstance(tree.encoder, Normalized) else 3
        of_floats = isinstance(tree.data, PixelFormat) and tree.data.range is not None
        for change in ("randaugment", "jitter", "grayscale"):
            if not (value := getattr(self, change)):
                continue
            if channels not in (1, 3):
                expected = f"must be 0 for images of {channels} channels: it changes red, green and blue"
                raise OptionError(change, value, expected)
            if of_floats:
                raise OptionError(change, value, "must be 0 with data.range: it is defined for 8-bit images only")


class InceptionCrop(RandomCrop):
    """A crop of random area and aspect ratio (Szegedy et al. 2015), resized."""

    scale: ShareLimits = (0.2, 1.0)
    """Minimum and maximum fraction of the image's area; usual for ImageNet is [0.08, 1], and [0.05, 1] in the authors'
    code (vit_jax: input_pipeline.py)."""
    ratio: Limits = (0.75, 1.3333)
    """Minimum and maximum aspect ratio, width / height."""


class MultiCrop(InceptionCrop):
    """DINO's multi-crop (Caron et al. 2021): two large crops, "global", and several small ones, "local".

    The options of `InceptionCrop` apply to all views, except size and scale, which apply to the global views; blur and
    solarize have one probability each for the first global view, the second, and every local view.
    """

    views: ClassVar[tuple[str, ...]] = ("global", "local")

    scale: ShareLimits = (0.4, 1.0)
    """Minimum and maximum fraction of the image's area in a global view."""
    local_size: Pair = Field(96, validate_default=True)
    """Pixels of a local view's side, or [height, width]."""
    local_scale: ShareLimits = (0.05, 0.4)
    """Minimum and maximum fraction of the image's area in a local view."""
    local_views: Whole = 8
    """Number of local views per image; 0 for none."""
    jitter: Fraction = 0.8
    """Probability of colour jitter."""
    grayscale: Fraction = 0.2
    """Probability of conversion to grey."""
    blur: ByView = (1.0, 0.1, 0.5)  # type: ignore[assignment]
    """Probability of a blur for the first global view, the second, and each local view."""
    solarize: ByView = (0.0, 0.2, 0.0)  # type: ignore[assignment]
    """Probability of solarisation for the first global view, the second, and each local view."""

    @property
    def sizes(self) -> tuple[tuple[int, int], ...]:
        """Return height and width of global and of local views."""
        return (self.size, self.local_size) if self.local_views else (self.size,)

    def check(self, tree: Tree) -> None:
        """Check also that the encoder's patch size divides local views."""
        super().check(tree)
        if self.local_views:
            self.check_patches(tree, "local_size")


class ShiftCrop(RandomCrop):
    """A crop at a random position of the padded image, enlarged if the padded image is smaller than the crop."""

    padding: Whole = 4
    """Pixels of reflection padding on each side of the image."""


class ResizeCrop(RandomCrop):
    """A crop at a random position of the image resized to a square."""

    resize: Count = 448
    """Side of the square in pixels; 448 in VTAB's runs at 384 px."""

    def check_consistency(self) -> None:
        """Check that the resized image contains the crop."""
        super().check_consistency()
        if self.resize < (least := max(self.size)):
            raise OptionError("resize", self.resize, f"must be a whole number, {least} or more")


class CenterCrop(Crop, View):
    """The deterministic resize and centre crop of evaluation. An image that already has the size is unchanged."""

    resize: Count | None = None
    """Pixels of the shorter side before the crop. None, or if those are too few: the smallest that covers `size`."""
    fit: Fit = "cover"
    """data.fit is short for this option. crop or cover: resize the shorter side, then crop the centre; pad: resize the
    longer side, then pad with black; stretch or squash: resize the entire image to `size` regardless of its aspect
    ratio (vit_jax: input_pipeline.py)."""

    def check_consistency(self) -> None:
        """Check that only a crop of the centre has a separate size."""
        if self.fit != "cover" and self.resize is not None:
            expected = "must be null with data.fit=pad or stretch, which resize the whole image"
            raise OptionError("resize", self.resize, expected)

    @property
    def note(self) -> str:
        """Return a line of output on how images of other aspect ratios are shown."""
        size = "x".join(map(str, self.size))
        cover = f"{size} pixels and crops their centre"
        if (self.resize or 0) > min(self.size):
            cover = f"{self.resize} pixels on the shorter side and crops their centre of {size}"
        way = {
            "cover": cover,
            "pad": f"{size} pixels and pads them",
            "squash": f"{size} pixels without their aspect ratio",
        }
        return f"evaluation resizes images to {way[self.fit]} (data.fit=crop, pad or stretch)"

    def for_size(self, size: tuple[int, int]) -> Self:
        """Return the options of a transform that shows the same part of an image at another size (height, width)."""
        if size == self.size:
            return self
        resize = None if self.resize is None else round(self.resize * min(size) / min(self.size))
        return self.changed(size=size, resize=resize)
