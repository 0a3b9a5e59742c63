"""The options of Weights & Biases."""

from typing import Self

from pydantic import model_validator

from ssvit.config.choices import choice
from ssvit.config.declaration import Options, Text
from ssvit.training.loggers.base_options import check_installed


@choice("logger", "wandb")
class Wandb(Options):
    """Weights & Biases; WANDB_MODE=offline keeps the run in its folder, to be sent by `wandb sync`."""

    project: Text = "ssvit"
    """The project that gets the run."""
    entity: Text | None = None
    """The user or team; None: the one that is logged in."""

    @model_validator(mode="after")
    def _check_library(self) -> Self:
        check_installed("wandb", "wandb")
        return self
