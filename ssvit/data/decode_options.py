"""The options of what is taken of an image file."""

from collections.abc import Sequence
from typing import Annotated, Any, Self

from annotated_types import Ge, Le
from pydantic import model_validator

from ssvit.config.declaration import Expect, Options
from ssvit.options import OptionError, number, whole

MOST_CHANNELS = 16


def bands(name: str, value: object, channels: int) -> None:
    """OptionError unless these are the places of three channels, of which pictures show them where there are more."""
    if not isinstance(value, list | tuple) or len(value) != 3:
        raise OptionError(name, value, "must be three channels, [red, green, blue], 0 for the first")
    for place in value:
        whole(name, place, at_least=0)
        if place >= max(channels, 3):
            raise OptionError(name, value, f"must be three of the {channels} channels, from 0 to {channels - 1}")


class PixelFormat(Options):
    """What a run takes of image files."""

    channels: Annotated[int, Ge(1), Le(MOST_CHANNELS)] = 3
    """Channels of every image. Without a range, 3 converts images to RGB of 8 bits, and 1 those with colours to their
    luminance. data.normalization=FILE sets this, range, mean and std as ssvit normalization measured them."""
    range: Annotated[Sequence[Any], Expect("[least, most], the values that become 0 and 1")] | None = None
    """[least, most]: the values that become 0 and 1, one number or one for each channel; others are cut off. None:
    images of bytes, which stay bytes."""

    @model_validator(mode="after")
    def _check_range(self) -> Self:
        if self.range is None:
            return self
        if len(self.range) != 2:
            raise OptionError("range", self.range, "must be [least, most], the values that become 0 and 1, or null")
        ends = [list(end) if isinstance(end, list | tuple) else [end] for end in self.range]
        for end in ends:
            if len(end) not in (1, self.channels):
                right = f"must have one number, or one for each of the {self.channels} channels, for least and for most"
                raise OptionError("range", self.range, right)
            for value in end:
                number("range", value, float("-inf"))
        least, most = (end * (self.channels // len(end)) for end in ends)
        if any(low >= high for low, high in zip(least, most, strict=True)):
            raise OptionError("range", self.range, "must be [least, most], and a least value is not below the most")
        object.__setattr__(self, "range", (tuple(least), tuple(most)))
        return self

    @property
    def bytes_per_pixel(self) -> int:
        """Of an image as it is read."""
        return self.channels * (1 if self.range is None else 4)


RGB, GREY = PixelFormat(), PixelFormat(channels=1)
