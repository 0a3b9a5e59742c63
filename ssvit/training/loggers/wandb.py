"""Log to Weights & Biases with its library."""

from collections.abc import Mapping
from pathlib import Path

import wandb
from PIL.Image import Image

from ssvit.options import UserError
from ssvit.training.loggers.follower import Follower
from ssvit.training.loggers.wandb_options import Wandb as Options


class Wandb(Follower):
    """Log to Weights & Biases. Its library sends in the background and waits for the network.

    Args:
        options: The options of the logger.
        folder: The run folder.
        name: Name of the run.
        hyperparameters: The hyperparameters of the run, by name.
    """

    file = "wandb.json"

    def __init__(self, options: Options, *, folder: Path, name: str, hyperparameters: Mapping[str, object]) -> None:
        super().__init__(options, folder=folder, name=name, hyperparameters=hyperparameters)
        self._options = options

    def start(self, identity: str | None) -> str:
        """Resume the run with an identity, or start a new one; return its identity.

        Raises:
            UserError: The service rejects the run.
        """
        try:
            self._run = wandb.init(
                project=self._options.project,
                entity=self._options.entity,
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
        # wandb's step counter accepts one row per step, but a step may have two rows.
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")
        return self._run.id

    def send(self, step: int, row: Mapping[str, float]) -> None:
        """Send a row of finite numbers."""
        self._run.log({"step": step, **row})

    def send_picture(self, step: int, name: str, picture: Image) -> None:
        """Send a picture."""
        self._run.log({"step": step, name: wandb.Image(picture)})

    def close(self) -> None:
        """Finish the run, with an exit code of 0 if it is complete."""
        self._run.finish(exit_code=0 if self.complete else 1)
