"""The numbers of each update on their way from the device to the host, which does not wait for them.

A host that read every loss would wait for the device, and the device then for the host's next commands.
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

AHEAD = 3  # updates that the host may have started beyond the newest one whose numbers it has read
BAD_STEPS = 5  # in a row, after which going on would only waste time


@dataclass(frozen=True)
class Numbers:
    """Of one update, the same in every process.

    values (names + 2,) float64: the means of what the objective gives, by `names`, the gradient's norm, and above 0 if
    a process was asked to stop.
    """

    names: tuple[str, ...]
    values: Tensor

    @property
    def applied(self) -> Tensor:
        """Whether loss and gradient are finite, () bool: where they are not, nothing may change."""
        return self.values[self.names.index("loss")].isfinite() & self.values[-2].isfinite()


class Readings:
    """Copies the numbers of updates to the host and logs them, in order, once they are there."""

    def __init__(self, state: State, loader: Loader, log: MetricsLog) -> None:
        self._state, self._loader, self._log = state, loader, log
        self._copies: deque[tuple[int, tuple[str, ...], Tensor, torch.cuda.Event | None]] = deque()
        self._bad = 0

    def add(self, step: int, numbers: Numbers) -> None:
        """Begin to copy those of an update, counted from 0."""
        copied = None
        values = numbers.values.to("cpu", non_blocking=True)  # from a GPU into pinned memory
        if numbers.values.is_cuda:
            copied = torch.cuda.Event()
            copied.record()
        self._copies.append((step, numbers.names, values, copied))

    def read(self, *, every: bool) -> bool:
        """Log all but the newest updates, or every one; returns whether a process was asked to stop.

        The processes read alike, so they decide alike. UserError if too many updates in a row were not finite.
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

    def _report(self, step: int, logged: dict[str, float], norm: float) -> None:
        recipe, loss = self._state.recipe, logged["loss"]
        self._bad = 0 if math.isfinite(loss) and math.isfinite(norm) else self._bad + 1
        if self._bad:
            self._log.say(f"step {step + 1}: skipped, the loss is {loss:g}, the gradient's norm {norm:g}")
        logged |= {"lr": recipe.learning_rate(step), "gradient_norm": norm, **self._state.scheduled(step)}
        self._log.train(step + 1, logged, waited=self._loader.waited, unreadable=self._loader.unreadable)
        if self._bad == BAD_STEPS:
            raise UserError(
                f"the loss or gradient was not finite {BAD_STEPS} steps in a row, up to step {step + 1}: the run "
                f"stops; a lower recipe.lr than {recipe.lr:g} or recipe.precision=32-true may help"
            )
