"""Define values that change during a run as pure functions of the step, which have no state to save. No torch."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from annotated_types import Gt, Le
from pydantic_core import CoreSchema, core_schema

from ssvit.config.declaration import Options
from ssvit.errors import OptionError, number


class Progress(NamedTuple):
    """Progress of a run: `step` of `steps` updates, counted from 0."""

    step: int
    steps: int


ScheduleFunction = Callable[[Progress], float]


def starting_after(share: float) -> ScheduleFunction:
    """Return a schedule that is 0 in this fraction of a run and then 1; 0 throughout for a fraction of 1."""
    return lambda progress: float(share < 1 and progress.step >= share * (progress.steps - 1))


class Schedule(Options):
    """A value that changes from `start` at the first step to `end` after a fraction of the run (1: the last step)."""

    start: float
    """Value at the first step."""
    end: float | None = None
    """Final value; None: `start` throughout."""
    shape: Literal["constant", "linear", "cosine", "step"] = "cosine"
    """Shape of the change: linear, cosine (half a period, as for the momentum of BYOL and DINO), step (from `start` to
    `end` at once) or constant (`start` throughout)."""
    over: Annotated[float, Gt(0), Le(1)] = 1.0
    """Fraction of the run after which `end` is reached."""

    def __call__(self, progress: Progress) -> float:
        """Return the value at a step."""
        if self.shape == "constant" or self.end is None:
            return self.start
        last = max(self.over * (progress.steps - 1), 1)
        done = min(progress.step / last, 1.0)
        if self.shape == "cosine":
            done = (1 - math.cos(math.pi * done)) / 2
        elif self.shape == "step":
            done = math.floor(done)
        return self.start + (self.end - self.start) * done


@dataclass(frozen=True)
class Between:
    """Bounds of the values of a schedule. The option is a `Schedule`, or any function of the progress.

    Attributes:
        low: Minimum.
        high: Maximum.
        above: Whether the minimum is excluded.
    """

    low: float
    high: float = math.inf
    above: bool = False

    options: ClassVar[type[Options]] = Schedule

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self._schedule)

    def _schedule(self, value: object) -> object:
        if isinstance(value, dict):
            value = Schedule(**value)
        if isinstance(value, Schedule):
            for end in ("start", "end") if value.end is not None else ("start",):
                number(end, getattr(value, end), self.low, self.high, above=self.above)
        elif not callable(value):
            raise OptionError("", value, "must be a schedule: {start: …, end: …, shape: …, over: …}")
        return value
