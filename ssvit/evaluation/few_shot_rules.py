"""What a few-shot evaluation may be: the published protocols, and a user's own. Standard library only."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ssvit.options import OptionError, number, one_of, whole

ALL = "all"  # shots: the whole training set, once


@dataclass(frozen=True)
class FewShotProtocol:
    """What is drawn and what is fitted. OptionError unless it can be.

    shots: training images of a class, or "all". seeds: draws of each of the shots. l2: penalties; of several,
    leave-one-out accuracy on the support set chooses one.
    """

    shots: Sequence[int | str]
    seeds: int
    l2: Sequence[float]

    def __post_init__(self) -> None:
        for name, values in (("shots", self.shots), ("l2", self.l2)):
            if not isinstance(values, list | tuple) or not values:
                raise OptionError(name, values, "must be a list of one or more")
        for count in self.shots:
            if isinstance(count, str):
                one_of("shots", count, (ALL, "a whole number"))
            else:
                whole("shots", count)
        whole("seeds", self.seeds)
        for penalty in self.l2:
            number("l2", penalty, 0, above=True)


PROTOCOLS = {
    # The paper names the regression and ImageNet's 5 shots. The penalties are those of the authors' older public
    # evaluator (uncertainty-baselines: jft/experiments/common_fewshot.py), whose "leave-self-out" chooses among them.
    "paper": FewShotProtocol(shots=(5,), seeds=3, l2=tuple(2.0**i for i in range(-10, 20))),
    # google-research/big_vision, evaluators/fewshot_lsr.py and the configurations that use it.
    "big_vision": FewShotProtocol(shots=(1, 5, 10, 25), seeds=3, l2=(2.0**10,)),
}


def few_shot(protocol: Any, *, shots: Any = None, seeds: Any = None, l2: Any = None) -> FewShotProtocol:
    """A published protocol with whatever is given in place of its own. OptionError unless it can be."""
    one_of("protocol", protocol, PROTOCOLS)
    given = {"shots": shots, "seeds": seeds, "l2": l2}
    return replace(PROTOCOLS[protocol], **{name: value for name, value in given.items() if value is not None})
