"""Define the options of the loggers."""

from importlib.util import find_spec

from ssvit.config.declaration import Options, Text
from ssvit.errors import UserError


class TensorBoard(Options):
    """TensorBoard's event files in the run's folder."""


class Wandb(Options):
    """Weights & Biases; WANDB_MODE=offline keeps the run in its folder, to be sent by `wandb sync`."""

    project: Text = "ssvit"
    """Project of the run."""
    entity: Text | None = None
    """User or team; None: the user who is logged in."""

    def check_consistency(self) -> None:
        """Check that Weights & Biases is installed."""
        if find_spec("wandb") is None:
            raise UserError("logger=wandb: requires wandb: pip install wandb")
