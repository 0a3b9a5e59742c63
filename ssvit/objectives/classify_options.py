"""Define the options of classification."""

from typing import Annotated, ClassVar, Final, Literal

from annotated_types import Ge, Le

from ssvit.config.declaration import Count, Fraction, NotNegative, Options, Part, Positive, Tree
from ssvit.data.sources.base_options import NO_LABELS, DataSet
from ssvit.errors import OptionError, UserError
from ssvit.objectives.base_options import FineTuned

MULTI_LABEL: Final = "multi_label"
BINARY: Final = "binary"


class Distillation(Options):
    """Define the loss of a classifier against its teacher."""

    teacher: Part[Options | None] = None
    """The teacher, a classifier of an earlier run."""
    kind: Literal["hard", "soft"] = "hard"
    """hard: the teacher's most probable class is the label (Touvron et al. 2021, section 4); soft: its probabilities
    are the target."""
    temperature: Positive = 3.0
    """Divisor of the logits of student and teacher with kind=soft (Hinton et al. 2015); 1.0 by default in DeiT's code
    (deit: main.py)."""
    weight: Fraction = 0.5
    """Weight w of the distillation loss, as in DeiT's code (deit: main.py); the loss of the labels has weight 1 - w."""


class Classify(FineTuned):
    """Train a classifier."""

    sets: ClassVar = {"evaluators": {"test": {"_part_": "evaluator/classification"}}}
    needs_patches: ClassVar[bool] = False
    needs_labels: ClassVar[bool] = True

    hidden: Count | Literal["width"] | None = None
    """Width of the head's hidden layer. width: that of the encoder, as in the paper's pre-training, and no hidden layer
    for a model of timm; None: a linear head, as in the paper's fine-tuning."""
    loss: Literal["softmax", "binary", "multi_label"] = "softmax"
    """softmax: cross-entropy (the paper); binary: binary cross-entropy averaged over the classes, for images with one
    class each, whose probabilities are the softmax (ResNet strikes back, Wightman et al. 2021); multi_label: binary
    cross-entropy summed over the classes, for multi-label classification, selected automatically for data with such
    labels."""
    label_smoothing: Annotated[float, Ge(0), Le(0.999999)] = 0.0
    """Fraction of a label that is spread over all classes; not with multi_label."""
    target_threshold: Fraction | None = None
    """With binary, a class whose share of a mixed image exceeds this value counts as present; 0.2 in timm's recipes of
    ResNet strikes back. None: the share is the target."""
    mixup: NotNegative = 0.0
    """alpha of MixUp (Zhang et al. 2018), 0.8 is common; 0: no MixUp. With CutMix too, one of the two is sampled for
    each micro-batch."""
    cutmix: NotNegative = 0.0
    """alpha of CutMix (Yun et al. 2019), 1.0 is common; 0: no CutMix."""
    distillation: Part[Distillation | None] = None
    """Distillation from a teacher; None: labels only."""
    class_weights: Literal["balanced"] | None = None
    """balanced: the loss of an image is multiplied by images / (classes * images of its class), counted over the
    training images. For multi-label classification, the loss of a class on the images that have it is multiplied by
    images without the class / images with it. None: no factors."""

    def check_consistency(self) -> None:
        """Check that the options can be combined."""
        if self.loss == MULTI_LABEL:
            self.check_labels(multi_label=True)
        if self.loss == BINARY and self.distillation is not None:
            raise OptionError("distillation", "{…}", "must be null with loss=binary")
        if self.loss != BINARY and self.target_threshold is not None:
            raise OptionError("target_threshold", self.target_threshold, "must be null without loss=binary")
        super().check_consistency()

    def check_labels(self, multi_label: bool) -> None:
        """Check these options against the labels of the images.

        Args:
            multi_label: Whether an image may have several classes.

        Raises:
            OptionError: The loss, label smoothing or distillation is not defined for such labels.
        """
        if not multi_label:
            if self.loss == MULTI_LABEL:
                raise OptionError("loss", self.loss, "must be softmax or binary: each of these images has one class")
        elif self.loss == BINARY:
            raise OptionError("loss", self.loss, "must be multi_label for multi-label images")
        elif self.label_smoothing > 0:
            raise OptionError("label_smoothing", self.label_smoothing, "must be 0 for multi-label images")
        elif self.distillation is not None:
            raise OptionError("distillation", "{…}", "must be null for multi-label images")

    def check(self, tree: Tree) -> None:
        """Check also that the labels of the images are supported."""
        super().check(tree)
        if not isinstance(tree.data, DataSet):
            return
        if tree.data.labelled is False:
            raise UserError(NO_LABELS)
        if tree.data.multi_label is not None:
            self.check_labels(tree.data.multi_label)
