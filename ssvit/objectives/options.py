"""The options of the objectives and of their parts. No torch."""

import math
import os
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Final, Literal, Self

from annotated_types import Ge, Le, MinLen
from pydantic import model_validator

from ssvit.config.declaration import Count, Expect, Fraction, Name, NotNegative, Options, Pair, Positive, Share, Size
from ssvit.models.options import Decoder, Timm, ViT
from ssvit.options import OptionError, pair
from ssvit.schedule import Between, Schedule, ScheduleFunction

POINTS = 39  # vectors for each cluster, below which faiss warns of poor ones


class Masking(Options):
    """Which patches are corrupted, and how (section 4.6, Appendix B.1.2)."""

    corrupted: Share = 0.5
    """Fraction of an image's patches that are corrupted and predicted."""
    mask: Fraction = 0.8
    """Fraction of the corrupted patches that become the [mask] embedding."""
    replace: Fraction = 0.1
    """Fraction of the corrupted patches that become another patch of the same image."""
    keep: Fraction = 0.1
    """Fraction of the corrupted patches that stay unchanged. The three fractions sum to 1."""
    shape: Literal["random", "block"] = "random"
    """random: patches are chosen independently; block: rectangles are chosen until the count is reached (Bao et al.
    2022)."""
    unit: Count = 1
    """Side in patches of the squares that are corrupted together (Xie et al. 2022, section 3.2)."""

    @model_validator(mode="after")
    def _check_sum(self) -> Self:
        total = self.mask + self.replace + self.keep
        if abs(total - 1) > 1e-6:
            raise OptionError("mask + replace + keep", f"{total:g}", "the three fractions must sum to 1")
        return self

    def count(self, patches: int) -> int:
        """The number of corrupted patches of an image: the fraction of its units, rounded, at least one unit."""
        return max(1, round(self.corrupted * patches / self.unit**2)) * self.unit**2

    def fits(self, encoder: ViT) -> None:
        """OptionError unless images have enough patches."""
        self.divide(encoder.grid)

    def divide(self, grid: tuple[int, int]) -> tuple[int, int]:
        """Rows and columns of units on a grid of patches. OptionError unless the units tile the grid."""
        if self.replace > 0 and grid == (1, 1):
            raise OptionError("replace", self.replace, "needs images of at least two patches")
        if any(side % self.unit for side in grid):
            right = f"must divide the grid of {grid[0]}x{grid[1]} patches"
            raise OptionError("unit", self.unit, right)
        return grid[0] // self.unit, grid[1] // self.unit


class MaskedPatch(Options):
    """Masked patch prediction."""

    samples_patches: ClassVar[bool] = True  # of images of the encoder's size

    masking: Masking
    """Which patches are corrupted, and how."""
    decoder: Decoder | None = None
    """The decoder that predicts the corrupted patches; the encoder then sees only the others. None: the encoder sees
    all patches, and a linear head predicts."""

    @model_validator(mode="after")
    def _check_masking(self) -> Self:
        if self.decoder is None:
            return self
        for name, share in (("mask", 1), ("replace", 0), ("keep", 0)):
            if getattr(self.masking, name) != share:
                right = f"must be {share} with a decoder, as the encoder sees nothing of corrupted patches"
                raise OptionError(f"masking.{name}", getattr(self.masking, name), right)
        return self

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


class Patches(Options):
    """A target that is computed for each patch."""

    patch_size: Pair
    """Pixels of a patch's side, or [height, width]; stored as a pair."""
    channels: Count = 3
    """Channels of the images."""

    def fits(self, encoder: ViT) -> None:
        """OptionError unless the encoder has patches of this size."""
        expected = {"patch_size": pair("patch_size", encoder.patch_size), "channels": encoder.channels}
        for name, value in expected.items():
            if getattr(self, name) != value:
                raise OptionError(name, getattr(self, name), f"must be {value}, as of the encoder")


class Pixels(Patches):
    """The pixels of the patch (Appendix B.1.2)."""

    loss: Literal["l2", "l1"] = "l2"
    """l2: the squared error, as in the paper; l1: the absolute error, as in SimMIM (Xie et al. 2022, section 3.4)."""


