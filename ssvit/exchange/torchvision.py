"""torchvision's VisionTransformer."""

from ssvit.exchange.layout import IMAGENET, Layout, Place, both

_LAYER = "encoder.layers.encoder_layer_{i}"

TORCHVISION = Layout(
    peer="torchvision",
    signature="conv_proj.weight",
    table=(
        *both("patch", "conv_proj", weight="d c p q -> d (c p q)"),
        Place("class_token", ("class_token",)),
        Place("positions.0.embedding", ("encoder.pos_embedding",), "1 t d -> t d"),
        *both("blocks.{i}.norm1", f"{_LAYER}.ln_1"),
        *both("blocks.{i}.attention.qkv", f"{_LAYER}.self_attention.in_proj", names=("_weight", "_bias")),
        *both("blocks.{i}.attention.out", f"{_LAYER}.self_attention.out_proj"),
        *both("blocks.{i}.norm2", f"{_LAYER}.ln_2"),
        *both("blocks.{i}.expand", f"{_LAYER}.mlp.0", weight="m d -> m d"),
        *both("blocks.{i}.contract", f"{_LAYER}.mlp.3"),
        *both("norm", "encoder.ln"),
    ),
    left=r"heads\.",
    normalisation=IMAGENET,
    aliases=((r"\.mlp\.linear_1\.", ".mlp.0."), (r"\.mlp\.linear_2\.", ".mlp.3.")),
)
