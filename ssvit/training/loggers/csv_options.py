"""Define the options of metrics.csv."""

from ssvit.config.choices import choice
from ssvit.config.declaration import Options


@choice("logger", "csv")
class Csv(Options):
    """metrics.csv in the run's folder: a line for each row, a column for each metric."""
