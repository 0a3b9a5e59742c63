"""What evaluations are: an `Evaluator` looks at a model in training, a `Probe` at frozen features of any encoder.

Letters: n training images, m test images, d width.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ssvit.evaluation.features import Features
from ssvit.objectives.base import Objective
from ssvit.options import OptionError

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


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a probe found of one feature set.

    scores: by the name of a column, as "5 shot", a share in [0, 1]; the last stands for the probe. deviations: of a
    column, over draws; missing where there was one. choice: how good the features are by the training images alone,
    the more the better, to choose a layer by; None if that is not known. numbers: all that was found, as plain data.
    predictions: the class that each test image is taken for, (m,), or each of its pixels, (m, h, w).
    """

    scores: Mapping[str, float]
    deviations: Mapping[str, float] = field(default_factory=dict)
    choice: tuple[float, ...] | None = None
    numbers: Any = None
    predictions: Tensor | None = None


class Probe:
    """A measure of frozen features, the same in training and afterwards.

    name: in metrics, with what tells it from the same probe with other options; title: for people. chosen_by: what
    `Result.choice` is. is_accuracy: whether the last column is one, so that chance is the least it may be.

    features: what it is asked of: "images", one vector for each, or "patches", one for each patch of images that have
    masks; that is measured afterwards alone. train_images, test_images: it reads at most so many; None: all.
    """

    name: str = "probe"
    chosen_by: str = "the training images"
    is_accuracy: bool = True
    features: str = "images"
    train_images: int | None = None
    test_images: int | None = None

    @property
    def title(self) -> str:
        return self.name.replace("_", " ")

    def check(self, train_labels: Tensor, test_labels: Tensor, classes: Sequence[str]) -> None:
        """OptionError or UserError unless images with these labels, (n,) and (m,), suffice."""

    def __call__(self, train: Features, test: Features, *, choose: bool = False) -> Result:
        """Every process may call it with the same features, and then gets the same. No test label chooses anything.

        choose: whether `Result.choice` is asked for, where that is work of its own. UserError unless it can be.
        """
        raise NotImplementedError


def check_others(k: int, images: int) -> None:
    """OptionError unless each of so many training images has k others."""
    if k >= images:
        raise OptionError("k", k, f"must be below {images}, the training images")
