"""The options of data sets of image files."""

from typing import Literal

from ssvit.data.decode_options import PixelFormat
from ssvit.data.source_options import HeldOut

Verify = Literal["size", "content"]


class ImageFiles(HeldOut, PixelFormat):
    """A data set of image files of any kind."""

    @property
    def image_channels(self) -> int:
        return self.channels

    @property
    def pixels(self) -> PixelFormat:
        """What is taken of them."""
        return PixelFormat(channels=self.channels, range=self.range)
