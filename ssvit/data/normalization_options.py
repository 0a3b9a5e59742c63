"""Define the options of the command that measures channel statistics."""

from ssvit.config.declaration import Count, Name, Options, Part
from ssvit.data.sources.base_options import DataSet
from ssvit.errors import OptionError, file_to_write

MEASURED = "# Measured by ssvit normalization."  # first line of the file that the command writes


class Normalization(Options):
    """Measure mean, standard deviation and range of a data set's channels."""

    data: Part[DataSet | None] = None
    """The images: a data set, or the path of a folder."""
    output: Name | None = None
    """File for the measured options, which a run reads by data.normalization=FILE; null: they are only printed."""
    workers: Count = 4
    """Number of threads that read images."""

    def check_consistency(self) -> None:
        """Check that there is a data set, and the file to write."""
        if self.data is None:
            raise OptionError("data", None, "must name a data set, or the path of a folder")
        if self.output is not None:
            file_to_write("output", self.output, begins=[MEASURED])
