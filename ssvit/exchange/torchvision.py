"""Map the tensor names of torchvision's VisionTransformer."""

from ssvit.exchange.layout import IMAGENET, Layout, table

TORCHVISION = Layout(
    peer="torchvision",
    signature="conv_proj.weight",
    table=table(
        "encoder.layers.encoder_layer_{i}.",
        ("patch", "conv_proj"), ("class_token", "class_token"), ("positions.0.embedding", "encoder.pos_embedding"),
        ("norm1", "ln_1"), ("attention.qkv.weight", "self_attention.in_proj_weight"),
        ("attention.qkv.bias", "self_attention.in_proj_bias"), ("attention.out", "self_attention.out_proj"),
        ("norm2", "ln_2"), ("expand", "mlp.0"), ("contract", "mlp.3"), ("norm", "encoder.ln"),
    ),
    left=r"heads\.",
    normalisation=IMAGENET,
    aliases=((r"\.mlp\.linear_1\.", ".mlp.0."), (r"\.mlp\.linear_2\.", ".mlp.3.")),
)  # fmt: skip
