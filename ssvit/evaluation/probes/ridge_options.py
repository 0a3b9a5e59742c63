"""Define the options of ridge regression."""

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field

from ssvit.config.declaration import ONE_OR_SEVERAL, Count, Expect, Options, Positive

Shots = Annotated[
    tuple[Count | Literal["all"], ...], *ONE_OR_SEVERAL, Expect("one of all, a whole number, or a list of them")
]


class Ridge(Options):
    """Fit ridge regression to all training images, or to a few images of each class."""

    shots: Shots = Field(default="all", validate_default=True)
    """Training images of each class, or all; or a list of numbers."""
    seeds: Count = 3
    """Number of samples for each number of shots."""
    # The paper specifies the regression and 5 shots for ImageNet. The penalties, and their choice by leave-one-out, are
    # those of the authors' older public evaluator (uncertainty-baselines: jft/experiments/common_fewshot.py).
    l2: Annotated[Sequence[Positive], *ONE_OR_SEVERAL, Expect("a number above 0, or a list of them")] = tuple(
        2.0**i for i in range(-10, 20)
    )
    """L2 penalties; one is chosen by the leave-one-out accuracy on the sampled images."""
