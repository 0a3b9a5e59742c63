"""Define the options of contrastive tuning."""

from typing import ClassVar

from ssvit.config.choices import choice
from ssvit.config.declaration import Count, Fraction, Positive, Run
from ssvit.models.vit_options import ViT
from ssvit.objectives.base_options import Objective
from ssvit.options import OptionError, RootOptionError
from ssvit.schedule import Schedule, ScheduleFunction


@choice(
    "objective",
    "contrastive_tuning",
    also={"override /augment@data.augment": "two_crops_small"},
    sets={
        "data": {"augment": {"jitter": 0.0, "grayscale": 0.0}},  # only crops and flips
        "recipe": {"optimizer": "adamw", "lr": 2e-3},  # muon has not been measured with this objective
        # The negatives come from the same micro-batch: recipe.accumulate above 1 reduces their number.
        "evaluators": {"held_out": {"_target_": "ssvit.evaluation.panels.contrast.Contrast"}},
    },
)
class ContrastiveTuning(Objective):
    """Tune a finished run contrastively (MAE-CT, Lehner et al. 2023); the defaults are for small images.

    The authors' values are those of stages 2 and 3 of ViT-L (ml-jku/MAE-CT: yamls/stage2_… and stage3_…). Their heads
    have batch norm, their neighbour is one of the 20 nearest, and both stages have 20 epochs of 1,024 images a step.
    """

    views: ClassVar[tuple[str, ...]] = ("global",)
    needs_standardizing: ClassVar[bool] = True  # before cosines, which a few features would dominate

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

    def fits(self, encoder: ViT) -> None:
        """Check that the encoder has the layers that are to be trained.

        Raises:
            OptionError: It has fewer layers.
        """
        if self.trained is not None and self.trained > encoder.depth:
            raise OptionError("trained", self.trained, f"must be at most {encoder.depth}, the layers of the encoder")

    def check(self, run: Run) -> None:
        """Check also that the run starts from trained weights, and that the queue holds the images of a step."""
        super().check(run)
        if run.encoder is not None and not run.from_checkpoint:
            right = "the objective goes on from trained weights: give the path of a run, or of other projects' weights"
            raise RootOptionError("checkpoint", None, right)
        if run.recipe and self.queue < run.recipe.batch_size:
            right = f"must hold the images of a step, recipe.batch_size={run.recipe.batch_size}"
            raise OptionError("queue", self.queue, right)

    @property
    def schedules(self) -> dict[str, ScheduleFunction]:
        """Return the schedules by name: encoder_gradient is a factor of the encoder's gradient."""
        if self.heads_only in (0, 1):
            return {"encoder_gradient": Schedule(start=1.0 - self.heads_only, shape="constant")}
        return {"encoder_gradient": Schedule(start=0.0, end=1.0, shape="step", over=self.heads_only)}
