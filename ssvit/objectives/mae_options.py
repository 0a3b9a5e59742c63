"""Define the options of a masked autoencoder."""

import math
from typing import ClassVar

from ssvit.config.declaration import Share
from ssvit.errors import OptionError, pair
from ssvit.models.vit_options import Decoder, ViT
from ssvit.objectives.base_options import Objective, check_omits


class Masked(Objective):
    """Define an objective whose encoder encodes the visible patches and whose decoder predicts the masked patches."""

    samples_patches: ClassVar[bool] = True
    needs_standardizing: ClassVar[bool] = True

    masked: Share
    """Fraction of an image's patches that are masked and predicted."""

    def check_encoder(self, encoder: ViT) -> None:
        """Check that an image has patches to mask and visible patches.

        Raises:
            OptionError: An image has one patch, or the encoder has a stem or local attention.
        """
        if encoder.grid == (1, 1):
            raise OptionError("masked", self.masked, "requires images of at least two patches")
        check_omits("masked", self.masked, encoder)

    def count(self, patches: int) -> int:
        """Return the number of masked patches per image: the fraction, rounded, at least one, and fewer than all."""
        return min(max(1, round(self.masked * patches)), patches - 1)


class MAE(Masked):
    """Train a masked autoencoder (He et al. 2022)."""

    sets: ClassVar = {
        # The class token is trained only by way of the decoder, which takes it as input (Appendix A.1).
        "encoder": {"pooling": "patch_mean"},
        "evaluators": {"held_out": {"_part_": "evaluator/autoencoding"}},
    }

    masked: Share = 0.75
    """Fraction of an image's patches that are masked and reconstructed (section 4.1)."""
    norm_pixels: bool = True
    """Whether the pixels of a patch are standardised by their mean and standard deviation (section 3)."""
    decoder: Decoder = Decoder(depth=2, width=128, heads=4)
    """Decoder of the masked patches; the default is for small images, and the authors' has depth 8, width 512 and 16
    heads."""

    def check_encoder(self, encoder: ViT) -> None:
        """Check the encoder as for other masked objectives, and that its patches can be standardised.

        Raises:
            OptionError: See `Masked.check_encoder`, or a patch has one value.
        """
        super().check_encoder(encoder)
        if self.norm_pixels and encoder.channels * math.prod(pair("patch_size", encoder.patch_size)) == 1:
            raise OptionError("norm_pixels", True, "must be false: a patch has one value, which has no deviation")
