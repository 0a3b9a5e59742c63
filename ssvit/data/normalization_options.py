"""The options of the measurement of channels."""

from typing import Self

from pydantic import model_validator

from ssvit.config.declaration import Count, Name, Options, Part
from ssvit.options import OptionError, file_to_write

MEASURED = "# Measured by ssvit normalization."  # how the file of that command begins


class Normalization(Options):
    """What is measured of a data set's channels."""

    data: Part = None
    """The images: a data set, or the path of a folder."""
    output: Name | None = None
    """A file for the options, which data.normalization=FILE gives to a run; null: they are only printed."""
    workers: Count = 4
    """Threads that read images."""

    @model_validator(mode="after")
    def _check_output(self) -> Self:
        if self.data is None:
            raise OptionError("data", None, "must name a data set, or the path of a folder")
        if self.output is not None:
            file_to_write("output", self.output, begins=[MEASURED])
        return self
