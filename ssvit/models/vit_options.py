"""The options of a Vision Transformer, and of the stem of a hybrid."""

from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal, get_args

from annotated_types import Ge, Le
from pydantic import Field

from ssvit.config.declaration import Count, Expect, Options, Positive, Size, Whole
from ssvit.models.encoder_options import TOKENS, Normalized, grid
from ssvit.options import OptionError, pair

Resize = Literal["paper", "timm"]
RESIZE = get_args(Resize)  # ways to resample learned positions for images of another size
Positions = Literal["learned_1d", "learned_2d", "sine_cosine_2d", "relative", "rotary", "none"]
POSITIONS = get_args(Positions)
Rate = Annotated[float, Ge(0), Le(0.99)]  # the probability of dropout
# Options of an encoder that do not change which weights it has.
CHANGEABLE = (
    "image_size", "pooling", "dropout", "attention_dropout", "stochastic_depth", "activation_checkpointing",
)  # fmt: skip
Epsilons = Literal["authors", "timm"]
EPSILONS = get_args(Epsilons)  # whose epsilons a hybrid's stem has
GROUPS = 32  # of channels that a hybrid's stem normalises


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


class ViT(Normalized):
    """A Vision Transformer without a head."""

    has_patches: ClassVar[bool] = True

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
    SiLU give factors of the hidden layer, as in DINOv2's giant and some models of DINOv3."""
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
    gradients: a third more computation, for a fraction of the memory."""
    stem: Stem | None = None
    """The ResNet of a hybrid; None: patches of pixels."""
    gelu: Literal["exact", "tanh"] = "exact"
    """The MLP's GELU: exact, x * Phi(x); or tanh, its approximation, which the authors' code has
    (Hendrycks and Gimpel 2016) and for which there is no fused kernel on CPUs."""
    layer_scale: Positive | None = None
    """Initial value of learned factors of the outputs of attention and MLP (LayerScale, Touvron et al. 2021: CaiT);
    None: no factors; 1e-5 in DINOv2 (facebookresearch/dinov2: ssl_default_config.yaml)."""
    registers: Whole = 0
    """Number of additional tokens before the patches, without a position, whose outputs are not used; large
    encoders store global information in them (Darcet et al. 2024)."""
    norm_epsilon: Positive = 1e-6
    """Added to the variance in layer norms; 1e-5 in DINOv3."""

    def check_consistency(self) -> None:
        """Check the options against each other."""
        super().check_consistency()
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
        if self.distillation_token and not self.class_token:
            raise OptionError("distillation_token", True, "needs class_token=true, after which it stands")
        if self.pooling == "class_token" and not self.class_token:
            raise OptionError("pooling", self.pooling, "needs class_token=true; without one, pool by patch_mean")
        if self.positions in ("learned_2d", "sine_cosine_2d") and self.width % 4:
            raise OptionError("width", self.width, f"must be a multiple of 4 for positions={self.positions}")
        if self.positions == "rotary" and self.width // self.heads % 4:
            raise OptionError(
                "heads", self.heads, f"must make {self.width} // heads a multiple of 4 for rotary positions"
            )
        if self.positions in ("relative", "rotary", "none") and self.positions_at != "stem":
            right = f"must be stem for positions={self.positions}, which adds nothing"
            raise OptionError("positions_at", self.positions_at, right)

    @property
    def grid(self) -> tuple[int, int]:
        """Patches in a column and in a row of an image: (rows, columns)."""
        return grid(self.image_size, self.patch_size)

    @property
    def poolings(self) -> tuple[str, ...]:
        """What a layer's features can be."""
        return TOKENS if self.class_token else ("patch_mean",)
