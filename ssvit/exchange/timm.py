"""Map the tensor names of timm's VisionTransformer, which the published DeiT, MAE and DINOv2 encoders use too."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ssvit.exchange.layout import HALF, IMAGENET, Layout, both, described, per_channel, stem, table
from ssvit.options import UserError

if TYPE_CHECKING:
    from ssvit.models.vit import ViT

# timm models with a stem, by the number of units in its stages.
_HYBRIDS = {
    (): "vit_tiny_r_s16_p8_224",
    (2, 2, 2, 2): "vit_small_r26_s32_224",
    (3, 4, 9): "vit_base_r50_s16_224",
    (3, 4, 6, 3): "vit_large_r50_s32_224",
}
_BACKBONE = "patch_embed.backbone"
_TABLE = (
    *stem(
        root=(f"{_BACKBONE}.stem.conv", f"{_BACKBONE}.stem.norm"),
        unit=f"{_BACKBONE}.stages.{{s}}.blocks.{{u}}.",
        shortcut=("downsample.conv", "downsample.norm"),
        norm="norm{n}",
    ),
    *table(
        "blocks.{i}.",
        ("patch", "patch_embed.proj"), ("class_token", "cls_token"), ("distillation_token", "dist_token"),
        ("register_tokens", "reg_token"), ("positions.0.embedding", "pos_embed"), ("norm1", "norm1"),
        ("attention.qkv", "attn.qkv"), ("attention.out", "attn.proj"), ("scale1.gamma", "ls1.gamma"),
        ("norm2", "norm2"), ("expand", "mlp.fc1"), ("contract", "mlp.fc2"), ("scale2.gamma", "ls2.gamma"),
        ("norm", "norm"),
    ),
)  # fmt: skip
_POOLINGS = {"token": "class_token", "avg": "patch_mean"}  # keys: timm's names
_ACTIVATIONS = {"gelu": "exact", "gelu_tanh": "tanh"}  # keys: timm's names


def beside(folder: Path) -> dict[str, Any]:
    """Return the options in timm's config.json.

    Raises:
        UserError: The model is not a plain ViT.
    """
    config = described(folder / "config.json")
    arguments, trained = config.get("model_args") or {}, config.get("pretrained_cfg") or {}
    if (activation := arguments.get("act_layer") or "gelu") not in _ACTIVATIONS:
        raise UserError(f"{folder / 'config.json'}: act_layer {activation!r:.100} is no GELU")
    return {
        "heads": arguments.get("num_heads"),
        "trained_size": arguments.get("img_size") or (trained.get("input_size") or (None,))[1:] or None,
        "mean": trained.get("mean"),
        "std": trained.get("std"),
        "gelu": _ACTIVATIONS[activation] if "act_layer" in arguments else None,
        "pooling": _POOLINGS.get(str(arguments.get("global_pool"))),
    }


def lacks(arguments: Mapping[str, Any], classifier: Mapping[str, Any] | None) -> str | None:
    """Return a property of an encoder and its head that no timm model supports, or None.

    Args:
        arguments: Options of the encoder.
        classifier: Options of the head; None without one.
    """
    stem, distilled = arguments.get("stem"), arguments.get("distillation_token", False)
    if stem is not None and (tuple(stem["layers"]) not in _HYBRIDS or stem["width"] != 64):
        return f"a stem of layers {list(stem['layers'])} and width {stem['width']}"
    if distilled and (stem is not None or arguments["pooling"] != "class_token"):
        return "a distillation token without pooling=class_token, or in a hybrid"
    if distilled and arguments.get("registers"):
        return "a distillation token and registers"
    if arguments["mlp"] != "gelu" and (stem is not None or distilled):
        return f"mlp={arguments['mlp']} in a hybrid or beside a distillation token"
    if arguments["norm_epsilon"] != 1e-6:
        return f"norm_epsilon={arguments['norm_epsilon']:g}"
    if classifier is not None and classifier["hidden"] is not None:
        return "a head with a hidden layer"
    return None


def ratio(hidden: int, width: int) -> float:
    """Return a ratio by which timm computes this hidden width of an MLP; timm rounds the product down."""
    return next(ratio for ratio in (hidden / width, (hidden + 0.5) / width) if int(width * ratio) == hidden)


def config(encoder: "ViT", classes: Sequence[str], resized: Mapping[str, object]) -> dict[str, Any]:
    """Return the config.json that timm.create_model reads from a folder.

    Args:
        encoder: The encoder.
        classes: Class names, empty without a head.
        resized: Options from `Preprocessing.timm`.
    """
    name, first = "vit_base_patch16_224", "patch_embed.proj"
    if encoder.stem is not None:
        name, first = _HYBRIDS[tuple(encoder.arguments["stem"]["layers"])], f"{_BACKBONE}.stem.conv"
    distilled = encoder.distillation_token is not None
    if distilled:
        name = "deit_base_distilled_patch16_224"
    gated, scale = encoder.arguments["mlp"] == "swiglu", encoder.arguments["layer_scale"]
    if gated:
        name = "vit_giant_patch14_dinov2"
    width = encoder.width
    pooled = {"global_pool": "token"} if encoder.pooling == "class_token" else {"global_pool": "avg", "fc_norm": False}
    return {
        "architecture": name,
        "num_classes": len(classes),
        "num_features": width,
        "model_args": {
            "img_size": list(encoder.image_size),
            "patch_size": list(encoder.cut),
            "in_chans": encoder.channels,
            "embed_dim": width,
            "depth": len(encoder.blocks),
            "num_heads": encoder.arguments["heads"],
            "mlp_ratio": ratio(encoder.blocks[0].expand.out_features, width),  # with SwiGLU, of both halves
            **({} if encoder.arguments["gelu"] == "exact" else {"act_layer": "gelu_tanh"}),
            **({} if scale is None and not gated else {"init_values": scale}),
            **({} if encoder.register_tokens is None else {"reg_tokens": encoder.arguments["registers"]}),
            **({} if distilled else {"class_token": encoder.class_token is not None}),
            **pooled,
        },
        "pretrained_cfg": {
            "input_size": [encoder.channels, *encoder.image_size],
            "fixed_input_size": True,
            "interpolation": "bilinear",
            **resized,
            "mean": per_channel(encoder.arguments["mean"], encoder.channels),
            "std": per_channel(encoder.arguments["std"], encoder.channels),
            "num_classes": len(classes),
            "first_conv": first,
            "classifier": ["head", "head_dist"] if distilled else "head",
            **({"label_names": list(classes)} if classes else {}),
        },
    }


TIMM = Layout(
    peer="timm",
    signature="patch_embed.proj.weight",
    table=_TABLE,
    head=(*both("head", "head"), *both("distilled_head", "head_dist")),
    left=r"head\.|head_dist\.|pre_logits\.",
    beyond={"pre_logits": "a linear layer and tanh on the class token"},
    normalisation=HALF,
    aliases=((rf"^{_BACKBONE}\.(conv|norm)\.", rf"{_BACKBONE}.stem.\1."),),
    epsilons="timm",
    places_registers=True,
    bare=(rf"^{_BACKBONE}\.stem\.", f"{_BACKBONE}."),
    beside=beside,
)

# Files of Facebook nest their weights under "model", files of timm do not.
FACEBOOK = Layout(
    peer="MAE, DeiT or DINOv2",
    signature="patch_embed.proj.weight",
    table=_TABLE,
    left=r"head\.|head_dist\.|mask_token$|decoder_",
    normalisation=IMAGENET,
    aliases=(
        (r"^register_tokens$", "reg_token"),
        (r"\.mlp\.w12\.", ".mlp.fc1."),  # packed SwiGLU
        (r"\.mlp\.w3\.", ".mlp.fc2."),
    ),
    epsilons="timm",
    marks=("model.patch_embed.proj.weight", "mask_token", "decoder_embed.weight"),
)
