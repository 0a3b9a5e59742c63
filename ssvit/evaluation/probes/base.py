"""The interface of probes: a `Probe` measures frozen features, of any encoder or baseline.

Letters: h, w pixels, n training images, m test images.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from ssvit.data.sources.base import is_multi_label
from ssvit.evaluation.features import Features
from ssvit.evaluation.titles import title
from ssvit.options import OptionError, UserError


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

    def check_classes(self, train_labels: Tensor, test_labels: Tensor, classes: Sequence[str]) -> None:
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
    probe.check_classes(train, test, classes)


def check_others(k: int, images: int) -> None:
    """OptionError unless each of so many training images has k others."""
    if k >= images:
        raise OptionError("k", k, f"must be below {images}, the training images")
