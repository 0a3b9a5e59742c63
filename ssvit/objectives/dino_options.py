"""Define the options of DINO and iBOT."""

from typing import Annotated, ClassVar

from annotated_types import Ge

from ssvit.config.declaration import Count, Fraction, NotNegative, Positive, Share, Tree
from ssvit.errors import OptionError, RootOptionError
from ssvit.objectives.base_options import Objective
from ssvit.objectives.schedule import Between, Schedule, ScheduleFunction

VIEWS = {"override /augment@data.augment": "multi_crop_small"}  # two global views and smaller local ones
RECIPE = {"lr": 1e-3}  # of the trials in docs/optimizers.md
TEMPERATURE = Schedule(start=0.04, end=0.04, shape="linear", over=0.3)


class Dino(Objective):
    """Self-distil with no labels (Caron et al. 2021); the defaults are for small sets of small images.

    The authors' values apply to ViT-S on ImageNet (main_dino.py).
    """

    also: ClassVar = VIEWS
    sets: ClassVar = {"recipe": RECIPE, "evaluators": {"held_out": {"_part_": "evaluator/collapse"}}}

    views: ClassVar[tuple[str, ...]] = ("global",)
    accepts_local_views: ClassVar[bool] = True

    prototypes: Annotated[int, Ge(2)] = 1024
    """Number of prototypes; the authors use 65536 for ImageNet, and 8192 for iBOT."""
    hidden: Count = 512
    """Width of the head's two hidden layers; the authors use 2048."""
    bottleneck: Count = 128
    """Width of the vectors that are compared with prototypes; the authors use 256."""
    student_temperature: Positive = 0.1
    """Divisor of the student's logits."""
    teacher_temperature: Annotated[ScheduleFunction, Between(0, above=True)] = TEMPERATURE
    """`Schedule` of the divisor of the teacher's logits; lower values give sharper targets. An end of 0.07 is for long
    runs: in runs of 1,000 steps it left assignments almost uniform."""
    teacher_momentum: Annotated[ScheduleFunction, Between(0, 1)] = Schedule(start=0.99, end=1.0)
    """`Schedule` of the momentum of the teacher's weights per step. It starts at 0.996 in the authors' runs of 100,000
    steps and more; shorter runs need a lower start."""
    center_momentum: Fraction = 0.9
    """Momentum of the centre, the running mean of the teacher's logits, per step."""
    last_layer: Annotated[ScheduleFunction, Between(0)] = Schedule(start=0.0, end=1.0, shape="step", over=0.01)
    """`Schedule` of a factor of the prototypes' gradient; 0 freezes them, and disables their weight decay."""

    def check(self, tree: Tree) -> None:
        """Check also that the recipe keeps no second average of the weights in addition to the teacher."""
        super().check(tree)
        if tree.recipe and tree.recipe.ema:
            expected = "must be 0: the teacher is a moving average of the weights already (objective.teacher_momentum)"
            raise RootOptionError("recipe.ema", tree.recipe.ema, expected)


class IBot(Dino):
    """Self-distil with masked patches (Zhou et al. 2022); the defaults are for small sets of small images.

    The authors' values apply to ViT-S with 800 epochs of ImageNet, 2 global and 10 local views (bytedance/ibot:
    README.md, main_ibot.py). There, teacher_temperature goes from 0.04 to 0.07 over 0.0375 of the run, last_layer is 0
    for 0.00125 of it, and the lengths of prototypes are trained, for which there is no option.
    """

    also: ClassVar = VIEWS
    sets: ClassVar = {"recipe": RECIPE, "evaluators": {"held_out": {"_part_": "evaluator/patch_collapse"}}}

    samples_patches: ClassVar[bool] = True

    masked: Share = 0.3
    """Mean fraction of masked patches in a masked view."""
    spread: NotNegative = 0.2
    """Maximum deviation of this fraction from its mean."""
    probability: Share = 0.5
    """Probability that a global view has masked patches."""
    patch_weight: NotNegative = 1.0
    """Weight of the patches' loss; DINO's loss has weight 1."""
    patch_temperature: Annotated[ScheduleFunction, Between(0, above=True)] = TEMPERATURE
    """`Schedule` of the divisor of the teacher's logits of patches; the authors' ends at 0.07 after 30 of 800 epochs,
    which is too high for short runs (see teacher_temperature)."""

    def check_consistency(self) -> None:
        """Check that the masked fraction stays in [0, 1]."""
        maximum = min(self.masked, 1 - self.masked)
        if self.spread > maximum:
            raise OptionError("spread", self.spread, f"must be at most {maximum:g} with masked={self.masked:g}")

    def max_masked(self, patches: int) -> int:
        """Return the maximum number of masked patches per view."""
        return max(1, round((self.masked + self.spread) * patches))
