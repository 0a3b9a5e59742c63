"""Define the interface of evaluations during training: an `Evaluator` measures the model on held-out images."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ssvit.data.batch import EvalTransform
from ssvit.data.loader import check_readable
from ssvit.data.sources.base import Source
from ssvit.figures.base import Figure
from ssvit.figures.display import PLAIN, Display
from ssvit.figures.plot import History

COST = 0.4  # relative to a training image: a third for the forward pass, plus neighbour search, fits and the figure
SHARE = 0.05  # maximum cost of evaluations at automatic steps, relative to training


Shown = tuple[list[str], dict[str, Figure]]


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Store the result of an evaluator.

    Attributes:
        metrics: Metrics by name, the same in each process.
        lines: Sentences that interpret the metrics, printed at the end of the run.
        warnings: Warnings that are printed immediately.
        figures: Descriptions of figures by name, drawn when they are saved. Only figures use the history.
        tables: Text by file name.
    """

    metrics: Mapping[str, float]
    lines: Sequence[str] = ()
    warnings: Sequence[str] = ()
    figures: Mapping[str, Figure] = field(default_factory=dict)
    tables: Mapping[str, str] = field(default_factory=dict)


class Evaluator:
    """Evaluate a model on a fixed set of held-out images; calls are independent of each other.

    A run constructs an evaluator with its options, `source` (the held-out images), `transform` (of the evaluation) and
    `display` (conversion of images to RGB for figures).

    Attributes:
        every: Steps between two evaluations; None for recipe.evaluate_every.
        at_end: Whether to evaluate only after the last step.
        images: Number of images of an evaluation, for the estimate of the run's duration; 0 if negligible.
    """

    every: int | None = None
    at_end: bool = False
    images: int = 0

    def due(self, step: int, steps: int, evaluate_every: int) -> bool:
        """Return whether to evaluate after `step` of `steps` updates."""
        return step == steps or (not self.at_end and step % (self.every or evaluate_every) == 0)

    def trial(self, objective: Any, images: int) -> int:
        """Do the work of an evaluation on a few of its images, whose cost is then measured.

        Args:
            objective: The model, as for an evaluation.
            images: Maximum number of images.

        Returns:
            The number of images; 0 if the evaluator has no trial.
        """
        return 0

    def __call__(self, objective: Any, history: History | None = None) -> Evaluation:
        """Evaluate the model in its current state, in eval mode and without gradients. It is called in each process.

        Args:
            objective: The model, of the type that the evaluator supports.
            history: All rows of metrics so far, where the last row belongs to this evaluation: metrics of this
                evaluator by name, others as "train/…" or "validation/…". None if only metrics are required, as in all
                processes but the main one.
        """
        raise NotImplementedError


def with_metrics(history: History, metrics: Mapping[str, float]) -> History:
    """Return the rows of the history with these metrics added to the last one."""
    numbers = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
    return [*history[:-1], {**history[-1], **numbers}]


class LabelledEvaluator(Evaluator):
    """Evaluate a model on each image of a source, which has labels or masks.

    Args:
        options: Options of the evaluation.
        source: The images.
        transform: Transform of the evaluation.
        display: Conversion of images to RGB for figures.
        part: Name of the images in texts and figures, "test" or "validation".
        at_end: Whether to evaluate only after the last step.
        run_folder: Folder with the fingerprints of the images of the pre-training, if any, with which the images of a
            classifier are compared.
    """

    def __init__(
        self,
        options: Any,
        *,
        source: Source,
        transform: EvalTransform,
        display: Display = PLAIN,
        part: str = "test",
        at_end: bool = False,
        run_folder: Path | None = None,
    ) -> None:
        self.options, self.part, self.at_end, self.run_folder = options, part, at_end, run_folder
        self.source, self.transform, self.display = source, transform, display
        self.images = len(source)

    def check_readable(self, readable: int, files: str = "image files") -> None:
        """Raise UserError if more than the share `TOLERATED` of the images could not be read."""
        check_readable(readable, len(self.source), files)


class PlottingEvaluator(Evaluator):
    """Measure a model, and show its metrics by lines and figures."""

    def __call__(self, objective: Any, history: History | None = None) -> Evaluation:
        """Return the metrics of `measure` and, with a history, the lines and figures of `show`."""
        metrics = self.measure(objective)
        if history is None:
            return Evaluation(metrics=metrics)
        lines, figures = self.show(objective, metrics, with_metrics(history, metrics))
        return Evaluation(metrics=metrics, lines=lines, figures=figures)

    def measure(self, objective: Any) -> dict[str, float]:
        """Return the metrics."""
        raise NotImplementedError

    def show(self, objective: Any, metrics: Mapping[str, float], history: History) -> Shown:
        """Return lines that interpret the metrics, and figures by name. The last row of the history has the metrics."""
        raise NotImplementedError


def interval(*, images: int, steps: int, batch_size: int, evaluate_every: int) -> int:
    """Return the number of steps between two evaluations, where the first is at step 0 and the last at the end.

    It is the smallest multiple of evaluate_every for which all evaluations take less than SHARE of the run, where an
    image of an evaluation counts as COST of a training image. If there is none, it is the number of steps of the run.

    Args:
        images: Number of images of an evaluation.
        steps: Number of steps of the run.
        batch_size: Global batch size.
        evaluate_every: Steps between two evaluations of the objective.
    """
    affordable = SHARE * steps * batch_size / (COST * images)
    candidates = range(evaluate_every, steps, evaluate_every)
    return next((candidate for candidate in candidates if 1 + -(-steps // candidate) < affordable), steps)
