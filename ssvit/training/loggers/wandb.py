"""Log to Weights & Biases with its library."""

from collections.abc import Mapping

import wandb
from PIL.Image import Image

from ssvit.engine import atomic_io
from ssvit.errors import UserError
from ssvit.training.loggers.base import Logger, Rows
from ssvit.training.loggers.options import Wandb as WandbOptions


class Wandb(Logger):
    """Log to Weights & Biases. Its library sends in the background and retries while the network is down.

    A resumed training run resumes the run of the service, whose identity is stored in the run folder. The service
    ignores rows of steps that it has already received. Without a network (WANDB_MODE=offline), runs are stored locally,
    and the newest local run contains all rows since the first step.
    """

    file = "wandb.txt"
    options: WandbOptions
    _exit_code = 1

    def open(self, first_step: int, history: Rows) -> None:
        """Resume the run of the service or start a new one, and send the rows that it has not received.

        Raises:
            UserError: The service rejects the run.
        """
        path = self.folder / self.file
        identity = path.read_text() if path.exists() else None
        try:
            self._run = wandb.init(
                project=self.options.project,
                entity=self.options.entity,
                dir=str(self.folder),
                id=identity,
                resume="allow" if identity else None,
                name=self.name,
                config=dict(self.hyperparameters),
                # Capturing the terminal would break the progress bar, and curves would be printed at the end.
                settings=wandb.Settings(console="off", quiet=True),
            )
        except wandb.Error as error:
            raise UserError(f"logger=wandb: {' '.join(str(error).split())}") from None
        atomic_io.replace(path, self._run.id.encode())
        self._history = history
        for row in history:
            if (row["step"] or 0) >= self._run.step:
                self._send(row)

    def record(self, step: int, row: Mapping[str, float]) -> None:
        """Send a row."""
        self._send(self._history[-1])

    def _send(self, row: Mapping[str, float | None]) -> None:
        numbers = {name: value for name, value in row.items() if value is not None and name != "step"}
        self._run.log(numbers, step=int(row["step"] or 0))

    def show(self, step: int, name: str, picture: Image) -> None:
        """Send a picture."""
        self._run.log({name: wandb.Image(picture)}, step=step)

    def finish(self) -> None:
        """Mark the run as complete; `close` reports this to the service."""
        self._exit_code = 0

    def close(self) -> None:
        """Finish the run of the service, with an exit code of 0 if training is complete."""
        self._run.finish(exit_code=self._exit_code)
