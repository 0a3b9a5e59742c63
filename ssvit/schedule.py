"""Numbers that change as a run goes on: pure functions of the step, so nothing of them has to be saved. No torch."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from ssvit.options import number, one_of

SHAPES = ("constant", "linear", "cosine")


class Progress(NamedTuple):
    """How far a run is: `step` of `steps` updates, counted from 0."""

    step: int
    steps: int


ScheduleFunction = Callable[[Progress], float]


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """From `start` at the first step to `end`, which it keeps then.

    shape: how it goes there: linear, cosine (half a period, as the momentum of BYOL and DINO), or constant, which is
    `start` throughout. over: the fraction of the run that it takes; with 1 the last step of the run has `end`, as
    lightly's `cosine_schedule` has it. OptionError names an option that cannot be.
    """

    start: float
    end: float | None = None
    shape: str = "cosine"
    over: float = 1.0

    def __post_init__(self) -> None:
        one_of("shape", self.shape, SHAPES)
        number("start", self.start, -math.inf)
        number("over", self.over, 0, 1, above=True)
        if self.end is not None:
            number("end", self.end, -math.inf)

    def __call__(self, progress: Progress) -> float:
        """The value at a step."""
        if self.shape == "constant" or self.end is None:
            return self.start
        last = max(self.over * (progress.steps - 1), 1)
        done = min(progress.step / last, 1.0)
        if self.shape == "cosine":
            done = (1 - math.cos(math.pi * done)) / 2
        return self.start + (self.end - self.start) * done
