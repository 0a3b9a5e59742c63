"""The options of latent prediction."""

from typing import Annotated, Self

from pydantic import model_validator

from ssvit.config.declaration import Count, Fraction, NotNegative, Options, Share
from ssvit.models.vit_options import ViT
from ssvit.objectives.masking_options import Masked
from ssvit.options import OptionError
from ssvit.schedule import Between, Schedule, ScheduleFunction


class Convolutions(Options):
    """The convolutional decoder of latent prediction."""

    depth: Count
    """Layers."""
    width: Count
    """Channels."""
    kernel: Count = 3
    """Side of a kernel, in patches."""
    groups: Count = 16
    """Groups of channels that are convolved separately; divides the widths of decoder and encoder."""

    @model_validator(mode="after")
    def _check_groups(self) -> Self:
        if self.width % self.groups:
            raise OptionError("groups", self.groups, f"must divide width={self.width}")
        return self


class Latent(Masked):
    """Latent prediction; the defaults are the authors' for ViT-B (fairseq: data2vec/config/v2)."""

    masks: Count = 16
    """Masks of an image, which share one forward pass of the teacher."""
    masked: Share = 0.8
    """Fraction of an image's patches that are masked and predicted."""
    block: Count = 3
    """Side of a block of visible patches, in patches."""
    adjust: Fraction = 0.07
    """Added to the fraction of visible patches when blocks are counted, since blocks overlap."""
    layers: Count = 10
    """Number of the teacher's last layers whose mean is predicted."""
    class_token_weight: NotNegative = 0.01
    """Weight of the class token's loss, which is a mean like the patches' loss. The authors' 0.01 multiplies a sum
    over a GPU's images and masks (fairseq: model_criterion.py), which is 2.56 of a mean for 16 images with 16
    masks."""
    teacher_momentum: Annotated[ScheduleFunction, Between(0, 1)] = Schedule(
        start=0.9998, end=0.99999, shape="linear", over=0.27
    )
    """`Schedule` of the share of its own weights that the teacher keeps at each step."""
    decoder: Convolutions
    """The decoder, which predicts the masked patches; the authors' has depth 6, width 768, kernel 3 and groups 16."""

    def fits(self, encoder: ViT) -> None:
        """OptionError unless the encoder has the layers, patches to mask and to see, and a class token if needed."""
        if self.layers > encoder.depth:
            raise OptionError("layers", self.layers, f"must be at most {encoder.depth}, the layers of the encoder")
        super().fits(encoder)
        if self.class_token_weight and not encoder.class_token:
            raise OptionError("class_token_weight", self.class_token_weight, "must be 0 without encoder.class_token")
        groups = self.decoder.groups
        if encoder.width % groups:
            raise OptionError("decoder.groups", groups, f"must divide encoder.width={encoder.width}")
