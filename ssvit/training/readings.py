"""Asynchronous transfer of the metrics of each update from the device to the host.

Reading a loss synchronises host and device, after which the device is idle until it gets new work. The host therefore
reads the metrics of an update some updates later.
"""

import math
from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from ssvit.data.loader import Loader
from ssvit.options import UserError
from ssvit.training.metrics_log import MetricsLog
from ssvit.training.state import State

AHEAD = 3  # updates that the host may start before it reads the metrics of the oldest one
BAD_STEPS = 5  # consecutive non-finite updates after which the run stops


@dataclass(frozen=True)
class Numbers:
    """The metrics of one update, averaged over the processes.

    Attributes:
        names: The names of the scalars that the objective returns.
        values: (len(names) + 2,) float64: these scalars, the norm of the gradient, and a number above 0 if a process
            has received a request to stop.
    """

    names: tuple[str, ...]
    values: Tensor

    @property
    def applied(self) -> Tensor:
        """Return whether loss and gradient are finite, () bool; otherwise, the update has to be skipped."""
        return self.values[self.names.index("loss")].isfinite() & self.values[-2].isfinite()


class Readings:
    """Copy the metrics of updates to the host, and log them in order once they have arrived."""

    def __init__(self, state: State, loader: Loader, log: MetricsLog) -> None:
        self._state, self._loader, self._log = state, loader, log
        self._copies: deque[tuple[int, tuple[str, ...], Tensor, torch.cuda.Event | None]] = deque()
        self._bad = 0

    def add(self, step: int, numbers: Numbers) -> None:
        """Start copying the metrics of an update.

        Args:
            step: The number of the update, counted from 0.
            numbers: Its metrics.
        """
        copied = None
        values = numbers.values.to("cpu", non_blocking=True)  # from a GPU to pinned memory
        if numbers.values.is_cuda:
            copied = torch.cuda.Event()
            copied.record()
        self._copies.append((step, numbers.names, values, copied))

    def read(self, *, every: bool) -> bool:
        """Log the metrics that have arrived.

        All processes read the metrics of the same updates, so that they reach the same decision.

        Args:
            every: Whether to wait for the metrics of all updates; otherwise those of the newest `AHEAD` remain.

        Returns:
            Whether a process has received a request to stop.

        Raises:
            UserError: The loss or gradient was not finite in `BAD_STEPS` consecutive updates.
        """
        stopping = False
        while len(self._copies) > (0 if every else AHEAD):
            step, names, copy, copied = self._copies.popleft()
            if copied is not None:
                copied.synchronize()
            *values, norm, stop = copy.tolist()
            self._report(step, dict(zip(names, values, strict=True)), norm)
            stopping |= stop > 0
        return stopping

    def _report(self, step: int, metrics: dict[str, float], norm: float) -> None:
        recipe, loss = self._state.recipe, metrics["loss"]
        self._bad = 0 if math.isfinite(loss) and math.isfinite(norm) else self._bad + 1
        if self._bad:
            self._log.say(f"step {step + 1}: skipped, the loss is {loss:g}, the gradient's norm {norm:g}")
        metrics |= {"lr": recipe.learning_rate(step), "gradient_norm": norm, **self._state.scheduled(step)}
        self._log.train(step + 1, metrics, waited=self._loader.waited, unreadable=self._loader.unreadable)
        if self._bad == BAD_STEPS:
            raise UserError(
                f"the loss or gradient was not finite {BAD_STEPS} steps in a row, up to step {step + 1}: the run "
                f"stops; a lower recipe.lr than {recipe.lr:g} or recipe.precision=32-true may help"
            )
