"""Define the options of latent prediction."""

from typing import Annotated, ClassVar

from ssvit.config.declaration import Count, Fraction, NotNegative, Options, Share
from ssvit.errors import OptionError
from ssvit.models.vit_options import ViT
from ssvit.objectives.mae_options import Masked
from ssvit.objectives.schedule import Between, Schedule, ScheduleFunction


class Convolutions(Options):
    """Define the convolutional decoder of latent prediction."""

    depth: Count
    """Number of layers."""
    width: Count
    """Number of channels."""
    kernel: Count = 3
    """Side of a kernel, in patches."""
    groups: Count = 16
    """Number of groups of channels that are convolved separately; divides the widths of decoder and encoder."""

    def check_consistency(self) -> None:
        """Check that the options can be combined."""
        if self.width % self.groups:
            raise OptionError("groups", self.groups, f"must divide width={self.width}")


class Latent(Masked):
    """Predict latent features (data2vec 2.0, Baevski et al. 2022); the defaults are for small sets of small images.

    The authors' values are those of ViT-B (fairseq: examples/data2vec/config/v2/base_images_only_task.yaml), trained
    for 375,300 steps of 256 images with lr 1e-3 and clip 4.
    """

    sets: ClassVar = {
        "encoder": {"pooling": "patch_mean"},  # the student's encoder is probed and exported, as in the authors' code
        "recipe": {"lr": 4e-3},  # of the trials in docs/optimizers.md
        "evaluators": {"held_out": {"_part_": "evaluator/latent_prediction"}},
    }

    masks: Count = 4
    """Number of masks per image, which share one forward pass of the teacher; the authors use 16."""
    masked: Share = 0.8
    """Fraction of an image's patches that are masked and predicted."""
    block: Count = 3
    """Side of a block of visible patches, in patches."""
    adjust: Fraction = 0.07
    """Fraction added to the fraction of visible patches when blocks are counted, since blocks overlap."""
    layers: Count = 3
    """Number of the teacher's last layers whose mean is predicted; the authors use 10 of 12."""
    class_token_weight: NotNegative = 0.01
    """Weight of the class token's loss, which is a mean like the patches' loss. The authors' 0.01 multiplies a sum over
    a GPU's images and masks (fairseq: model_criterion.py), equivalent to 2.56 of a mean for 16 images with 16 masks."""
    teacher_momentum: Annotated[ScheduleFunction, Between(0, 1)] = Schedule(
        start=0.99, end=0.999, shape="linear", over=0.3
    )
    """`Schedule` of the momentum of the teacher's weights per step; the authors' goes from 0.9998 to 0.99999 over
    100,000 of the 375,300 steps."""
    decoder: Convolutions = Convolutions(depth=3, width=128)
    """Decoder of the masked patches; the authors' has depth 6, width 768, kernel 3 and groups 16."""

    def check_encoder(self, encoder: ViT) -> None:
        """Check the encoder's depth, patches, width and class token against the options.

        Raises:
            OptionError: The encoder has too few layers or patches, a stem, or no class token although it is needed.
        """
        if self.layers > encoder.depth:
            raise OptionError("layers", self.layers, f"must be at most {encoder.depth}, the layers of the encoder")
        super().check_encoder(encoder)
        if self.class_token_weight and not encoder.class_token:
            raise OptionError("class_token_weight", self.class_token_weight, "must be 0 without encoder.class_token")
        groups = self.decoder.groups
        if encoder.width % groups:
            raise OptionError("decoder.groups", groups, f"must divide encoder.width={encoder.width}")
