"""The options of the loggers, which check themselves and that the library is there. No torch."""

from dataclasses import dataclass
from importlib.util import find_spec

from ssvit.options import OptionError, UserError


def _installed(name: str, *packages: str) -> None:
    """UserError unless the packages of a logger are there."""
    if missing := [package for package in packages if find_spec(package) is None]:
        raise UserError(f"logger={name} needs {' and '.join(missing)}: pip install ssvit[{name}]")


def _text(name: str, value: object, *, optional: bool = False) -> None:
    if not (optional and value is None) and not (isinstance(value, str) and value):
        raise OptionError(name, value, "must be a text, or null" if optional else "must be a text")


@dataclass(frozen=True, kw_only=True)
class TensorBoard:
    """TensorBoard's event files in the run's folder."""


@dataclass(frozen=True, kw_only=True)
class Csv:
    """metrics.csv in the run's folder: a line for each row, a column for each metric."""


@dataclass(frozen=True, kw_only=True)
class Wandb:
    """Weights & Biases; WANDB_MODE=offline keeps the run in its folder, to be sent by `wandb sync`."""

    project: str = "ssvit"
    """The project that gets the run."""
    entity: str | None = None
    """The user or team; None: the one that is logged in."""

    def __post_init__(self) -> None:
        _text("project", self.project)
        _text("entity", self.entity, optional=True)
        _installed("wandb", "wandb")


@dataclass(frozen=True, kw_only=True)
class Mlflow:
    """MLflow: a server, or a file of SQLite."""

    experiment: str = "ssvit"
    """The experiment that gets the run."""
    tracking_uri: str | None = None
    """As http://localhost:5000 or sqlite:///mlflow.db; None: MLFLOW_TRACKING_URI, or MLflow's default."""

    def __post_init__(self) -> None:
        _text("experiment", self.experiment)
        _text("tracking_uri", self.tracking_uri, optional=True)
        _installed("mlflow", "mlflow")
