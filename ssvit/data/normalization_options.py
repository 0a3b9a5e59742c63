"""The options of the measurement of channels."""

from typing import Self

from pydantic import model_validator

from ssvit.config.declaration import Count, Name, Options
from ssvit.options import file_to_write

MEASURED = "# Measured by ssvit normalization."  # how the file of that command begins


class Normalization(Options):
    """What is measured of a data set's channels."""

    output: Name | None
    """A file for the options, which data.normalization=FILE gives to a run; None: they are only printed."""
    workers: Count
    """Threads that read images."""

    @model_validator(mode="after")
    def _check_output(self) -> Self:
        if self.output is not None:
            file_to_write("output", self.output, begins=[MEASURED])
        return self
