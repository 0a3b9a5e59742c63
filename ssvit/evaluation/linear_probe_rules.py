"""What a linear probe may be: by SGD on a grid of learning rates, or by logistic regression. Standard library only."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ssvit.options import OptionError, flag, number, whole

# DINOv2's grid, there for batches of 256.
LEARNING_RATES = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.2, 0.5, 1.0)
L2S = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6)


@dataclass(frozen=True, kw_only=True)
class Sgd:
    """The options of `linear_probe.SgdProbe`, which says what each is. OptionError names one that cannot be."""

    learning_rates: Sequence[float] = LEARNING_RATES
    epochs: int = 20
    batch_size: int = 256
    momentum: float = 0.9
    weight_decay: float = 0.0
    held_out: float = 0.1
    standardize: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        _positive("learning_rates", self.learning_rates)
        whole("epochs", self.epochs)
        whole("batch_size", self.batch_size)
        number("momentum", self.momentum, 0, 0.999)
        number("weight_decay", self.weight_decay, 0)
        _choosing(self.held_out, self.standardize, self.seed)


@dataclass(frozen=True, kw_only=True)
class Lbfgs:
    """The options of `linear_probe.Logistic`, which says what each is. OptionError names one that cannot be."""

    l2s: Sequence[float] = L2S
    held_out: float = 0.1
    standardize: bool = True
    iterations: int = 500
    seed: int = 0

    def __post_init__(self) -> None:
        _positive("l2s", self.l2s)
        whole("iterations", self.iterations)
        _choosing(self.held_out, self.standardize, self.seed)


METHODS = {"sgd": Sgd, "logistic": Lbfgs}


def _positive(name: str, values: Any) -> None:
    """OptionError unless it is a list of different numbers above 0."""
    right = "must be a list of different numbers"
    if isinstance(values, str) or not isinstance(values, Sequence) or not values:
        raise OptionError(name, values, right)
    for value in values:
        number(name, value, 0, above=True)
    if len(set(values)) < len(values):
        raise OptionError(name, values, right)


def _choosing(held_out: Any, standardize: Any, seed: Any) -> None:
    number("held_out", held_out, 0, 0.9, above=True)
    flag("standardize", standardize)
    whole("seed", seed, 0)
