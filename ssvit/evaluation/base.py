"""What the training loop asks of an evaluation: numbers, words, figures and tables of a model, now and then."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ssvit.objectives.base import Objective

# Rows of metrics, each with its "step": an evaluator's own by their names, training's as "train/…", another
# evaluator's as "validation/…". None stands for a number that was not finite.
History = Sequence[Mapping[str, float | None]]


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What an evaluator found.

    metrics: named numbers, the same in every process. lines: what they mean, in words. figures: matplotlib's, by name.
    tables: text by file name. Lines and tables are of the model as it is; figures may show how it came there.
    """

    metrics: Mapping[str, float]
    lines: Sequence[str] = ()
    figures: Mapping[str, Any] = field(default_factory=dict)
    tables: Mapping[str, str] = field(default_factory=dict)


class Evaluator:
    """Evaluates a model on held-out images, the same ones each time, and keeps no state from one call to the next.

    every: steps from one evaluation to the next; None for the recipe's evaluate_every. at_end: evaluate once, when all
    steps are complete.
    """

    every: int | None = None
    at_end: bool = False

    def __call__(self, objective: Objective, history: History | None = None) -> Evaluation:
        """The model as it is now, which is in eval mode and without gradients. Every process calls it.

        history: all rows so far, the last of them begun for this evaluation (see `with_metrics`). None: metrics alone
        are asked for, as in all processes but the main one.
        """
        raise NotImplementedError


def with_metrics(history: History, metrics: Mapping[str, float]) -> History:
    """The same rows, the last of them with these metrics too."""
    numbers = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
    return [*history[:-1], {**history[-1], **numbers}]
