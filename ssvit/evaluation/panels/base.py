"""The interface of evaluations during training: an `Evaluator` measures the model on held-out images."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ssvit.figures.base import Figure
from ssvit.figures.display import PLAIN, Display
from ssvit.figures.plot import History

COST = 0.5  # of a training image: a third for the pass forward, the rest for neighbours, fits and the figure
SHARE = 0.05  # of the work of training, the most that evaluations at automatic steps may cost


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The result of an evaluator.

    metrics: named numbers, the same in every process. lines: what they mean, in words, for the end of the run.
    warnings: what the user should know at once. figures: their descriptions, by name, which are drawn
    when they are saved. tables: text by file name. Only figures show the history.
    """

    metrics: Mapping[str, float]
    lines: Sequence[str] = ()
    warnings: Sequence[str] = ()
    figures: Mapping[str, Figure] = field(default_factory=dict)
    tables: Mapping[str, str] = field(default_factory=dict)


class Evaluator:
    """Evaluates a model on held-out images, the same ones each time; one call changes nothing for the next.

    every: steps from one evaluation to the next; None for the recipe's evaluate_every. automatic: at the steps of
    `interval` instead, which the run sets. at_end: only after all steps.
    images: that an evaluation sees, for the estimate of a run's time; 0 where that is nothing beside the training.
    display: makes the RGB images of figures, which the run sets by the options of its data set.
    """

    every: int | None = None
    automatic: bool = False
    at_end: bool = False
    images: int = 0
    display: Display = PLAIN

    def set_interval(self, every: int | Literal["auto"]) -> None:
        """Set `every` and `automatic` from an option of the type `Every`."""
        self.every, self.automatic = (None, True) if every == "auto" else (every, False)

    def due(self, step: int, steps: int, evaluate_every: int) -> bool:
        """Whether there is an evaluation once `step` of `steps` updates are complete."""
        return step == steps or (not self.at_end and step % (self.every or evaluate_every) == 0)

    def __call__(self, objective: Any, history: History | None = None) -> Evaluation:
        """Of the model as it is now, in eval mode and without gradients. Every process calls it.

        objective: any, or of the kind that the evaluator is for.

        history: all rows so far, the last of them begun for this evaluation: the evaluator's own metrics by their
        names, others as "train/…" or "validation/…"; None, but in the main process, asks for metrics alone.
        """
        raise NotImplementedError


def with_metrics(history: History, metrics: Mapping[str, float]) -> History:
    """The same rows, the last of them with these metrics too."""
    numbers = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
    return [*history[:-1], {**history[-1], **numbers}]


def interval(*, images: int, steps: int, batch_size: int, evaluate_every: int) -> int:
    """Return the steps between two evaluations of `images` images; the first is at step 0, the last at the end.

    It is the smallest multiple of evaluate_every for which all evaluations take less than SHARE of the run, where an
    image of an evaluation counts as COST of a training image; in a run too short for that, all steps.
    """
    affordable = SHARE * steps * batch_size / (COST * images)
    for candidate in range(evaluate_every, steps, evaluate_every):
        if 1 + -(-steps // candidate) < affordable:
            return candidate
    return steps
