"""What the training loop asks of an evaluation: numbers, words and pictures of a model, now and then."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from ssvit.objectives.base import Objective


class Evaluator(Protocol):
    """Judges a model on held-out images, the same ones each time. It is called in eval mode and without gradients."""

    def measure(self, objective: Objective) -> dict[str, float]:
        """Named numbers of the model as it is now."""

    def explain(self, metrics: Mapping[str, float]) -> list[str]:
        """What the numbers of `measure` mean, in words, a line each."""

    def draw(self, objective: Objective, history: Sequence[Mapping[str, float]]) -> dict[str, Any]:
        """Pictures by name (matplotlib figures).

        history: all rows of metrics so far, each with its "step": what `measure` gave, and training's as "train/…";
        None stands for a number that was not finite.
        """
