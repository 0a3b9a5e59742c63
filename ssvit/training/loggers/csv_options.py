"""The options of metrics.csv."""

from ssvit.config.declaration import Options


class Csv(Options):
    """metrics.csv in the run's folder: a line for each row, a column for each metric."""
