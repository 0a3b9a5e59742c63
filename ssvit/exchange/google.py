"""Map the tensor names of the authors' checkpoints, .npz files of JAX arrays with inputs first.

The layout covers google-research/vision_transformer and google-research/big_vision, whose plain ViTs use other names.
Their GELU is JAX's default, the tanh approximation.
"""

from ssvit.exchange.layout import HALF, Layout, Place, both, stem

_LAYER = "Transformer/encoderblock_{i}"
_ATTENTION = f"{_LAYER}/MultiHeadDotProductAttention_1"
_LINEAR, _NORM = ("/kernel", "/bias"), ("/scale", "/bias")

GOOGLE = Layout(
    peer="Google",
    signature="embedding/kernel",
    table=(
        *stem(
            root=("conv_root", "gn_root"), unit="block{S}/unit{U}/", shortcut=("conv_proj", "gn_proj"), norm="gn{n}",
            names=("/kernel", "/scale", "/bias"), kernel="y x f g -> g f y x", root_kernel="y x r w -> w r y x",
            scale="... -> (...)",
        ),
        *both("patch", "embedding", weight="p q c d -> d (c p q)", names=_LINEAR),
        Place("class_token", ("cls",)),
        Place("positions.0.embedding", ("Transformer/posembed_input/pos_embedding",), "1 t d -> t d"),
        *both("blocks.{i}.norm1", f"{_LAYER}/LayerNorm_0", names=_NORM),
        *both(
            "blocks.{i}.attention.qkv", *(f"{_ATTENTION}/{part}" for part in ("query", "key", "value")),
            weight="three d h k -> (three h k) d", bias="three h k -> (three h k)", names=_LINEAR,
        ),
        *both("blocks.{i}.attention.out", f"{_ATTENTION}/out", weight="h k d -> d (h k)", names=_LINEAR),
        *both("blocks.{i}.norm2", f"{_LAYER}/LayerNorm_2", names=_NORM),
        *both("blocks.{i}.expand", f"{_LAYER}/MlpBlock_3/Dense_0", weight="d m -> m d", names=_LINEAR),
        *both("blocks.{i}.contract", f"{_LAYER}/MlpBlock_3/Dense_1", weight="m d -> d m", names=_LINEAR),
        *both("norm", "Transformer/encoder_norm", names=_NORM),
    ),
    left=r"head/|pre_logits/|MAPHead_0/",
    normalisation=HALF,
    aliases=(
        # Since flax.linen, the parts of a layer are numbered by kind; before, they were numbered consecutively.
        (r"(/encoderblock_\d+)/MultiHeadDotProductAttention_0/", r"\1/MultiHeadDotProductAttention_1/"),
        (r"(/encoderblock_\d+)/LayerNorm_1/", r"\1/LayerNorm_2/"),
        (r"(/encoderblock_\d+)/MlpBlock_0/", r"\1/MlpBlock_3/"),
        # Names in big_vision, today and before 2022.
        (r"^(Transformer/)?pos_embedding$", "Transformer/posembed_input/pos_embedding"),
    ),
    gelu="tanh",
    beyond={
        "pre_logits": "a linear layer and tanh on the class token, or on the patches' mean where there is none",
        "MAPHead_0": "attention pooling of the patches",
    },
)  # fmt: skip
