"""The options of MLflow."""

from typing import Self

from pydantic import model_validator

from ssvit.config.choices import choice
from ssvit.config.declaration import Options, Text
from ssvit.training.loggers.base_options import check_installed


@choice("logger", "mlflow")
class Mlflow(Options):
    """MLflow: a server, or a file of SQLite."""

    experiment: Text = "ssvit"
    """The experiment that gets the run."""
    tracking_uri: Text | None = None
    """As http://localhost:5000 or sqlite:///mlflow.db; None: MLFLOW_TRACKING_URI, or MLflow's default."""

    @model_validator(mode="after")
    def _check_library(self) -> Self:
        check_installed("mlflow", "mlflow")
        return self
