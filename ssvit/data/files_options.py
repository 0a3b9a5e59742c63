"""The options of data sets of image files."""

from typing import Literal

from ssvit.data.decode_options import PixelFormat
from ssvit.data.source_options import HeldOut
from ssvit.options import OptionError

Verify = Literal["size", "content"]


class ImageFiles(HeldOut, PixelFormat):
    """A data set of image files of any kind."""

    @property
    def image_channels(self) -> int:
        return self.channels

    def refuse_channels(self, channels: int) -> None:
        raise OptionError("channels", self.channels, f"must be {channels}, as of the encoder")

    @property
    def pixels(self) -> PixelFormat:
        """What is taken of them."""
        return PixelFormat(channels=self.channels, range=self.range)
