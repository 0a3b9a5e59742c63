"""Define the options of a Vision Transformer, the stem of a hybrid, a decoder, and low-rank adaptation."""

from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal, get_args

from annotated_types import Ge, Le
from pydantic import Field

from ssvit.config.declaration import Count, Expect, Options, Positive, Size, Whole
from ssvit.errors import OptionError, pair
from ssvit.models.encoder_options import TOKENS, Normalized, grid

Resize = Literal["paper", "timm"]
RESIZE = get_args(Resize)  # ways to resample learned positions to another image size
AdaptChannels = Literal["mean", "repeat"]
ADAPT_CHANNELS = get_args(AdaptChannels)  # ways to convert a patch projection to another number of channels
Positions = Literal["learned_1d", "learned_2d", "sine_cosine_1d", "sine_cosine_2d", "relative", "rotary", "none"]
Rate = Annotated[float, Ge(0), Le(0.99)]  # a dropout rate
# Options that may differ between two encoders when weights are transferred between them.
CHANGEABLE = (
    "image_size", "pooling", "dropout", "attention_dropout", "stochastic_depth", "activation_checkpointing",
)  # fmt: skip
GROUPS = 32  # number of groups in the group norms of a hybrid's stem


def stride(layers: Sequence[int]) -> int:
    """Return the stride of a hybrid's stem with these stages: 4 after the first, doubled by each further stage."""
    return 2 ** (1 + max(len(layers), 1))


class Stem(Options):
    """Define the options of the ResNet stem of a hybrid (section 3.1)."""

    layers: Annotated[Sequence[Count], Expect("a list, the units of each stage, as [3, 4, 9]")]
    """Number of units of each stage: [3, 4, 6, 3] for a ResNet-50, [] for the root alone."""
    width: Annotated[int, Ge(1), Field(multiple_of=GROUPS), Expect(f"a multiple of {GROUPS}, the groups of channels")]
    """Channels of the root; each stage doubles them."""
    epsilons: Literal["authors", "timm"] = "authors"
    """authors: the epsilons of the authors' code; timm: the epsilons of timm, required for weights of its hybrids."""


