"""Define the interface of probes: a `Probe` evaluates frozen features of an encoder or of a baseline.

Shapes use h, w pixels, n training images, m test images.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor

from ssvit.config.declaration import Options
from ssvit.data.sources.base import is_multi_label
from ssvit.errors import UserError
from ssvit.evaluation.features import Features
from ssvit.evaluation.titles import title


@dataclass(frozen=True, kw_only=True)
class Result:
    """Store the result of a probe on one feature set.

    Attributes:
        scores: Metrics in [0, 1] by column name, such as "all labels". The last column is the headline metric.
        deviations: Standard deviation over samples, by column name, for columns measured on several samples.
        choice: Score on training images for the choice of a layer; higher is better, compared
            lexicographically. None if not computed.
        choice_images: Number of predictions of which the first number of `choice` is the accuracy; None if it is not an
            accuracy.
        numbers: All numbers of the probe, as plain data for JSON.
        predictions: Predicted class of each test image, (m,), or of each pixel, (m, h, w).
        per_image: Score of each measured test image, (m,) float64, whose mean is the last column: 1 for a correct
            prediction and 0 for a wrong one, or the mean of these over samples. None if the last column is not such a
            mean. The images are the same for each feature set.
    """

    scores: Mapping[str, float]
    deviations: Mapping[str, float] = field(default_factory=dict)
    choice: tuple[float, ...] | None = None
    choice_images: int | None = None
    numbers: object = None
    predictions: Tensor | None = None
    per_image: Tensor | None = None


class Probe:
    """Measure frozen features, both during training and afterwards.

    Args:
        options: Options of the probe.

    Attributes:
        options: Options of the probe.
        name: Name in metrics, which depends on the options.
        title: Name for display.
        chosen_by: Description of `Result.choice`.
        is_accuracy: Whether the last column is an accuracy, which is compared with chance. For multi-label images the
            column is the mAP.
        multi_label: Whether the probe supports multi-label classification.
        features: "images" for one vector for each image, or "patches" for one vector for each patch, which is not
            available during training. The number of images is then limited by the options `train_images` and
            `test_images` of the probe, if it has them.
        truth: Ground truth of the probe, "labels" or "masks".
    """

    options: Any
    chosen_by: ClassVar[str] = "the training images"
    is_accuracy: ClassVar[bool] = True
    multi_label: ClassVar[bool] = False
    features: ClassVar[str] = "images"
    truth: ClassVar[str] = "labels"

    def __init__(self, options: Options) -> None:
        self.options = options

    @property
    def name(self) -> str:
        """Return the name in metrics."""
        return "probe"

    @property
    def variant(self) -> str:
        """Return the options that distinguish its accuracies in titles, such as "standardized", or ""."""
        return ""

    @property
    def title(self) -> str:
        """Return the name for display."""
        return title(self.name)

    @property
    def is_balanced(self) -> bool:
        """Return whether the probe is trained on as many images of each class; chance is then a uniform guess."""
        return False

    def check_classes(self, train_labels: Tensor, test_labels: Tensor, classes: Sequence[str]) -> None:
        """Check that the probe can be computed from images with these labels.

        Args:
            train_labels: Labels of the training images, (n,) or (n, classes) bool.
            test_labels: Labels of the test images, (m,) or (m, classes) bool.
            classes: Class names.

        Raises:
            OptionError: If an option does not suit the number of images.
            UserError: If the labels do not suffice.
        """

    def remark(self, train_labels: Tensor, classes: Sequence[str]) -> str:
        """Return a sentence on a protocol that these training images do not allow entirely, or ""."""
        return ""

    def __call__(self, train: Features, test: Features, *, choose: bool = False) -> Result:
        """Evaluate the features. The result is the same in each process, and test labels are used for scoring only.

        Args:
            train: Features of the training images.
            test: Features of the test images.
            choose: Whether `Result.choice` is required, where it takes extra work.

        Raises:
            UserError: If the probe cannot be computed.
        """
        raise NotImplementedError


def check_labels(probe: Probe, train: Tensor, test: Tensor, classes: Sequence[str]) -> None:
    """Check that a probe supports the kind of labels and can be computed from them.

    Args:
        probe: The probe.
        train: Labels of the training images, (n,) or (n, classes) bool.
        test: Labels of the test images, (m,) or (m, classes) bool.
        classes: Class names.

    Raises:
        OptionError: If an option does not suit the number of images.
        UserError: If the labels are multi-label and the probe is not, if there are fewer than two classes, if no test
            image has one, or if the labels do not suffice.
    """
    if probe.truth == "labels" and is_multi_label(train) and not probe.multi_label:
        raise UserError(f"{probe.title} does not support multi-label images")
    if probe.truth == "labels" and len(classes) < 2:
        raise UserError(f"{probe.title} requires images of at least two classes")
    if probe.truth == "labels" and is_multi_label(test) and not test.any():
        raise UserError(f"{probe.title} requires test images with a class; none has one")
    probe.check_classes(train, test, classes)
