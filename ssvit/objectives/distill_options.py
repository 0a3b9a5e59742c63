"""Define the options of distillation without labels."""

from typing import ClassVar, Literal

from ssvit.config.declaration import Count, Options, Part
from ssvit.errors import OptionError
from ssvit.objectives.base_options import Objective


class TeacherEncoder(Options):
    """Define a frozen encoder whose features are predicted."""

    @property
    def sized(self) -> Options:
        """Return the options of the encoder with an image size that suits the images."""
        raise NotImplementedError


class Distill(Objective):
    """Predict the features of a frozen encoder, the teacher, of the same view of each image.

    objective=distill teacher=PATH, where PATH is the folder of a run, a file of weights, hf://OWNER/NAME or timm:NAME.
    The teacher may have another architecture, patch size, image size and normalisation than the encoder.
    """

    sets: ClassVar = {
        "teacher": "???",
        "objective": {"teacher": {"_part_": "teacher/encoder"}},
        "recipe": {"lr": 2e-3},
    }

    needs_patches: ClassVar[bool] = False
    needs_image_count: ClassVar[bool] = True

    teacher: Part[TeacherEncoder]
    """The teacher. Its image_size is that of the encoder, within the limits of foreign weights, or that of the run that
    trained it."""
    features: Literal["both", "pooled", "patches"] = "both"
    """Predicted features: the pooled feature of the image, those of the patches, or both with equal weights. The
    teacher's patch grid is resampled to the encoder's."""
    loss: Literal["cosine", "smooth_l1"] = "cosine"
    """Difference of a prediction from its target: 1 minus their cosine, or the smooth L1 loss."""
    hidden: Count | None = None
    """Width of the hidden layer of the heads; None: linear heads."""
    mixup: bool = False
    """Whether each image is mixed with another one, in shares uniform in [0, 1], before teacher and encoder see it
    (Beyer et al. 2022). For long training."""
    cached: bool = False
    """Whether the teacher's pooled features are computed once, of the first view of each image, and stored with the
    run. Each step is then as fast as without a teacher, but the view of the encoder differs from the teacher's."""

    @property
    def reference(self) -> Options:
        """Return the options of the teacher as an encoder."""
        return self.teacher.sized

    def check_consistency(self) -> None:
        """Check that the options can be combined."""
        if self.cached and self.features != "pooled":
            raise OptionError("features", self.features, "must be pooled with cached, since patches move between views")
        if self.cached and self.mixup:
            raise OptionError("mixup", True, "must be false with cached, as mixed images differ in each step")
