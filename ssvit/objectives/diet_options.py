"""Define the options of DIET."""

from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, Le

from ssvit.config.choices import choice
from ssvit.config.declaration import Count, Expect, Fraction
from ssvit.models.encoder_options import Normalized
from ssvit.objectives.base_options import Objective, check_trained
from ssvit.schedule import ScheduleFunction, starting_after


@choice(
    "objective",
    "diet",
    also={"override /augment@data.augment": "diet"},
    sets={"recipe": {"optimizer": "adamw", "lr": 1e-3}},  # muon has not been measured with this objective
)
class Diet(Objective):
    """Classify the index of each training image (DIET, Balestriero 2023), for sets of up to some 100,000 images.

    The author trains with AdamW, a learning rate of 1e-3 * batch size / 256 and a weight decay of 0.05. The defaults of
    objective=diet_cp continue the training of existing weights.
    """

    needs_patches: ClassVar[bool] = False
    needs_image_count: ClassVar[bool] = True

    label_smoothing: Annotated[float, Ge(0), Le(0.999999)] = 0.8
    """Fraction of a target that is spread over all images (Algorithm 1)."""
    normalize: bool = False
    """Whether the features are scaled to unit length before the head, as in DIET-CP."""
    trained: Literal["all"] | Annotated[Count, Expect("a number of last layers")] = "all"
    """Weights of the encoder that are trained. all; or a number: this number of last layers and the last norm."""
    head_only: Fraction = 0.0
    """Fraction of the run in which only the head is trained; 0.05 in DIET-CP."""

    @property
    def schedules(self) -> dict[str, ScheduleFunction]:
        """Return the schedule of a factor of the encoder's gradient, which is 0 while only the head is trained."""
        return {"encoder_gradient": starting_after(self.head_only)} if self.head_only else {}

    def check_encoder(self, encoder: Normalized) -> None:
        """Check that the encoder has the layers that are to be trained.

        Raises:
            OptionError: It has fewer layers, or is not a ViT.
        """
        check_trained(self.trained, encoder)
