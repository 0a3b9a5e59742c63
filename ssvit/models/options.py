"""The options of encoders and decoders. No torch."""

import difflib
import re
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

from annotated_types import Ge, Le
from pydantic import Field, model_validator

from ssvit.config.declaration import Count, Expect, Options, Positive, Size, Whole, make
from ssvit.options import OptionError, UserError, number, pair

Resize = Literal["paper", "timm"]
RESIZE = get_args(Resize)  # ways to resample learned positions for images of another size
Epsilons = Literal["authors", "timm"]
EPSILONS = get_args(Epsilons)  # whose epsilons a hybrid's stem has
GROUPS = 32  # of channels that a hybrid's stem normalises
Positions = Literal["learned_1d", "learned_2d", "sine_cosine_2d", "relative", "rotary", "none"]
POSITIONS = get_args(Positions)
TOKENS = ("patch_mean", "class_token", "both")  # ways to make one vector of tokens
PATCHES = "patches"  # no pooling: the features of each patch
Rate = Annotated[float, Ge(0), Le(0.99)]  # the probability of dropout
ByChannel = float | Sequence[float]  # a number, or one for each channel
# Options of an encoder that do not change which weights it has.
CHANGEABLE = (
    "image_size", "pooling", "dropout", "attention_dropout", "stochastic_depth", "activation_checkpointing",
)  # fmt: skip


