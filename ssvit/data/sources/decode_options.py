"""Define the options of the pixel format to which image files are decoded, and of the classes of masks."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any

from annotated_types import Ge, Le
from pydantic import BeforeValidator

from ssvit.config.declaration import Count, Expect, Options
from ssvit.errors import OptionError, number

MOST_CHANNELS = 16
VERSION = 3  # of decoded pixels; increased when a file is decoded or resized to other pixels than before


def bands(name: str, value: Sequence[int], channels: int) -> None:
    """Check the option of the three channels that pictures show as red, green and blue.

    Args:
        name: Name of the option.
        value: Its value.
        channels: Number of channels of the images.

    Raises:
        OptionError: The value is not a list of three channel indices.
    """
    if len(value) != 3:
        raise OptionError(name, value, "must be three channels, [red, green, blue], 0 for the first")
    if max(value) >= max(channels, 3):
        raise OptionError(name, value, f"must be three of the {channels} channels, from 0 to {channels - 1}")


def _colour(value: Any) -> str | None:
    """Return a colour as #rrggbb; None for black."""
    if value is None:
        return None
    from PIL import ImageColor

    if isinstance(value, int | float | list | tuple):
        shares = value if isinstance(value, list | tuple) else [value]
        for share in shares:
            number("", share, 0, 1)
        value = "#" + "".join(f"{round(255 * share):02x}" for share in shares) * (3 if len(shares) == 1 else 1)
    red, green, blue = ImageColor.getrgb(str(value))  # type: ignore[misc]  # not with alpha
    return f"#{red:02x}{green:02x}{blue:02x}" if red or green or blue else None


_EXPECTED = Expect("a colour: a name, '#rrggbb', one or three numbers from 0 to 1, or mean")


class PixelFormat(Options):
    """The pixel format to which image files are decoded."""

    channels: Annotated[int, Ge(1), Le(MOST_CHANNELS)] = 3
    """Channels of every image. Without a range, 3 converts images to 8-bit RGB, and 1 converts colours to luminance.
    data.normalization=FILE sets this, range, mean and std as measured by ssvit normalization."""
    range: Annotated[Sequence[Any], Expect("[minimum, maximum], the values that become 0 and 1")] | None = None
    """[minimum, maximum]: the values mapped to 0 and 1, one number or one for each channel; others are clipped. None:
    8-bit images, which stay 8-bit."""

    background: Annotated[str | None, BeforeValidator(_colour), _EXPECTED] = None
    """Colour onto which transparent pixels of photographs are composited: a name, '#rrggbb', one or three numbers from
    0 to 1, or mean, which is data.mean. None: black."""

    @property
    def is_photo(self) -> bool:
        """Return whether images are converted to 8-bit RGB or luminance."""
        return self.range is None and self.channels in (1, 3)

    def check_consistency(self) -> None:
        """Check the range against the channels, and convert it to a minimum and a maximum of each."""
        if self.background is not None and not self.is_photo:
            raise OptionError("background", self.background, "must be null for images other than 8-bit RGB or grey")
        if self.range is None:
            return
        if len(self.range) != 2:
            raise OptionError("range", self.range, "must be [minimum, maximum], or null")
        ends = [list(end) if isinstance(end, list | tuple) else [end] for end in self.range]
        for end in ends:
            if len(end) not in (1, self.channels):
                expected = f"must have one number, or one for each of the {self.channels} channels, as either end"
                raise OptionError("range", self.range, expected)
            for value in end:
                number("range", value, float("-inf"))
        low, high = (end * (self.channels // len(end)) for end in ends)
        if any(start >= end for start, end in zip(low, high, strict=True)):
            raise OptionError("range", self.range, "must have each minimum below its maximum")
        object.__setattr__(self, "range", (tuple(low), tuple(high)))


RGB, GREY = PixelFormat(), PixelFormat(channels=1)

_MOST_CLASSES = 255  # classes, since a mask has 8 bits and one value stands for ignored pixels
Byte = Annotated[int, Ge(0), Le(255)]
Colour = tuple[int, int, int]
Value = Byte | Annotated[Sequence[Byte], Expect("a colour, [red, green, blue]")]
Classes = Mapping[str, Value] | Sequence[str] | Count


class MaskFormat(Options):
    """The classes of segmentation masks, which are PNG files of grey values, palette entries or colours."""

    mask_classes: Annotated[Classes, Expect("a list of names, {name: value or [r, g, b]}, or a number")] | None = None
    """Classes of the masks: {name: value} with the grey value or palette entry of each class, or its colour [r, g, b];
    names of the values 0, 1, … that are not ignored, in their order; or only the number of these. A mask with another
    value is not read. None: masks are read as they are, by the segmentation probe."""
    mask_ignored: Annotated[Sequence[Value], Expect("a list of values from 0 to 255, or of colours [r, g, b]")] = (255,)
    """Values or colours of pixels without a class, such as [0] for ADE20K; those that are a class do not count."""

    @property
    def masked(self) -> bool:
        """Return whether images have masks."""
        raise NotImplementedError

    @cached_property
    def mask_values(self) -> dict[str, int | Colour]:
        """Return the value or the colour of each class by its name, in the order of the numbers of the classes."""
        if self.mask_classes is None:
            return {}
        if isinstance(self.mask_classes, Mapping):
            return {name: _value(value) for name, value in self.mask_classes.items()}
        values = [value for value in range(256) if value not in self.mask_ignored]
        if isinstance(self.mask_classes, int):
            return {str(value): value for value in values[: self.mask_classes]}
        return dict(zip(map(str, self.mask_classes), values, strict=False))

    @property
    def ignored_values(self) -> set[int | Colour]:
        """Return the values or colours of ignored pixels."""
        return {*map(_value, self.mask_ignored)} - {*self.mask_values.values()}

    def check_consistency(self) -> None:
        """Check the number of classes, and that their values are different and of one kind."""
        super().check_consistency()
        if self.mask_classes is None:
            if any(isinstance(value, tuple) for value in self.ignored_values):
                raise OptionError(
                    "mask_ignored", self.mask_ignored, "must be values from 0 to 255 without mask_classes"
                )
            return
        named, values = self.mask_classes, [*self.mask_values.values()]
        count = named if isinstance(named, int) else len(named)
        if not 2 <= count <= _MOST_CLASSES or len(values) != count or len(set(values)) != count:
            raise OptionError("mask_classes", named, f"must be 2 to {_MOST_CLASSES} different classes")
        if len({*map(type, values)}) > 1 or any(len(v) != 3 for v in values if isinstance(v, tuple)):
            raise OptionError("mask_classes", named, "must have a value or a colour [r, g, b] for every class")


def _value(value: int | Sequence[int]) -> int | Colour:
    return value if isinstance(value, int) else tuple(value)  # type: ignore[return-value]


ANY_MASK = MaskFormat()
