"""The options of data sets of image files."""

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

from ssvit.config.declaration import Name, Options, Run, Whole
from ssvit.data.decode_options import PixelFormat, bands
from ssvit.data.sources.base_options import FileImages, HeldOut
from ssvit.data.sources.splits import AUTO, Splits
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


class Verified(Options):
    """A data set whose fingerprint covers sizes or contents."""

    verify: Verify = "size"
    """What identifies the data set of a run: names, labels and sizes of its images (size), or also their bytes, which
    each start reads (content)."""


class ImageFiles(HeldOut, PixelFormat):
    """A data set of image files of any kind, with splits that have names: see `ssvit.data.sources.splits`."""

    around: ClassVar[type[Options] | None] = ChannelImages

    train: Name | None = AUTO
    """The split to train on; auto: train, where there is one. null: all images that no other split names; of a folder,
    the whole folder."""
    validation: Name | None = AUTO
    """The split for choices and curves; auto: val, validation or valid. null: none."""
    test: Name | None = AUTO
    """The split for the reported figure; auto: test. null: none. If there is only one of validation and test, it serves
    for both."""

    @property
    def names(self) -> Mapping[str, str | None]:
        """The names of the splits, as they were typed."""
        return {"train": self.train, "validation": self.validation, "test": self.test}

    @property
    def splits(self) -> Splits:
        """The items of the data set by what their images are for."""
        raise NotImplementedError

    @property
    def validated(self) -> bool | None:
        return bool(self.splits.validation)

    @property
    def image_channels(self) -> int:
        return self.channels

    def refuse_channels(self, channels: int) -> None:
        raise OptionError("channels", self.channels, f"must be {channels}, as of the encoder")

    @property
    def pixels(self) -> PixelFormat:
        """What is taken of them."""
        return PixelFormat(channels=self.channels, range=self.range)
