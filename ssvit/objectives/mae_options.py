"""The options of a masked autoencoder."""

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
        # The class token is trained only through the decoder, which reads it (Appendix A.1).
        "encoder": {"pooling": "patch_mean"},
        "evaluators": {"held_out": {"_target_": "ssvit.evaluation.panels.autoencoding.Autoencoding"}},
    },
)
class MAE(Masked):
    """A masked autoencoder (He et al. 2022)."""

    masked: Share = 0.75
    """Fraction of an image's patches that the encoder does not see and that are reconstructed (section 4.1)."""
    norm_pixels: bool = True
    """Whether a patch's pixels are normalised by their mean and standard deviation (section 3)."""
    decoder: Decoder = Decoder(depth=2, width=128, heads=4)
    """The decoder, which predicts the masked patches; the default is for small images, and the authors' has depth 8,
    width 512 and 16 heads."""

    def fits(self, encoder: ViT) -> None:
        """OptionError unless an image has patches to mask and others to see, and the patches can be normalised."""
        super().fits(encoder)
        if self.norm_pixels and encoder.channels * math.prod(pair("patch_size", encoder.patch_size)) == 1:
            raise OptionError("norm_pixels", True, "must be false for patches of a single number")