class Hog(Patches):
    """Histograms of oriented gradients (Wei et al. 2022)."""

    cell: Pair = (8, 8)
    """Side in pixels of a cell, which has one histogram, or [height, width]; stored as a pair. The paper has 8, for
    patches of 16."""
    window: Pair | None = None
    """Side in pixels of the square around the patch whose cells are predicted, or [height, width]; stored as a pair.
    None: only the patch itself."""

    @property
    def window_size(self) -> tuple[int, int]:
        """Height and width of the square whose cells are predicted."""
        return self.window or self.patch_size

    @model_validator(mode="after")
    def _check_window(self) -> Self:
        patch, cell, window = self.patch_size, self.cell, self.window_size
        if any(side < least or (side - least) % 2 for side, least in zip(window, patch, strict=True)):
            right = f"must be the patch's {patch[0]}x{patch[1]} pixels, or larger by an even number"
            raise OptionError("window", self.window, right)
        if any(side % part for side, part in zip(window, cell, strict=True)):
            raise OptionError("cell", self.cell, f"must divide the window of {window[0]}x{window[1]} pixels")
        return self


class MeanColor(Patches):
    """The mean colour of the patch as one class: the paper's best target."""

    bits: Count = 3
    """Each channel has 2^bits levels; 3 bits give 512 classes."""

    @property
    def side(self) -> int:
        """Cells in a row and in a column of the patch."""
        return 1

    @model_validator(mode="after")
    def _check_bits(self) -> Self:
        if self.bits > 8 or self.bits * self.channels > 16:
            most = min(8, 16 // self.channels)
            others = "; target=pixels, hog and codebook take any number of them" if self.channels > 3 else ""
            raise OptionError("bits", self.bits, f"must be at most {most} for {self.channels} channels{others}")
        return self


class ColorGrid(MeanColor):
    """The mean colours of a grid of cells, one class for each cell: the paper's 4x4 downsized patch."""

    grid: Count = 4
    """Cells in a row and in a column of the patch."""

    @property
    def side(self) -> int:
        return self.grid

    @model_validator(mode="after")
    def _check_grid(self) -> Self:
        height, width = self.patch_size
        if height % self.grid or width % self.grid:
            raise OptionError("grid", self.grid, f"must divide the patch of {height}x{width} pixels")
        return self


class Codebook(Patches):
    """The cluster of the patch, by its pixels or by the features of an earlier run."""

    clusters: Annotated[int, Ge(2)] = 512
    """Number of clusters; 512 to 8,192 are usual."""
    images: Count = 2048
    """Number of the run's first images, as augmented for training, whose patches are clustered."""
    window: Size | None = None
    """Side in pixels of the window around a patch, or [height, width]; None: three times the patch's side."""
    components: Count = 32
    """Number of principal components of the window's pixels."""
    checkpoint: Name | None = None
    """The run or checkpoint whose encoder's features are clustered, as a second stage; None: pixels are clustered."""
    layer: Count | None = None
    """The layer of that encoder whose features are taken; 1 for the first."""

    @property
    def window_size(self) -> tuple[int, int]:
        """Height and width of the window."""
        if self.window is not None:
            return pair("window", self.window)
        height, width = self.patch_size
        return 3 * height, 3 * width

    @model_validator(mode="after")
    def _check_window(self) -> Self:
        patch = self.patch_size
        if any(window < side for window, side in zip(self.window_size, patch, strict=True)):
            raise OptionError("window", self.window, "must be at least the patch")
        return self

    @model_validator(mode="after")
    def _check_checkpoint(self) -> Self:
        if self.checkpoint is None:
            if self.layer is not None:
                raise OptionError("layer", self.layer, "needs the checkpoint of an earlier run, as target.checkpoint=…")
            return self
        if not os.path.exists(self.checkpoint):
            raise OptionError("checkpoint", self.checkpoint, "no such folder or file")
        if self.layer is None:
            raise OptionError("layer", None, "must be given with a checkpoint; a middle one is usual")
        return self

    def fits(self, encoder: ViT) -> None:
        """OptionError unless images are larger than a window and have enough patches for the clusters."""
        super().fits(encoder)
        size, patch = pair("image_size", encoder.image_size), pair("patch_size", encoder.patch_size)
        if self.checkpoint is None and any(
            (window - part + 1) // 2 >= side for window, part, side in zip(self.window_size, patch, size, strict=True)
        ):
            raise OptionError("window", self.window, f"reaches too far beyond the borders of images of {size} pixels")
        fewest = math.ceil(POINTS * self.clusters / math.prod(encoder.grid))
        if self.images < fewest:
            right = f"must be at least {fewest}, which have {POINTS} patches for each of {self.clusters} clusters"
            raise OptionError("images", self.images, right)


class Masked(Options):
    """An objective whose encoder sees a part of the patches, and whose decoder predicts the others."""

    samples_patches: ClassVar[bool] = True  # of images of the encoder's size

    masked: Share
    """Fraction of an image's patches that the encoder does not see and that are predicted."""

    def fits(self, encoder: ViT) -> None:
        """OptionError unless an image has patches to mask and others to see."""
        if encoder.grid == (1, 1):
            raise OptionError("masked", self.masked, "needs images of at least two patches")
        if encoder.stem is not None:
            raise OptionError("masked", self.masked, "needs an encoder without a stem, which would see masked patches")

    def count(self, patches: int) -> int:
        """The number of an image's patches that are masked: the fraction, rounded, at least one, and not all."""
        return min(max(1, round(self.masked * patches)), patches - 1)


class MAE(Masked):
    """A masked autoencoder (He et al. 2022)."""

    masked: Share = 0.75
    """Fraction of an image's patches that the encoder does not see and that are reconstructed (section 4.1)."""
    norm_pixels: bool = True
    """Whether a patch's pixels are normalised by their mean and standard deviation (section 3)."""
    decoder: Decoder
    """The decoder, which predicts the masked patches."""

    def fits(self, encoder: ViT) -> None:
        """OptionError unless an image has patches to mask and others to see, and the patches can be normalised."""
        super().fits(encoder)
        if self.norm_pixels and encoder.channels * math.prod(pair("patch_size", encoder.patch_size)) == 1:
            raise OptionError("norm_pixels", True, "must be false for patches of a single number")


class Lora(Options):
    """Low-rank updates of attention's frozen matrices (Hu et al. 2021): W + alpha / rank * B A."""

    rank: Count
    """Columns of B and rows of A; 4 to 16 are common."""
    alpha: Positive
    """Scale of the update, which is multiplied by alpha / rank; often the rank, or twice the rank."""


BALANCED: Final = "balanced"
ClassWeights = Annotated[
    Literal["balanced"] | Sequence[NotNegative], Expect("balanced, or a list with a number of 0 or more for each class")
]
_SEVERAL = "where an image may have several classes"
SOFTMAX: Final = "softmax"
SIGMOID: Final = "sigmoid"
MULTI_LABEL: Final = "multi_label"


class Classify(Options):
    """A classification head and its loss."""

    classes: Annotated[Sequence[str], MinLen(2), Expect("a list of two or more")] | None = None
    """Names of the classes, in the order of the labels; None: those of the data set."""
    hidden: Count | None = None
    """Width of the head's hidden layer; None: a linear head, as in the paper's fine-tuning."""
    loss: Literal["softmax", "sigmoid", "multi_label"] = SOFTMAX
    """softmax (the paper); sigmoid: a binary loss for each class, summed over the classes (big_vision: utils.py);
    multi_label: the same where an image may have several classes or none, as data with such labels choose."""
    head_bias: Annotated[float, Ge(-100), Le(100)] = 0.0
    """Initial value of the biases of the head's last layer. With sigmoid, big_vision has -6.9 for ImageNet and -10 for
    ImageNet-21k (vit_i1k.py, vit_i21k.py)."""
    label_smoothing: Annotated[float, Ge(0), Le(0.999999)] = 0.0
    """Fraction of a label that is spread over all classes; only with softmax."""
    mixup: NotNegative = 0.0
    """alpha of MixUp (Zhang et al. 2018); 0: no MixUp. With CutMix too, each micro-batch gets one of them at random."""
    cutmix: NotNegative = 0.0
    """alpha of CutMix (Yun et al. 2019); 0: no CutMix."""
    distillation: Any = None
    """The options of `Distillation`; None: labels only."""
    trained: Literal["all", "head", "norms_and_biases"] | Annotated[Count, Expect("a number of last layers")] = "all"
    """Which weights are trained besides the head. all; head: none; a number: the last norm and this number of last
    layers; norms_and_biases: those of the encoder (BitFit, Zaken et al. 2022). The other weights stay as in the
    checkpoint."""
    lora: Lora | None = None
    """Low-rank updates, with trained=head; None: no LoRA."""
    class_weights: ClassWeights | None = None
    """Factors of the images' losses by their labels, in the order of the classes. balanced: images / (classes * images
    of the class), 0 for a class without images; None: all 1. With several labels: factors of a class's loss on the
    images that have it (torch's pos_weight); balanced: images without the class / images with it."""

    @model_validator(mode="after")
    def _check_loss(self) -> Self:
        if self.loss == SIGMOID and self.label_smoothing > 0:
            raise OptionError("label_smoothing", self.label_smoothing, "must be 0 with loss=sigmoid")
        if isinstance(self.distillation, str | int | float):
            raise OptionError("distillation", self.distillation, "must be null, or chosen: distillation=deit")
        if self.loss == SIGMOID and self.distillation is not None:
            raise OptionError("loss", self.loss, "must be softmax with a teacher, whose opinion is a softmax")
        if self.loss == MULTI_LABEL:
            self.check_multi_label()
        return self

    def check_multi_label(self) -> None:
        """OptionError unless these options go with images of several classes."""
        if self.label_smoothing > 0:
            raise OptionError("label_smoothing", self.label_smoothing, f"must be 0 {_SEVERAL}")
        if self.distillation is not None:
            raise OptionError("distillation", "given", f"must be null {_SEVERAL}: a teacher's opinion is a softmax")

    @model_validator(mode="after")
    def _check_lora(self) -> Self:
        if self.lora is not None and self.trained != "head":
            raise OptionError("trained", self.trained, "must be head with lora, which freezes the encoder's weights")
        return self

    @model_validator(mode="after")
    def _check_class_weights(self) -> Self:
        weights = self.class_weights
        if weights is not None and self.loss == SIGMOID:
            raise OptionError("class_weights", weights, "must be null with loss=sigmoid")
        if weights is None or isinstance(weights, str):
            return self
        if not any(weights):
            raise OptionError("class_weights", weights, "one of them must be above 0")
        if self.classes is not None and len(weights) != len(self.classes):
            right = f"must be {len(self.classes)} numbers, one for each class, not {len(weights)}"
            raise OptionError("class_weights", weights, right)
        return self

    def fits(self, encoder: ViT | Timm) -> None:
        """OptionError unless the encoder has as many layers as are to be trained, and is wide enough for LoRA."""
        if isinstance(encoder, Timm):
            if self.trained != "all":
                raise OptionError("trained", self.trained, f"must be all with timm's {encoder.model}")
            return
        if isinstance(self.trained, int) and self.trained > encoder.depth:
            raise OptionError("trained", self.trained, f"must be at most {encoder.depth}, the layers of the encoder")
        if self.lora is not None and self.lora.rank > encoder.width:
            right = f"must be at most {encoder.width}, the width of the encoder"
            raise OptionError("lora.rank", self.lora.rank, right)


class Distillation(Options):
    """The loss of a classifier against its teacher."""

    kind: Literal["hard", "soft"] = "hard"
    """hard: the teacher's most probable class is the label (Touvron et al. 2021, section 4); soft: its probabilities
    are the target."""
    temperature: Positive = 3.0
    """Divides the logits of student and teacher, with soft (Hinton et al. 2015); the default of DeiT's code is 1.0
    (deit: main.py)."""
    weight: Fraction = 0.5
    """Weight of this loss; the labels' loss has the rest."""
    reduction: Literal["batch", "elements"] = "batch"
    """How the soft loss is averaged. batch: summed over the classes, averaged over the images; elements: averaged
    over both, k times less, as in DeiT's code (deit: losses.py)."""

    @model_validator(mode="after")
    def _check_reduction(self) -> Self:
        if self.kind == "hard" and self.reduction != "batch":
            raise OptionError("reduction", self.reduction, "must be batch with kind=hard, whose loss is of one class")
        return self


class Dino(Options):
    """Self-distillation with no labels; the defaults are the authors' for ViT-S (main_dino.py)."""

    views: ClassVar[tuple[str, ...]] = ("global",)
    is_averaged: ClassVar[bool] = True  # what is probed and exported, by itself: the teacher

    prototypes: Annotated[int, Ge(2)] = 65536
    """Number of prototypes; 1,024 to 4,096 for small data sets."""
    hidden: Count = 2048
    """Width of the head's two hidden layers."""
    bottleneck: Count = 256
    """Width of the vectors that are compared with prototypes."""
    student_temperature: Positive = 0.1
    """Divides the student's logits."""
    teacher_temperature: Annotated[ScheduleFunction, Between(0, above=True)] = Schedule(
        start=0.04, end=0.04, shape="linear", over=0.3
    )
    """`Schedule` of the divisor of the teacher's logits; lower values give sharper targets."""
    teacher_momentum: Annotated[ScheduleFunction, Between(0, 1)] = Schedule(start=0.996, end=1.0)
    """`Schedule` of the share of its own weights that the teacher keeps at each step."""
    center_momentum: Fraction = 0.9
    """Share that the centre, the running mean of the teacher's logits, keeps of itself at each step."""
    last_layer: Annotated[ScheduleFunction, Between(0)] = Schedule(start=0.0, end=1.0, shape="step", over=0.01)
    """`Schedule` of a factor of the prototypes' gradient; 0 freezes them, also for weight decay."""

    @property
    def schedules(self) -> dict[str, ScheduleFunction]:
        """The schedules by name."""
        return {name: getattr(self, name) for name in ("teacher_temperature", "teacher_momentum", "last_layer")}


class IBot(Dino):
    """DINO with masked patches; the defaults that stand here are the authors' for ViT-S (bytedance/ibot: README.md).

    The others are those of `Dino`. In the authors' 800 epochs teacher_temperature goes from 0.04 to 0.07 over 0.0375 of
    the run, last_layer is 0 for 0.00125 of it, and the lengths of prototypes are trained, for which there is no option.
    """

    samples_patches: ClassVar[bool] = True  # of images of the encoder's size

    prototypes: Annotated[int, Ge(2)] = 8192
    """Number of prototypes."""
    masked: Share = 0.3
    """Mean fraction of a masked view's patches that are masked."""
    spread: NotNegative = 0.2
    """Largest deviation of this fraction from its mean."""
    probability: Share = 0.5
    """Probability that a global view has masked patches."""
    patch_weight: NotNegative = 1.0
    """Weight of the patches' loss; DINO's loss has weight 1."""
    own_head: bool = False
    """Whether patches have a separate head, as in DINOv2."""
    patch_temperature: Annotated[ScheduleFunction, Between(0, above=True)] = Schedule(
        start=0.04, end=0.07, shape="linear", over=0.04
    )
    """`Schedule` of the divisor of the teacher's logits of patches."""

    @model_validator(mode="after")
    def _check_spread(self) -> Self:
        most = min(self.masked, 1 - self.masked)
        if self.spread > most:
            raise OptionError("spread", self.spread, f"must be a number, 0 or more and at most {most:g}")
        return self

    @property
    def schedules(self) -> dict[str, ScheduleFunction]:
        """The schedules by name."""
        return {**super().schedules, "patch_temperature": self.patch_temperature}

    def most(self, patches: int) -> int:
        """The largest number of a view's patches that are masked."""
        return max(1, round((self.masked + self.spread) * patches))


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


class SimCLR(Options):
    """Contrastive learning of two views (Chen et al. 2020)."""

    views: ClassVar[tuple[str, ...]] = ("global",)
    takes_local: ClassVar[bool] = False

    temperature: Positive = 0.5
    """Divides the cosines; with lower values the nearest negatives count more."""
    hidden: Count = 2048
    """Width of the projection head's hidden layers."""
    projection: Count = 128
    """Width of the vectors that are compared."""
    layers: Annotated[int, Ge(2)] = 2
    """Layers of the projection head."""
    keep: Share = 1.0
    """Fraction of a view's patches that the encoder sees in training, sampled for each view; 1: all."""

    def fits(self, encoder: ViT) -> None:
        """OptionError if patches are to be left out and the encoder cannot do that."""
        if self.keep < 1 and encoder.stem is not None:
            raise OptionError("keep", self.keep, "must be 1 for an encoder with a stem, which would see all patches")

    @property
    def samples_patches(self) -> bool:
        """Whether patches are sampled, of images of the encoder's size."""
        return self.keep < 1

    def count(self, patches: int) -> int:
        """The number of a view's patches that the encoder sees: the fraction, rounded, at least one."""
        return max(1, round(self.keep * patches))


class ContrastiveTuning(Options):
    """Contrastive tuning of a finished run; the defaults are MAE-CT's for ViT-L (ml-jku/MAE-CT: yamls)."""

    views: ClassVar[tuple[str, ...]] = ("global",)
    takes_local: ClassVar[bool] = False
    goes_on: ClassVar[bool] = True  # from trained weights

    temperature: Positive = 0.2
    """Divides the cosines."""
    hidden: Count = 2048
    """Width of the hidden layers of the projector, which has two, and of the predictor, which has one."""
    projection: Count = 256
    """Width of the vectors that are compared."""
    queue: Count = 65536
    """Images among which the nearest neighbour is searched; at least those of a step. With more than the training set
    has, an image finds itself."""
    trained: Count | None = None
    """Number of the encoder's last layers that are trained, besides its last norm; null: half of them."""
    heads_only: Fraction = 0.5
    """Fraction of the run in which only the heads are trained."""

    def fits(self, encoder: ViT) -> None:
        """OptionError unless the encoder has as many layers as are to be trained."""
        if self.trained is not None and self.trained > encoder.depth:
            raise OptionError("trained", self.trained, f"must be at most {encoder.depth}, the layers of the encoder")

    @property
    def schedules(self) -> dict[str, ScheduleFunction]:
        """The schedules by name. encoder_gradient: a factor of the encoder's gradient."""
        if self.heads_only in (0, 1):
            return {"encoder_gradient": Schedule(start=1.0 - self.heads_only, shape="constant")}
        return {"encoder_gradient": Schedule(start=0.0, end=1.0, shape="step", over=self.heads_only)}