def grid(image_size: object, patch_size: object) -> tuple[int, int]:
    """Patches in a column and in a row of an image: (rows, columns). OptionError unless the patch divides it."""
    height, width = pair("image_size", image_size)
    patch = pair("patch_size", patch_size)
    for side, pixels, step in (("height", height, patch[0]), ("width", width, patch[1])):
        if step > pixels:
            raise OptionError("patch_size", patch_size, f"must be at most the image's {side} of {pixels} pixels")
        if pixels % step:
            divisors = ", ".join(str(d) for d in range(2, pixels // 2 + 1) if pixels % d == 0) or pixels
            raise OptionError("patch_size", patch_size, f"must divide the image's {side} of {pixels} ({divisors})")
    return height // patch[0], width // patch[1]


def stride(layers: Sequence[int]) -> int:
    """The stride of a hybrid's stem with these stages: 4 after the first, doubled by each further one."""
    return 2 ** (1 + max(len(layers), 1))


class Stem(Options):
    """The ResNet of a hybrid (section 3.1)."""

    layers: Annotated[Sequence[Count], Expect("a list, the units of each stage, as [3, 4, 9]")]
    """Units of each stage: [3, 4, 6, 3] for a ResNet-50, [] for the root alone."""
    width: Annotated[int, Ge(1), Field(multiple_of=GROUPS), Expect(f"a multiple of {GROUPS}, the groups of channels")]
    """Channels of the root; each stage doubles them."""
    epsilons: Epsilons = "authors"
    """authors: the epsilons of the authors' code; timm: those of timm, for the weights of its hybrids."""


class Normalized(Options):
    """An encoder normalises the channels of its images."""

    channels: Count = 3
    """Channels of the images."""
    mean: ByChannel = 0.5
    """Mean of the images' channels, in [0, 1]: one number, or one for each."""
    std: ByChannel = 0.5
    """Standard deviation of the images' channels, in [0, 1]: one number, or one for each."""

    @model_validator(mode="after")
    def _check_normalisation(self) -> Self:
        for name, given in (("mean", self.mean), ("std", self.std)):
            values = list(given) if isinstance(given, Sequence) else [given]
            if len(values) not in (1, self.channels):
                raise OptionError(name, values, f"must be one number, or one for each of the {self.channels} channels")
            for value in values:
                number(name, value, 0, 1, above=name == "std")
        return self


class ViT(Normalized):
    """A Vision Transformer without a head."""

    image_size: Size
    """Pixels of an image's side, or [height, width]."""
    patch_size: Size
    """Pixels of a patch's side, or [height, width]; must divide the image. In a hybrid, the area under a token."""
    width: Count
    """Width of a token's embedding."""
    depth: Count
    """Layers."""
    heads: Count
    """Heads of attention."""
    mlp: Literal["gelu", "swiglu"] = "gelu"
    """gelu: two linear layers with a GELU between them (the paper); swiglu (Shazeer 2020): a third linear layer and a
    SiLU give factors of the hidden layer, as in DINOv2's giant."""
    mlp_width: Count | None = None
    """Width of the MLP's hidden layer; None: 4 * width, or with swiglu two thirds of that, rounded up to a multiple of
    8 (facebookresearch/dinov2: swiglu_ffn.py)."""
    class_token: bool = True
    """Whether there is a class token before the patches."""
    pooling: Literal["patch_mean", "class_token"] = "class_token"
    """The vector of an image: class_token, its output (the paper), or patch_mean, the mean of the patches' outputs."""
    positions: Positions = "learned_1d"
    """The position embeddings: learned_1d (the paper), learned_2d, sine_cosine_2d, relative, none (Table 8) or rotary
    for patches (DINOv3)."""
    positions_at: Literal["stem", "every_layer", "every_layer_shared"] = "stem"
    """Where positions are added: stem (the paper), every_layer, every_layer_shared (Table 8)."""
    dropout: Rate = 0.0
    """Dropout of the first layer's input, of the outputs of attention and MLP, and of the MLP's hidden layer, as in
    the authors' code (vit_jax: models_vit.py)."""
    attention_dropout: Rate = 0.0
    """Dropout of the attention weights; always 0 in the authors' code (vit_jax: configs/models.py)."""
    stochastic_depth: Rate = 0.0
    """Probability that the last layer is skipped in training (Huang et al. 2016); it grows linearly from 0 at the
    first layer."""
    distillation_token: bool = False
    """Whether there is a second prefix token, trained on a teacher's predictions (Touvron et al. 2021)."""
    activation_checkpointing: bool = False
    """Whether training stores only the activations between the layers, and computes each layer again for its
    gradients."""
    stem: Stem | None = None
    """The ResNet of a hybrid; None: patches of pixels."""
    gelu: Literal["exact", "tanh"] = "exact"
    """The MLP's GELU: exact, x * Phi(x); or tanh, its approximation, which JAX computes (Hendrycks and Gimpel 2016)."""
    layer_scale: Positive | None = None
    """Initial value of learned factors of the outputs of attention and MLP (LayerScale, Touvron et al. 2021: CaiT);
    None: no factors; 1e-5 in DINOv2 (facebookresearch/dinov2: ssl_default_config.yaml)."""
    registers: Whole = 0
    """Number of additional tokens before the patches, without a position, whose outputs are not used (Darcet et al.
    2024)."""
    norm_epsilon: Positive = 1e-6
    """Added to the variance in layer norms; 1e-5 in DINOv3."""

    @model_validator(mode="after")
    def _check_shapes(self) -> Self:
        _ = self.grid
        if self.stem is not None:
            step = stride(self.stem.layers)
            if any(side % step for side in pair("patch_size", self.patch_size)):
                right = f"must be a multiple of {step}, the stride of stem.layers={self.stem.layers}"
                raise OptionError("patch_size", self.patch_size, right)
        if self.width % self.heads:
            raise OptionError("heads", self.heads, f"must divide width={self.width}")
        if self.mlp == "swiglu" and self.gelu != "exact":
            raise OptionError("gelu", self.gelu, "must be exact for mlp=swiglu, which has no GELU")
        return self

    @model_validator(mode="after")
    def _check_tokens(self) -> Self:
        if self.distillation_token and not self.class_token:
            raise OptionError("distillation_token", True, "needs class_token=true, after which it stands")
        if self.pooling == "class_token" and not self.class_token:
            raise OptionError("pooling", self.pooling, "needs class_token=true; without one, pool by patch_mean")
        return self

    @model_validator(mode="after")
    def _check_positions(self) -> Self:
        if self.positions in ("learned_2d", "sine_cosine_2d") and self.width % 4:
            raise OptionError("width", self.width, f"must be a multiple of 4 for positions={self.positions}")
        if self.positions == "rotary" and self.width // self.heads % 4:
            raise OptionError(
                "heads", self.heads, f"must make {self.width} // heads a multiple of 4 for rotary positions"
            )
        if self.positions in ("relative", "rotary", "none") and self.positions_at != "stem":
            right = f"must be stem for positions={self.positions}, which adds nothing"
            raise OptionError("positions_at", self.positions_at, right)
        return self

    @property
    def grid(self) -> tuple[int, int]:
        """Patches in a column and in a row of an image: (rows, columns)."""
        return grid(self.image_size, self.patch_size)

    @property
    def poolings(self) -> tuple[str, ...]:
        """What a layer's features can be."""
        return TOKENS if self.class_token else ("patch_mean",)


class Timm(Normalized):
    """A model of timm without its classifier, as an encoder of one layer, to compare with."""

    model: str
    """Its name in timm."""
    image_size: Size
    """Pixels of an image's side, or [height, width]."""
    arguments: Annotated[Mapping[str, Any], Expect("{name: value}, arguments of timm's model")] = {}
    """Further keyword arguments of the model, such as {drop_path_rate: 0.1}."""

    patch_size: ClassVar[tuple[int, int]] = (1, 1)  # the model itself refuses an image size
    depth: ClassVar[int] = 1
    pooling: ClassVar[str] = "pooled"
    poolings: ClassVar[tuple[str, ...]] = ("pooled",)

    @model_validator(mode="after")
    def _check_model(self) -> Self:
        known = timm_models()
        if (name := self.model.partition(".")[0]) not in known:
            close = ", ".join(difflib.get_close_matches(name, known, n=3)) or "none: see timm.list_models()"
            raise OptionError("model", self.model, f"is no model of timm; names near it: {close}")
        for taken in ("num_classes", "in_chans", "img_size", "pretrained"):
            if taken in self.arguments:
                raise OptionError(f"arguments.{taken}", self.arguments[taken], "is set by other options")
        return self


@cache
def timm_models() -> frozenset[str]:
    """The names of timm's models, from its source, since importing it loads torch. UserError if it is not installed."""
    found = find_spec("timm")
    if found is None or found.origin is None:
        raise UserError("encoder=timm needs timm: pip install 'ssvit[timm]'")
    texts = (file.read_text() for file in Path(found.origin).parent.glob("models/*.py"))
    return frozenset(name for text in texts for name in re.findall(r"^@register_model\ndef (\w+)\(", text, re.M))


def kind(arguments: Mapping[str, object]) -> type[ViT] | type[Timm]:
    """What an encoder with these arguments is."""
    return Timm if "model" in arguments else ViT


def vit(arguments: Mapping[str, object]) -> ViT:
    """The options of an encoder that must be a ViT. UserError if it is a model of timm."""
    if kind(arguments) is Timm:
        raise UserError(f"the encoder is timm's {arguments['model']}, and this command needs a ViT of ssvit")
    return make(ViT, arguments)


class Decoder(Options):
    """The light Transformer of a masked autoencoder (He et al. 2022, section 3 and Table 1)."""

    depth: Count
    """Layers."""
    width: Count
    """Width of a token's embedding; a multiple of 4, since positions are sines and cosines of rows and columns."""
    heads: Count
    """Heads of attention."""

    @model_validator(mode="after")
    def _check_width(self) -> Self:
        if self.width % 4:
            raise OptionError("width", self.width, "must be a multiple of 4, for sines and cosines of rows and columns")
        if self.width % self.heads:
            raise OptionError("heads", self.heads, f"must divide width={self.width}")
        return self
