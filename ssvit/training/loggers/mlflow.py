"""MLflow, by its own client."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from mlflow import MlflowClient
from mlflow.entities import Metric, Param
from mlflow.exceptions import MlflowException
from PIL.Image import Image

from ssvit.options import UserError
from ssvit.training.loggers.base import Unreachable
from ssvit.training.loggers.follower import Follower
from ssvit.training.loggers.mlflow_options import Mlflow as Options

_MOST = 100  # parameters that a call takes


class Mlflow(Follower):
    """The options are those of `mlflow_options.Mlflow`. A server that does not answer gets the rows once it does."""

    file = "mlflow.json"

    def __init__(self, options: Options, *, folder: Path, name: str, hyperparameters: Mapping[str, object]) -> None:
        super().__init__(options, folder=folder, name=name, hyperparameters=hyperparameters)
        self._options = options

    def start(self, identity: str | None) -> str:
        try:
            self._client = MlflowClient(tracking_uri=self._options.tracking_uri)
            if identity is not None:
                self._client.update_run(identity, status="RUNNING")
                return identity
            known = self._client.get_experiment_by_name(self._options.experiment)
            experiment = (
                self._client.create_experiment(self._options.experiment) if known is None else known.experiment_id
            )
            identity = self._client.create_run(experiment, run_name=self.name).info.run_id
            options = [Param(name, str(value)) for name, value in self.hyperparameters.items()]
            for first in range(0, len(options), _MOST):
                self._client.log_batch(identity, params=options[first : first + _MOST])
        except MlflowException as error:
            raise UserError(f"logger=mlflow: {' '.join(str(error).split())}") from None
        return identity

    def send(self, step: int, row: Mapping[str, float]) -> None:
        now = int(1000 * time.time())
        with _answering():
            self._client.log_batch(self._id, [Metric(name, value, now, step) for name, value in row.items()])

    def send_picture(self, step: int, name: str, picture: Image) -> None:
        with _answering():
            self._client.log_image(self._id, picture, key=name, step=step, synchronous=True)

    def close(self) -> None:
        with _answering():
            self._client.set_terminated(self._id, "FINISHED" if self.complete else "KILLED")


@contextmanager
def _answering() -> Iterator[None]:
    try:
        yield
    except MlflowException as error:
        raise Unreachable(" ".join(str(error).split())) from None
