"""Define the options of SimCLR and of contrastive tuning."""

from typing import Annotated, ClassVar

from annotated_types import Ge

from ssvit.config.declaration import Count, Fraction, Positive, Share, Tree
from ssvit.data.sources.base_options import count_images
from ssvit.errors import OptionError, RootOptionError
from ssvit.models.encoder_options import Normalized
from ssvit.models.vit_options import ViT
from ssvit.objectives.base_options import Objective, check_trained
from ssvit.objectives.schedule import ScheduleFunction, starting_after

# The negatives come from the same micro-batch: recipe.accumulate above 1 reduces their number.
EVALUATORS = {"held_out": {"_part_": "evaluator/contrast"}}


class SimCLR(Objective):
    """Learn by contrasting two views (Chen et al. 2020); the defaults are for small images.

    The authors train 1,000 epochs with a batch size of 512 on CIFAR-10, and 100 epochs with a batch size of 4,096 on
    ImageNet (google-research/simclr).
    """

    also: ClassVar = {"override /augment@data.augment": "two_crops_small"}
    # The authors' network also averages its last feature map, and the loss then trains each patch.
    sets: ClassVar = {"recipe": {"lr": 2e-3}, "evaluators": EVALUATORS, "encoder": {"pooling": "patch_mean"}}

    views: ClassVar[tuple[str, ...]] = ("global",)
    needs_patches: ClassVar[bool] = False
    needs_distinct_images: ClassVar[bool] = True

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

    def check_encoder(self, encoder: Normalized) -> None:
        """Check that the encoder can omit patches if `keep` requires it.

        Raises:
            OptionError: The encoder has a stem, local attention or no patches.
        """
        if self.keep < 1 and not (isinstance(encoder, ViT) and encoder.omits_patches):
            raise OptionError("keep", self.keep, "must be 1 for an encoder that cannot omit patches")

    def check(self, tree: Tree) -> None:
        """Check also the size of images whose patches are sampled."""
        super().check(tree)
        if self.keep < 1:
            self.check_size(tree)

    def count(self, patches: int) -> int:
        """Return the number of encoded patches per view: the fraction of all patches, rounded, at least one."""
        return max(1, round(self.keep * patches))


class ContrastiveTuning(Objective):
    """Tune a finished run contrastively (MAE-CT, Lehner et al. 2023); the defaults are for small images.

    The authors' values are those of stages 2 and 3 of ViT-L (ml-jku/MAE-CT: yamls/stage2_… and stage3_…). Their heads
    have batch norm, their neighbour is one of the 20 nearest, and both stages have 20 epochs of 1,024 images a step.
    """

    also: ClassVar = {"override /augment@data.augment": "two_crops_small"}
    sets: ClassVar = {
        "recipe": {"optimizer": "adamw", "lr": 2e-3},  # muon has not been measured with this objective
        "evaluators": EVALUATORS,
        "data": {"augment": {"jitter": 0.0, "grayscale": 0.0}},  # only crops and flips
    }

    views: ClassVar[tuple[str, ...]] = ("global",)
    needs_standardizing: ClassVar[bool] = True
    needs_distinct_images: ClassVar[bool] = True
    selects_weights: ClassVar[bool] = True

    temperature: Positive = 0.2
    """Divisor of the cosines; the authors use 0.15 while only the heads are trained, then 0.2."""
    hidden: Count = 512
    """Width of the hidden layers of the projector, which has two, and of the predictor, which has one; the authors use
    2048 and 4096."""
    projection: Count = 128
    """Width of the projections; the authors use 256."""
    queue: Count = 4096
    """Number of images among which the nearest neighbour is searched; at least the batch size, and fewer than the
    training images, since an image would be its own neighbour. The authors use 65536 for ImageNet."""
    trained: Count | None = None
    """Number of the encoder's last layers that are trained, in addition to its last norm; null: half of them."""
    heads_only: Fraction = 0.2
    """Fraction of the run in which only the heads are trained; the authors use 0.5."""

    def check_encoder(self, encoder: ViT) -> None:
        """Check that the encoder has the layers that are to be trained.

        Raises:
            OptionError: It has fewer layers.
        """
        check_trained(self.trained or "all", encoder)

    def check(self, tree: Tree) -> None:
        """Check also that the run starts from trained weights, and the length of the queue."""
        super().check(tree)
        if tree.encoder is not None and not tree.from_checkpoint:
            expected = "must be a run or weights of another project: contrastive tuning starts from a trained encoder"
            raise RootOptionError("checkpoint", None, expected)
        if tree.recipe and self.queue < tree.recipe.batch_size:
            expected = f"must hold the images of a step, recipe.batch_size={tree.recipe.batch_size}"
            raise OptionError("queue", self.queue, expected)
        images = count_images(tree, at_most=self.queue + 1)
        if images is not None and self.queue >= images:
            raise OptionError("queue", self.queue, f"must be less than the {images} training images")

    @property
    def schedules(self) -> dict[str, ScheduleFunction]:
        """Return the schedule of a factor of the encoder's gradient, which is 0 while only the heads are trained."""
        return {"encoder_gradient": starting_after(self.heads_only)}
