"""What the training loop asks of an evaluation: numbers, words, pictures and tables of a model, now and then."""

from collections.abc import Mapping, Sequence
from typing import Any

from ssvit.objectives.base import Objective


class Evaluator:
    """Judges a model on held-out images, the same ones each time. It is called in eval mode and without gradients.

    The numbers are the whole of an evaluation; words, pictures and tables are its own choice, and are asked for after
    them, of the main process alone.

    every: steps from one evaluation to the next; None for the recipe's evaluate_every. at_end: ask once, when all steps
    are complete.
    """

    every: int | None = None
    at_end: bool = False

    def measure(self, objective: Objective) -> dict[str, float]:
        """Named numbers of the model as it is now. Every process calls it, and gets the same."""
        raise NotImplementedError

    def explain(self, metrics: Mapping[str, float], history: Sequence[Mapping[str, float | None]] = ()) -> list[str]:
        """What the numbers of `measure` mean, in words, a line each. history: as for `draw`."""
        return []

    def draw(self, objective: Objective, history: Sequence[Mapping[str, float | None]]) -> dict[str, Any]:
        """Pictures by name (matplotlib figures).

        history: all rows of metrics so far, each with its "step": what `measure` gave, and training's as "train/…";
        None stands for a number that was not finite.
        """
        return {}

    def tabulate(self, objective: Objective) -> dict[str, str]:
        """Tables by file name, as text."""
        return {}
