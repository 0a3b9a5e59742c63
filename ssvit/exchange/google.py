"""The authors' own checkpoints (google-research/vision_transformer): .npz files of JAX's arrays, inputs first.

Their GELU is JAX's approximation by tanh, ours the exact one, as timm's; trained weights do not mind.
"""

from ssvit.exchange.layout import HALF, Layout, Place, both, stem

_LAYER = "Transformer/encoderblock_{i}"
_ATTENTION = f"{_LAYER}/MultiHeadDotProductAttention_1"
_LINEAR, _NORM = {"names": ("/kernel", "/bias")}, {"names": ("/scale", "/bias")}

GOOGLE = Layout(
    peer="Google",
    signature="embedding/kernel",
    table=(
        *stem(
            root=("conv_root", "gn_root"), unit="block{S}/unit{U}/", shortcut=("conv_proj", "gn_proj"), norm="gn{n}",
            names=("/kernel", "/scale", "/bias"), kernel="y x f g -> g f y x", root_kernel="y x r w -> w r y x",
            scale="... -> (...)",
        ),
        *both("patch", "embedding", weight="p q c d -> d (c p q)", **_LINEAR),
        Place("class_token", ("cls",)),
        Place("positions.0.embedding", ("Transformer/posembed_input/pos_embedding",), "1 t d -> t d"),
        *both("blocks.{i}.norm1", f"{_LAYER}/LayerNorm_0", **_NORM),
        *both(
            "blocks.{i}.attention.qkv", *(f"{_ATTENTION}/{part}" for part in ("query", "key", "value")),
            weight="three d h k -> (three h k) d", bias="three h k -> (three h k)", **_LINEAR,
        ),
        *both("blocks.{i}.attention.out", f"{_ATTENTION}/out", weight="h k d -> d (h k)", **_LINEAR),
        *both("blocks.{i}.norm2", f"{_LAYER}/LayerNorm_2", **_NORM),
        *both("blocks.{i}.expand", f"{_LAYER}/MlpBlock_3/Dense_0", weight="d m -> m d", **_LINEAR),
        *both("blocks.{i}.contract", f"{_LAYER}/MlpBlock_3/Dense_1", weight="m d -> d m", **_LINEAR),
        *both("norm", "Transformer/encoder_norm", **_NORM),
    ),
    left=r"head/|pre_logits/",
    normalisation=HALF,
)  # fmt: skip
