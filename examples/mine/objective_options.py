"""The options of the objective, and what it requires of the other parts of a run."""

from math import prod
from typing import ClassVar

from ssvit.config.declaration import Share
from ssvit.errors import OptionError
from ssvit.models.vit_options import ViT
from ssvit.objectives.base_options import Objective


class HiddenPatches(Objective):
    """An objective that predicts the patches that it hides."""

    also: ClassVar = {"/target": "mean_color"}
    sets: ClassVar = {"encoder": {"pooling": "patch_mean"}}

    needs_target = True
    samples_patches = True

    hidden: Share = 0.5
    """Fraction of an image's patches that are hidden and predicted."""

    def count(self, patches):
        return max(1, round(self.hidden * patches))

    def check(self, run):
        super().check(run)
        if isinstance(run.encoder, ViT) and self.count(prod(run.encoder.grid)) == prod(run.encoder.grid):
            raise OptionError("hidden", self.hidden, "must leave patches of an image to predict the others from")
