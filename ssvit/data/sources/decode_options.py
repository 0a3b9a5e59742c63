"""Define the options of the pixel format to which image files are decoded."""

from collections.abc import Sequence
from typing import Annotated, Any

from annotated_types import Ge, Le
from pydantic import BeforeValidator

from ssvit.config.declaration import Expect, Options
from ssvit.errors import OptionError, number

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
