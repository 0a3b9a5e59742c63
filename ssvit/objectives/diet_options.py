"""Define the options of DIET."""

from typing import Annotated, ClassVar

from annotated_types import Ge, Le

from ssvit.objectives.base_options import Objective


class Diet(Objective):
    """Classify the index of each training image (DIET, Balestriero 2023), for sets of up to some 100,000 images.

    The author trains with AdamW, a learning rate of 1e-3 * batch size / 256 and a weight decay of 0.05. The defaults of
    objective=diet_cp continue the training of existing weights.
    """

    also: ClassVar = {"override /augment@data.augment": "diet"}
    sets: ClassVar = {"recipe": {"optimizer": "adamw", "lr": 1e-3}}  # of the trials in docs/optimizers.md

    needs_patches: ClassVar[bool] = False
    needs_image_count: ClassVar[bool] = True

    label_smoothing: Annotated[float, Ge(0), Le(0.999999)] = 0.8
    """Fraction of a target that is spread over all images; 0.2 in DIET-CP."""
    normalize: bool = False
    """Whether the features are scaled to unit length before the head, as in DIET-CP."""
