"""The options of the loggers, which check that the library is there. No torch."""

from importlib.util import find_spec
from typing import Self

from pydantic import model_validator

from ssvit.config.declaration import Options, Text
from ssvit.options import UserError


def _installed(name: str, *packages: str) -> None:
    """UserError unless the packages of a logger are there."""
    if missing := [package for package in packages if find_spec(package) is None]:
        raise UserError(f"logger={name} needs {' and '.join(missing)}: pip install ssvit[{name}]")


class TensorBoard(Options):
    """TensorBoard's event files in the run's folder."""


class Csv(Options):
    """metrics.csv in the run's folder: a line for each row, a column for each metric."""


class Wandb(Options):
    """Weights & Biases; WANDB_MODE=offline keeps the run in its folder, to be sent by `wandb sync`."""

    project: Text = "ssvit"
    """The project that gets the run."""
    entity: Text | None = None
    """The user or team; None: the one that is logged in."""

    @model_validator(mode="after")
    def _check_library(self) -> Self:
        _installed("wandb", "wandb")
        return self


class Mlflow(Options):
    """MLflow: a server, or a file of SQLite."""

    experiment: Text = "ssvit"
    """The experiment that gets the run."""
    tracking_uri: Text | None = None
    """As http://localhost:5000 or sqlite:///mlflow.db; None: MLFLOW_TRACKING_URI, or MLflow's default."""

    @model_validator(mode="after")
    def _check_library(self) -> Self:
        _installed("mlflow", "mlflow")
        return self
