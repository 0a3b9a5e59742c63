"""Define the options of a masked autoencoder."""

import math

from ssvit.config.choices import choice
from ssvit.config.declaration import Share
from ssvit.models.decoder_options import Decoder
from ssvit.models.vit_options import ViT
from ssvit.objectives.masking_options import Masked
from ssvit.options import OptionError, pair


@choice(
    "objective",
    "mae",
    sets={
        # The class token is trained only by way of the decoder, which takes it as input (Appendix A.1).
        "encoder": {"pooling": "patch_mean"},
        "evaluators": {"held_out": {"_target_": "ssvit.evaluation.panels.autoencoding.Autoencoding"}},
    },
)
class MAE(Masked):
    """Train a masked autoencoder (He et al. 2022)."""

    masked: Share = 0.75
    """Fraction of an image's patches that are masked and reconstructed (section 4.1)."""
    norm_pixels: bool = True
    """Whether the pixels of a patch are standardised by their mean and standard deviation (section 3)."""
    decoder: Decoder = Decoder(depth=2, width=128, heads=4)
    """Decoder of the masked patches; the default is for small images, and the authors' has depth 8, width 512 and 16
    heads."""

    def fits(self, encoder: ViT) -> None:
        """Check that an image has patches to mask and visible patches, and that patches can be standardised.

        Raises:
            OptionError: An image has one patch, the encoder has a stem, or norm_pixels is set for patches of one value.
        """
        super().fits(encoder)
        if self.norm_pixels and encoder.channels * math.prod(pair("patch_size", encoder.patch_size)) == 1:
            raise OptionError("norm_pixels", True, "must be false for patches of a single number")
