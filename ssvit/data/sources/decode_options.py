"""Define the options of the pixel format to which image files are decoded."""

from collections.abc import Sequence
from typing import Annotated, Any

from annotated_types import Ge, Le

from ssvit.config.declaration import Expect, Options
from ssvit.options import OptionError, number

MOST_CHANNELS = 16


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


class PixelFormat(Options):
    """The pixel format to which image files are decoded."""

    channels: Annotated[int, Ge(1), Le(MOST_CHANNELS)] = 3
    """Channels of every image. Without a range, 3 converts images to 8-bit RGB, and 1 converts colours to luminance.
    data.normalization=FILE sets this, range, mean and std as measured by ssvit normalization."""
    range: Annotated[Sequence[Any], Expect("[minimum, maximum], the values that become 0 and 1")] | None = None
    """[minimum, maximum]: the values mapped to 0 and 1, one number or one for each channel; others are clipped. None:
    8-bit images, which stay 8-bit."""

    def check_consistency(self) -> None:
        """Check the range against the channels, and convert it to a minimum and a maximum of each."""
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
