"""The interfaces of evaluations: an `Evaluator` measures a model in training, a `Probe` frozen features of any encoder.

Letters: b images of a batch, c channels, h, w pixels, n training images, m test images.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

from matplotlib.figure import Figure
from torch import Tensor

from ssvit.data.batch import EvalTransform
from ssvit.data.loader import evaluation_batches
from ssvit.data.source import Source, is_multi_label
from ssvit.evaluation import options
from ssvit.evaluation.features import Features
from ssvit.evaluation.titles import title
from ssvit.options import OptionError, UserError

# Rows of metrics, each with its "step": the evaluator's own by their names, others as "train/…" or "validation/…".
# None stands for a number that was not finite.
History = Sequence[Mapping[str, float | None]]


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The result of an evaluator.

    metrics: named numbers, the same in every process. lines: what they mean, in words, for the end of the run.
    warnings: what the user should know at once. figures: matplotlib's, by name. tables: text by file name. Only figures
    show the history.
    """

    metrics: Mapping[str, float]
    lines: Sequence[str] = ()
    warnings: Sequence[str] = ()
    figures: Mapping[str, Figure] = field(default_factory=dict)
    tables: Mapping[str, str] = field(default_factory=dict)


class Evaluator:
    """Evaluates a model on held-out images, the same ones each time; one call changes nothing for the next.

    every: steps from one evaluation to the next; None for the recipe's evaluate_every. automatic: as often as takes
    less than 5 % of the training time instead, at steps of the probes. at_end: only after all steps.
    images: that an evaluation sees, for the estimate of a run's time; 0 where that is nothing beside the training.
    """

    every: int | None = None
    automatic: bool = False
    at_end: bool = False
    images: int = 0

    def due(self, step: int, steps: int, evaluate_every: int) -> bool:
        """Whether there is an evaluation once `step` of `steps` updates are complete."""
        return step == steps or (not self.at_end and step % (self.every or evaluate_every) == 0)

    def __call__(self, objective: Any, history: History | None = None) -> Evaluation:
        """Of the model as it is now, in eval mode and without gradients. Every process calls it.

        objective: any, or of the kind that the evaluator is for.

        history: all rows so far, the last of them begun for this evaluation; None, but in the main process, asks for
        metrics alone.
        """
        raise NotImplementedError


class HeldOut(Evaluator):
    """An evaluator of some held-out images of a source."""

    fewest = 1  # images on which it can be measured

    def __init__(self, source: Source, transform: EvalTransform, options: options.HeldOut) -> None:
        self.source, self.transform, self.options = source, transform, options
        self.images = min(options.images, len(source))

    @cached_property
    def batches(self) -> list[tuple[Tensor, Tensor]]:
        """The images as bytes, (b, c, h, w), and their slots (b,), read once."""
        read = evaluation_batches(
            self.source, self.transform, batch_size=self.options.batch_size, limit=self.options.images
        )
        batches = [(batch.images, batch.slots) for batch in read]
        if sum(len(slots) for _, slots in batches) < self.fewest:
            few = "none" if self.fewest == 1 else "fewer than two"
            raise UserError(f"{few} of the held-out images can be read, so there is nothing to evaluate on")
        return batches


def with_metrics(history: History, metrics: Mapping[str, float]) -> History:
    """The same rows, the last of them with these metrics too."""
    numbers = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
    return [*history[:-1], {**history[-1], **numbers}]


@dataclass(frozen=True, kw_only=True)
class Result:
    """The result of a probe on one feature set.

    scores: by the name of a column, as "all labels", a share in [0, 1]; the last stands for the probe. deviations: of a
    column, over samples, if several. choice: how good the features are by the training images alone, the more the
    better, to choose a layer by; None if unknown. choice_images: of how many predictions the first number of `choice`
    is the accuracy; None where it is none. numbers: all that was found, as plain data. predictions: the class of each
    test image, (m,), or of each of its pixels, (m, h, w). per_image: of each test image measured on, (m,) float64,
    what the last column is the mean of: 1 where it is right, 0 where not, or the mean of these over samples; None where
    the last column is no such mean. The same images for other features.
    """

    scores: Mapping[str, float]
    deviations: Mapping[str, float] = field(default_factory=dict)
    choice: tuple[float, ...] | None = None
    choice_images: int | None = None
    numbers: object = None
    predictions: Tensor | None = None
    per_image: Tensor | None = None


class Probe:
    """A measure of frozen features, the same in training and afterwards.

    name: in metrics, different for other options; title: for people. chosen_by: what `Result.choice` is. is_accuracy:
    whether the last column is an accuracy, which is compared with chance; of images that may have several classes it is
    the mAP then. multi_label: whether it measures such images. features: "images", one vector each, or "patches", one
    vector for each patch, not during training. truth: what they are measured against, "labels" or "masks". half:
    whether features of patches are held in 16 bits. train_images, test_images: it reads at most so many; None: all.
    """

    chosen_by: ClassVar[str] = "the training images"
    is_accuracy: ClassVar[bool] = True
    multi_label: ClassVar[bool] = False
    features: ClassVar[str] = "images"
    truth: ClassVar[str] = "labels"
    half: ClassVar[bool] = False

    @property
    def most_images(self) -> tuple[int | None, int | None]:
        """The most training and test images that it reads; None for all."""
        return None, None

    @property
    def name(self) -> str:
        return "probe"

    @property
    def title(self) -> str:
        return title(self.name)

    def check(self, train_labels: Tensor, test_labels: Tensor, classes: Sequence[str]) -> None:
        """OptionError or UserError unless images with these labels, of n and m images as of a source, suffice."""

    def __call__(self, train: Features, test: Features, *, choose: bool = False) -> Result:
        """The same in every process that calls it with the same features. No test label chooses anything.

        choose: whether `Result.choice` is needed, where that is extra work. UserError if it cannot be measured.
        """
        raise NotImplementedError


def check_labels(probe: Probe, train: Tensor, test: Tensor, classes: Sequence[str]) -> None:
    """OptionError or UserError unless images with these labels suffice for a probe, and are of a kind that it takes."""
    if is_multi_label(train) and not probe.multi_label and probe.truth == "labels":
        raise UserError(f"{probe.title} takes images of one class each, and these may have several")
    probe.check(train, test, classes)


def check_others(k: int, images: int) -> None:
    """OptionError unless each of so many training images has k others."""
    if k >= images:
        raise OptionError("k", k, f"must be below {images}, the training images")
