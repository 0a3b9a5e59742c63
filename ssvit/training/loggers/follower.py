"""Provide a base class of loggers for services with persistent runs, such as Weights & Biases."""

import json
from abc import abstractmethod
from collections.abc import Mapping
from itertools import takewhile
from typing import Any

from PIL.Image import Image

from ssvit import atomic_io
from ssvit.training.loggers.base import Logger, Rows


def _step(row: Mapping[str, float | None]) -> int:
    return int(row["step"] or 0)


class Follower(Logger):
    """A logger whose service receives each row once, however often training is resumed.

    A run that resumes from a checkpoint repeats some rows, or replaces them if its evaluators have changed. The file
    `<service>.json` in the run folder stores the identity of the service's run, the last step that was sent, and the
    number of rows of that step.

    Attributes:
        complete: Whether the run has finished.
    """

    complete = False

    def open(self, first_step: int, history: Rows) -> None:
        """Resume the service's run or start a new one, and send the rows that are missing there."""
        self._history = history
        try:
            kept = json.loads((self.folder / self.file).read_text())
            identity, self._step, self._rows = str(kept["id"]), int(kept["step"]), int(kept["rows"])
        except (OSError, ValueError, LookupError, TypeError):
            identity, self._step, self._rows = None, -1, 0
        self._id = self.start(identity)
        self._follow()

    def record(self, step: int, row: Mapping[str, float]) -> None:
        """Send all rows that have not been sent."""
        self._new = bool(self._pending())
        self._follow()

    def show(self, step: int, name: str, picture: Image) -> None:
        """Send a picture, unless its row had been sent before training resumed."""
        if self._new:
            self.send_picture(step, name, picture)

    def finish(self, metrics: Mapping[str, float]) -> None:
        """Mark the run as complete; `close` reports this to the service."""
        self.complete = True

    def _follow(self) -> None:
        """Send the rows that have not been sent."""
        for row in self._pending():
            finite: dict[str, Any] = {name: value for name, value in row.items() if value is not None}
            step = finite.pop("step")
            self.send(step, finite)
            self._step, self._rows = step, self._rows + 1 if step == self._step else 1
        kept = {"id": self._id, "step": self._step, "rows": self._rows}
        atomic_io.replace(self.folder / self.file, json.dumps(kept).encode())

    def _pending(self) -> Rows:
        """Return the rows after the last one that was sent."""
        recent = [*takewhile(lambda row: _step(row) >= self._step, reversed(self._history))][::-1]
        same = sum(_step(row) == self._step for row in recent)
        return recent[min(same, self._rows) :]

    @abstractmethod
    def start(self, identity: str | None) -> str:
        """Resume the service's run with an identity, or start a new one; return its identity."""

    @abstractmethod
    def send(self, step: int, row: Mapping[str, float]) -> None:
        """Send a row of finite numbers; raise Unreachable if the service does not accept it."""

    @abstractmethod
    def send_picture(self, step: int, name: str, picture: Image) -> None:
        """Send a picture; raise Unreachable if the service does not accept it."""
