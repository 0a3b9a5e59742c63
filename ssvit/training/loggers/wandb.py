"""Weights & Biases, by its own library."""

from collections.abc import Mapping
from pathlib import Path

import wandb
from PIL.Image import Image

from ssvit.options import UserError
from ssvit.training.loggers.follower import Follower
from ssvit.training.loggers.wandb_options import Wandb as Options


class Wandb(Follower):
    """The options are those of `wandb_options.Wandb`. Its library sends in the background and waits for the network."""

    file = "wandb.json"

    def __init__(self, options: Options, *, folder: Path, name: str, hyperparameters: Mapping[str, object]) -> None:
        super().__init__(options, folder=folder, name=name, hyperparameters=hyperparameters)
        self._options = options

    def start(self, identity: str | None) -> str:
        try:
            self._run = wandb.init(
                project=self._options.project,
                entity=self._options.entity,
                dir=str(self.folder),
                id=identity,
                resume="allow" if identity else None,
                name=self.name,
                config=dict(self.hyperparameters),
                # It captures the terminal otherwise, which breaks the live bar, and plots curves there at the end.
                settings=wandb.Settings(console="off", quiet=True),
            )
        except wandb.Error as error:
            raise UserError(f"logger=wandb: {' '.join(str(error).split())}") from None
        # Its own count of steps takes one row for each, and a step may have two.
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")
        return self._run.id

    def send(self, step: int, row: Mapping[str, float]) -> None:
        self._run.log({"step": step, **row})

    def send_picture(self, step: int, name: str, picture: Image) -> None:
        self._run.log({"step": step, name: wandb.Image(picture)})

    def close(self) -> None:
        self._run.finish(exit_code=0 if self.complete else 1)
