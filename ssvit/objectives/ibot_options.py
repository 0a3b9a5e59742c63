"""Define the options of iBOT."""

from typing import Annotated, ClassVar

from annotated_types import Ge

from ssvit.config.choices import choice
from ssvit.config.declaration import NotNegative, Share
from ssvit.objectives.dino_options import Dino
from ssvit.options import OptionError
from ssvit.schedule import Between, Schedule, ScheduleFunction


@choice(
    "objective",
    "ibot",
    also={"override /augment@data.augment": "multi_crop_small"},
    sets={
        "recipe": {"optimizer": "adamw", "lr": 2e-3},  # muon has not been measured with this objective
        "evaluators": {"held_out": {"_target_": "ssvit.evaluation.panels.collapse.PatchCollapse"}},
    },
)
class IBot(Dino):
    """Self-distil with masked patches (Zhou et al. 2022); the defaults are for small sets of small images.

    The authors' values are those of ViT-S with 800 epochs of ImageNet, 2 global and 10 local views (bytedance/ibot:
    README.md, main_ibot.py). There, teacher_temperature goes from 0.04 to 0.07 over 0.0375 of the run, last_layer is 0
    for 0.00125 of it, and the lengths of prototypes are trained, for which there is no option.
    """

    samples_patches: ClassVar[bool] = True

    prototypes: Annotated[int, Ge(2)] = 1024
    """Number of prototypes; the authors use 8192."""
    masked: Share = 0.3
    """Mean fraction of masked patches in a masked view."""
    spread: NotNegative = 0.2
    """Maximum deviation of this fraction from its mean."""
    probability: Share = 0.5
    """Probability that a global view has masked patches."""
    patch_weight: NotNegative = 1.0
    """Weight of the patches' loss; DINO's loss has weight 1."""
    own_head: bool = False
    """Whether patches have a separate head, as in DINOv2."""
    patch_temperature: Annotated[ScheduleFunction, Between(0, above=True)] = Schedule(
        start=0.04, end=0.04, shape="linear", over=0.3
    )
    """`Schedule` of the divisor of the teacher's logits of patches; the authors' ends at 0.07 after 30 of 800 epochs,
    which is too high for short runs (see teacher_temperature)."""

    def check_consistency(self) -> None:
        """Check that the masked fraction stays in [0, 1]."""
        most = min(self.masked, 1 - self.masked)
        if self.spread > most:
            raise OptionError("spread", self.spread, f"must be a number, 0 or more and at most {most:g}")

    def most(self, patches: int) -> int:
        """Return the maximum number of masked patches per view."""
        return max(1, round((self.masked + self.spread) * patches))
