"""Define the contract of loggers, which receive the metrics of a run in addition to metrics.jsonl."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from PIL.Image import Image

from ssvit.config.declaration import Options

# The rows of metrics.jsonl, each with its "step"; None for numbers that are not finite.
Rows = Sequence[Mapping[str, float | None]]


class Logger:
    """A destination of the metrics of a run, in the main process only.

    Args:
        options: The options of the logger.
        folder: The folder of the run.
        name: The name of the run.
        hyperparameters: The options of the run, nested by group.

    Attributes:
        file: The name of the file that it writes, for error messages.
    """

    file: str

    def __init__(self, options: Options, *, folder: Path, name: str, hyperparameters: Mapping[str, object]) -> None:
        self.options, self.folder, self.name, self.hyperparameters = options, folder, name, hyperparameters

    def open(self, first_step: int, history: Rows) -> None:
        """Open the logger.

        Args:
            first_step: The number of completed steps.
            history: The rows up to this step. The log appends each new row to it.
        """
        raise NotImplementedError

    def record(self, step: int, row: Mapping[str, float]) -> None:
        """Record a new row, which is also the last one of the history."""
        raise NotImplementedError

    def show(self, step: int, name: str, picture: Image) -> None:
        """Record a picture that belongs to the last row."""

    def finish(self) -> None:
        """Record that the run is complete."""

    def close(self) -> None:
        """Write pending data and close the logger."""
