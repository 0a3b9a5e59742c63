"""Define the options of masked patch prediction."""

import math
from collections.abc import Mapping
from typing import ClassVar

from ssvit.config.choices import choice
from ssvit.models.decoder_options import Decoder
from ssvit.models.vit_options import ViT
from ssvit.objectives.base_options import Objective
from ssvit.objectives.masking_options import Masking
from ssvit.options import OptionError


@choice(
    "objective",
    "masked_patch",
    also={"/target": "mean_color"},
    sets={
        "encoder": {"pooling": "patch_mean"},  # the class token's output is not trained
        "evaluators": {"held_out": {"_target_": "ssvit.evaluation.panels.prediction.Prediction"}},
    },
)
class MaskedPatch(Objective):
    """Predict masked patches."""

    built_from: ClassVar[Mapping[str, str]] = {"encoder": "encoder", "target": "target"}
    samples_patches: ClassVar[bool] = True
    needs_standardizing: ClassVar[bool] = True  # before cosines, which a few features would dominate

    masking: Masking = Masking()
    """Selection and corruption of the patches."""
    decoder: Decoder | None = None
    """Decoder of the corrupted patches; the encoder then encodes only the uncorrupted patches. None: all patches are
    encoded, and a linear head predicts."""

    def check_consistency(self) -> None:
        """Check that with a decoder all corrupted patches are masked."""
        if self.decoder is None:
            return
        for name, share in (("mask", 1), ("replace", 0), ("keep", 0)):
            if getattr(self.masking, name) != share:
                right = f"must be {share} with a decoder, as the encoder sees nothing of corrupted patches"
                raise OptionError(f"masking.{name}", getattr(self.masking, name), right)

    def fits(self, encoder: ViT) -> None:
        """Check that with a decoder the encoder can omit corrupted patches and has uncorrupted patches.

        Raises:
            OptionError: The encoder has a stem, or all patches are corrupted.
        """
        if self.decoder is None:
            return
        if encoder.stem is not None:
            raise OptionError("decoder", "{…}", "needs an encoder without a stem, which would see corrupted patches")
        patches = math.prod(encoder.grid)
        if self.masking.count(patches) == patches:
            right = "must leave patches to see for the encoder"
            raise OptionError("masking.corrupted", self.masking.corrupted, right)
