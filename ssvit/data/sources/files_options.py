"""Define the options of data sets of image files."""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import model_validator

from ssvit.config.declaration import Name, Run, Whole
from ssvit.data.sources.base_options import HeldOut
from ssvit.data.sources.decode_options import PixelFormat, bands
from ssvit.data.sources.splits import AUTO, Splits


class ImageFiles(HeldOut, PixelFormat):
    """A data set of image files with named splits; see `ssvit.data.sources.splits`."""

    train: Name | None = AUTO
    """The training split; auto: train, if it exists. null: all images in no other split; of a folder, the complete
    folder."""
    validation: Name | None = AUTO
    """The validation split, for choices and curves; auto: val, validation or valid. null: none."""
    test: Name | None = AUTO
    """The test split, for the reported figure; auto: test. null: none. If only one of validation and test exists, it is
    used for both."""
    shown: Sequence[Whole] = (0, 1, 2)
    """The channels that pictures show as red, green and blue if images have more than three; 0 is the first."""

    @model_validator(mode="before")
    @classmethod
    def _with_background(cls, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Replace background=mean by the mean of the channels."""
        if values.get("background") == "mean":
            return {**values, "background": values.get("mean", cls.model_fields["mean"].default)}
        return values

    def check(self, run: Run) -> None:
        """Check also that the images have the channels of the option `shown`."""
        super().check(run)
        bands("shown", self.shown, self.channels)

    @property
    def names(self) -> Mapping[str, str | None]:
        """Return the names of the splits, as they were typed."""
        return {"train": self.train, "validation": self.validation, "test": self.test}

    @property
    def splits(self) -> Splits:
        """Return the items of the data set by purpose."""
        raise NotImplementedError

    @property
    def validated(self) -> bool | None:
        """Return whether there are validation images."""
        return bool(self.splits.validation)

    @property
    def image_channels(self) -> int:
        """Return the number of channels of the images."""
        return self.channels

    @property
    def pixels(self) -> PixelFormat:
        """Return the pixel format of the images."""
        return PixelFormat(channels=self.channels, range=self.range, background=self.background)
