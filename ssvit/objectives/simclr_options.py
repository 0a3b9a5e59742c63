"""Define the options of SimCLR."""

from typing import Annotated, ClassVar

from annotated_types import Ge

from ssvit.config.choices import choice
from ssvit.config.declaration import Count, Positive, Run, Share
from ssvit.models.encoder_options import Normalized
from ssvit.models.vit_options import ViT
from ssvit.objectives.base_options import Objective
from ssvit.options import OptionError


@choice(
    "objective",
    "simclr",
    also={"override /augment@data.augment": "two_crops_small"},
    sets={
        # The authors' network also averages its last feature map, and the loss then trains each patch.
        "encoder": {"pooling": "patch_mean"},
        "recipe": {"optimizer": "adamw", "lr": 2e-3},  # muon has not been measured with this objective
        # The negatives come from the same micro-batch: recipe.accumulate above 1 reduces their number.
        "evaluators": {"held_out": {"_target_": "ssvit.evaluation.panels.contrast.Contrast"}},
    },
)
class SimCLR(Objective):
    """Learn by contrasting two views (Chen et al. 2020); the defaults are for small images.

    The authors train 1,000 epochs with a batch size of 512 on CIFAR-10, and 100 epochs with a batch size of 4,096 on
    ImageNet (google-research/simclr).
    """

    views: ClassVar[tuple[str, ...]] = ("global",)
    needs_patches: ClassVar[bool] = False

    temperature: Positive = 0.2
    """Divisor of the cosines; lower values give the nearest negatives more weight. The authors use 0.5 for CIFAR-10 and
    0.1 for ImageNet."""
    hidden: Count = 512
    """Width of the projection head's hidden layers; the authors use the encoder's width."""
    projection: Count = 128
    """Width of the projections."""
    layers: Annotated[int, Ge(2)] = 2
    """Number of layers of the projection head."""
    keep: Share = 1.0
    """Fraction of a view's patches that are encoded in training, sampled for each view; 1: all; 0.5 halves the time of
    a step."""

    def fits(self, encoder: ViT) -> None:
        """Check that the encoder can omit patches if `keep` requires it.

        Raises:
            OptionError: The encoder has a stem.
        """
        if self.keep < 1 and encoder.stem is not None:
            raise OptionError("keep", self.keep, "must be 1 for an encoder with a stem, which would see all patches")

    def check(self, run: Run) -> None:
        """Check also the size of images whose patches are sampled."""
        super().check(run)
        if self.keep < 1 and isinstance(run.encoder, Normalized) and not run.encoder.has_patches:
            raise OptionError("keep", self.keep, f"must be 1: {run.encoder.label} has no patches to leave out")
        if self.keep < 1:
            self.check_size(run)

    def count(self, patches: int) -> int:
        """Return the number of encoded patches per view: the fraction of all patches, rounded, at least one."""
        return max(1, round(self.keep * patches))
