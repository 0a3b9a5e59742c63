"""The options of masked patch prediction."""

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
    """Masked patch prediction."""

    built_from: ClassVar[Mapping[str, str]] = {"encoder": "encoder", "target": "target"}
    samples_patches: ClassVar[bool] = True
    needs_standardizing: ClassVar[bool] = True  # before cosines: a few features outweigh all others

    masking: Masking = Masking()
    """Which patches are corrupted, and how."""
    decoder: Decoder | None = None
    """The decoder that predicts the corrupted patches; the encoder then sees only the others. None: the encoder sees
    all patches, and a linear head predicts."""

    def check_consistency(self) -> None:
        """Check the options against each other."""
        if self.decoder is None:
            return
        for name, share in (("mask", 1), ("replace", 0), ("keep", 0)):
            if getattr(self.masking, name) != share:
                right = f"must be {share} with a decoder, as the encoder sees nothing of corrupted patches"
                raise OptionError(f"masking.{name}", getattr(self.masking, name), right)

    def fits(self, encoder: ViT) -> None:
        """OptionError if there is a decoder and the encoder would see no patch, or through its stem all patches."""
        if self.decoder is None:
            return
        if encoder.stem is not None:
            raise OptionError("decoder", "{…}", "needs an encoder without a stem, which would see corrupted patches")
        patches = math.prod(encoder.grid)
        if self.masking.count(patches) == patches:
            right = "must leave patches to see for the encoder"
            raise OptionError("masking.corrupted", self.masking.corrupted, right)
