"""The options of data sets of image files."""

from collections.abc import Sequence
from typing import ClassVar, Literal

from ssvit.config.declaration import Options, Run, Whole
from ssvit.data.decode_options import PixelFormat, bands
from ssvit.data.sources.base_options import FileImages, HeldOut
from ssvit.options import OptionError

Verify = Literal["size", "content"]


class ChannelImages(FileImages):
    """The group data for image files of any number of channels."""

    shown: Sequence[Whole] = (0, 1, 2)
    """Of more than three channels, those that pictures show as red, green and blue; 0 is the first."""

    def check(self, run: Run) -> None:
        """Check that the images have the channels that are shown."""
        if isinstance(run.source, PixelFormat):
            bands("shown", self.shown, run.source.channels)


class ImageFiles(HeldOut, PixelFormat):
    """A data set of image files of any kind."""

    around: ClassVar[type[Options] | None] = ChannelImages

    @property
    def image_channels(self) -> int:
        return self.channels

    def refuse_channels(self, channels: int) -> None:
        raise OptionError("channels", self.channels, f"must be {channels}, as of the encoder")

    @property
    def pixels(self) -> PixelFormat:
        """What is taken of them."""
        return PixelFormat(channels=self.channels, range=self.range)
