"""Values that change during a run: pure functions of the step, so they have no state to save. No torch."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ssvit.options import OptionError, make, number, one_of, within

SHAPES = ("constant", "linear", "cosine", "step")


class Progress(NamedTuple):
    """The progress of a run: `step` of `steps` updates, counted from 0."""

    step: int
    steps: int


ScheduleFunction = Callable[[Progress], float]
Given = ScheduleFunction | Mapping[str, object]  # as an option has it


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """From `start` at the first step to `end` after the fraction `over` of the run, with 1 at its last step.

    shape: linear, cosine (half a period, as the momentum of BYOL and DINO), step (from `start` to `end` at once) or
    constant (`start` throughout).
    """

    start: float
    """The value at the first step."""
    end: float | None = None
    """The value at the end; None: `start` throughout."""
    shape: str = "cosine"
    """How the value changes: constant, linear, cosine or step."""
    over: float = 1.0
    """The fraction of the run after which the end is reached."""

    def __post_init__(self) -> None:
        one_of("shape", self.shape, SHAPES)
        number("start", self.start, -math.inf)
        number("over", self.over, 0, 1, above=True)
        if self.end is not None:
            number("end", self.end, -math.inf)

    @classmethod
    def of(cls, name: str, value: Given, low: float, high: float = math.inf, *, above: bool = False) -> Given:
        """The schedule of an option: from options, whose values it checks as `number` does, or any function as it is.

        A mapping with a `_target_` is left to be built.
        """
        if isinstance(value, Mapping) and "_target_" not in value:
            with within(name):
                value = make(cls, value)
        if isinstance(value, cls):
            with within(name):
                for end in ("start", "end") if value.end is not None else ("start",):
                    number(end, getattr(value, end), low, high, above=above)
        elif not callable(value) and not isinstance(value, Mapping):
            raise OptionError(name, value, "must be a schedule: {start: …, end: …, shape: …, over: …}")
        return value

    def __call__(self, progress: Progress) -> float:
        """The value at a step."""
        if self.shape == "constant" or self.end is None:
            return self.start
        last = max(self.over * (progress.steps - 1), 1)
        done = min(progress.step / last, 1.0)
        if self.shape == "cosine":
            done = (1 - math.cos(math.pi * done)) / 2
        elif self.shape == "step":
            done = math.floor(done)
        return self.start + (self.end - self.start) * done