class ViT(Normalized):
    """Define the options of a Vision Transformer without a head."""

    has_patches: ClassVar[bool] = True

    patch_size: Size = 16
    """Pixels of a patch's side, or [height, width]; must divide the image. In a hybrid, the image area per token."""
    width: Count
    """Width of the token embeddings."""
    depth: Count
    """Number of layers."""
    heads: Count
    """Number of attention heads."""
    mlp: Literal["gelu", "swiglu"] = "gelu"
    """gelu: two linear layers with a GELU between them (the paper); swiglu (Shazeer 2020): the hidden layer is
    multiplied by a SiLU-activated third linear layer, as in DINOv2's giant and some DINOv3 models."""
    mlp_width: Count | None = None
    """Width of the MLP's hidden layer; None: 4 * width, or with swiglu two thirds of that, rounded up to a multiple of
    8 (facebookresearch/dinov2: swiglu_ffn.py)."""
    class_token: bool = True
    """Whether a class token precedes the patches."""
    class_tokens: Count = 1
    """Number of class tokens; the mean of their outputs is the output of the class token (Pixio: Yang et al. 2025)."""
    pooling: Literal["patch_mean", "class_token"] = "class_token"
    """Feature vector of an image: class_token, the output of the class token (the paper), or patch_mean, the mean of
    the patch outputs."""
    positions: Positions = "learned_1d"
    """Position embeddings: learned_1d (the paper), learned_2d, relative, none (Table 8), sine_cosine_1d (Vaswani et al.
    2017), sine_cosine_2d (MoCo v3), or rotary (DINOv3)."""
    attention: Literal["full", "axial", "window"] = "full"
    """Tokens to which a patch attends: full, all; axial, its row in odd layers and its column in even layers
    (Appendix D.6); window, a square of patches, shifted by half of its side in even layers. Prefix tokens attend to all
    tokens and all patches attend to them. The paper's axial models have two layers for each layer of the ViT."""
    window: Count = 4
    """Side of a square in patches with attention=window."""
    positions_at: Literal["stem", "every_layer", "every_layer_shared"] = "stem"
    """Where positions are added: stem (the paper), every_layer, every_layer_shared (Table 8)."""
    dropout: Rate = 0.0
    """Dropout rate of the first layer's input, of the outputs of attention and MLP, and of the MLP's hidden layer, as
    in the authors' code (vit_jax: models_vit.py)."""
    attention_dropout: Rate = 0.0
    """Dropout rate of the attention weights; always 0 in the authors' code (vit_jax: configs/models.py)."""
    stochastic_depth: Rate = 0.0
    """Drop rate of the last layer's residual branches in training (Huang et al. 2016); the rate grows linearly from 0
    at the first layer."""
    distillation_token: bool = False
    """Whether there is a second prefix token, trained on a teacher's predictions (Touvron et al. 2021)."""
    activation_checkpointing: bool = False
    """Whether training stores only the activations between the layers and recomputes each layer in the backward pass:
    about a third more computation for a fraction of the memory."""
    stem: Stem | None = None
    """ResNet stem of a hybrid; None: the patches are cut from pixels."""
    gelu: Literal["exact", "tanh"] = "exact"
    """GELU of the MLP: exact, x * Phi(x); or tanh, an approximation, as in the authors' code (Hendrycks and Gimpel
    2016)."""
    layer_scale: Positive | None = None
    """Initial value of the per-channel learned scale of each residual branch (LayerScale, Touvron et al. 2021: CaiT);
    None: no LayerScale; 1e-5 in DINOv2 (facebookresearch/dinov2: ssl_default_config.yaml)."""
    registers: Whole = 0
    """Number of register tokens before the patches, which have no positions and whose outputs are not used; large
    encoders store global information in them (Darcet et al. 2024)."""
    norm_epsilon: Positive = 1e-6
    """Epsilon of the layer norms, added to the variance; 1e-5 in DINOv3."""

    def check_consistency(self) -> None:
        """Check that the options can be combined."""
        super().check_consistency()
        _ = self.grid
        if self.stem is not None:
            step = stride(self.stem.layers)
            if any(side % step for side in pair("patch_size", self.patch_size)):
                expected = f"must be a multiple of {step}, the stride of stem.layers={self.stem.layers}"
                raise OptionError("patch_size", self.patch_size, expected)
        if self.width % self.heads:
            raise OptionError("heads", self.heads, f"must divide width={self.width}")
        if self.mlp == "swiglu" and self.gelu != "exact":
            raise OptionError("gelu", self.gelu, "must be exact for mlp=swiglu, which has no GELU")
        if self.distillation_token and not self.class_token:
            raise OptionError("distillation_token", True, "requires class_token=true")
        if self.class_tokens > 1 and (self.distillation_token or not self.class_token):
            expected = "must be 1 without class_token=true or with distillation_token=true"
            raise OptionError("class_tokens", self.class_tokens, expected)
        if self.pooling == "class_token" and not self.class_token:
            raise OptionError("pooling", self.pooling, "requires class_token=true; pooling=patch_mean does not")
        multiple = {"learned_2d": 2, "sine_cosine_1d": 2, "sine_cosine_2d": 4}.get(self.positions, 1)
        if self.width % multiple:
            raise OptionError("width", self.width, f"must be a multiple of {multiple} for positions={self.positions}")
        if self.attention != "full" and self.positions == "relative":
            raise OptionError("attention", self.attention, "must be full for positions=relative")
        if self.positions == "rotary" and self.width // self.heads % 4:
            raise OptionError(
                "heads", self.heads, f"must make {self.width} // heads a multiple of 4 for rotary positions"
            )
        if self.positions in ("relative", "rotary", "none") and self.positions_at != "stem":
            expected = f"must be stem for positions={self.positions}, which adds no embeddings"
            raise OptionError("positions_at", self.positions_at, expected)

    @property
    def grid(self) -> tuple[int, int]:
        """Return the rows and columns of the patch grid of an image."""
        return grid(self.image_size, self.patch_size)

    @property
    def omits_patches(self) -> bool:
        """Return whether some patches of an image can be encoded without the others."""
        return self.stem is None and self.attention == "full"

    @property
    def poolings(self) -> tuple[str, ...]:
        """Return the ways in which the tokens of a layer can be pooled."""
        return TOKENS if self.class_token else ("patch_mean",)


class Decoder(Options):
    """Define the light Transformer decoder of a masked autoencoder (He et al. 2022, section 3 and Table 1)."""

    depth: Count
    """Number of layers."""
    width: Count
    """Width of the token embeddings; a multiple of 4, since positions are sines and cosines of rows and columns."""
    heads: Count
    """Number of attention heads."""

    def check_consistency(self) -> None:
        """Check that the options can be combined."""
        if self.width % 4:
            raise OptionError("width", self.width, "must be a multiple of 4, for sines and cosines of rows and columns")
        if self.width % self.heads:
            raise OptionError("heads", self.heads, f"must divide width={self.width}")


class Lora(Options):
    """Define low-rank updates of the frozen attention matrices (Hu et al. 2021): W + alpha / rank * B A."""

    rank: Count
    """Rank of the updates: columns of B and rows of A; 4 to 16 are common."""
    alpha: Positive
    """Scale of the update, which is multiplied by alpha / rank; often the rank, or twice the rank."""
    matrices: Literal["attention", "query_value"] = "attention"
    """attention: the packed matrix of queries, keys and values, and the output matrix. query_value: the matrices of
    queries and of values, each with an update of its own (ExPLoRA, Khanna et al. 2024)."""
