"""The interface of loggers: where the metrics of a run go besides metrics.jsonl."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from PIL.Image import Image

from ssvit.config.declaration import Options

# The rows of metrics.jsonl, each with its "step"; None stands for a number that is not finite.
Rows = Sequence[Mapping[str, float | None]]


class Unreachable(Exception):
    """A service takes nothing now; what it lacks is sent with the next row."""


class Logger:
    """One place for the metrics of a run. The main process alone has one.

    folder: the run's. name: the run's among others. hyperparameters: by name. `file` names what it writes, for an
    error of the disk.
    """

    file: str

    def __init__(self, options: Options, *, folder: Path, name: str, hyperparameters: Mapping[str, object]) -> None:
        self.options, self.folder, self.name, self.hyperparameters = options, folder, name, hyperparameters

    def open(self, first_step: int, history: Rows) -> None:
        """Begin after step `first_step`. history: the rows up to there, to which the log appends each new one."""
        raise NotImplementedError

    def record(self, step: int, row: Mapping[str, float]) -> None:
        """Take a new row, which is the last of the history too."""
        raise NotImplementedError

    def show(self, step: int, name: str, picture: Image) -> None:
        """Take a picture that belongs to the last row."""

    def finish(self, metrics: Mapping[str, float]) -> None:
        """The run is complete; metrics: the last value of each."""

    def close(self) -> None:
        """Write what is left."""
