"""Define the options of few-shot ridge regression."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from annotated_types import MinLen
from pydantic import model_validator

from ssvit.config.declaration import ONE_OR_SEVERAL, Count, Expect, OneOf, Options, Positive

Shots = Annotated[
    tuple[Count | Literal["all"], ...], *ONE_OR_SEVERAL, Expect("one of all, a whole number, or a list of them")
]


@dataclass(frozen=True)
class FewShotProtocol:
    """Define the default options of a protocol of `FewShot`."""

    shots: tuple[int | Literal["all"], ...]
    seeds: int
    l2: tuple[float, ...]


FEW_SHOT_PROTOCOLS = {
    # The paper specifies the regression and 5 shots for ImageNet. The penalties, and their choice by leave-one-out, are
    # those of the authors' older public evaluator (uncertainty-baselines: jft/experiments/common_fewshot.py).
    "paper": FewShotProtocol(shots=(5,), seeds=3, l2=tuple(2.0**i for i in range(-10, 20))),
    # google-research/big_vision, evaluators/fewshot_lsr.py and the configurations that use it.
    "big_vision": FewShotProtocol(shots=(1, 5, 10, 25), seeds=3, l2=(2.0**10,)),
}


_OF_PROTOCOL: Any = None  # replaced by the protocol's value before validation


class FewShot(Options):
    """Fit ridge regression to a few images of each class."""

    protocol: Annotated[str, OneOf(FEW_SHOT_PROTOCOLS)] = "paper"
    """Protocol, which sets the defaults of the other options."""
    shots: Shots = _OF_PROTOCOL
    """Training images of each class, or all; or a list of numbers. None: the protocol's."""
    seeds: Count = _OF_PROTOCOL
    """Number of samples for each number of shots. None: the protocol's."""
    l2: Annotated[Sequence[Positive], MinLen(1), Expect("a list of numbers above 0")] = _OF_PROTOCOL
    """L2 penalties, from which leave-one-out accuracy on the sampled images chooses one. None: the protocol's."""

    @model_validator(mode="before")
    @classmethod
    def _fill_from_protocol(cls, values: dict[str, Any]) -> dict[str, Any]:
        protocol = FEW_SHOT_PROTOCOLS.get(values.get("protocol", "paper"))
        usual = vars(protocol) if protocol else {}
        return values | {name: value for name, value in usual.items() if values.get(name) is None}
