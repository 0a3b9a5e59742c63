"""Describe an encoder or a classifier as a model of timm, which transformers opens too (TimmWrapperModel)."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ssvit.exchange.tensor_mapping import per_channel
from ssvit.models.timm_options import Timm as TimmOptions
from ssvit.models.vit_options import ViT

if TYPE_CHECKING:
    from ssvit.models import timm, vit


def unsupported(encoder: ViT | TimmOptions, classifier: Mapping[str, object] | None) -> str | None:
    """Return a property of an encoder and its head that no timm model supports, or None.

    Args:
        encoder: Options of the encoder.
        classifier: Options of the head; None without one.
    """
    if classifier is not None and classifier["hidden"] is not None:
        return "a head with a hidden layer"
    if isinstance(encoder, TimmOptions):
        return None
    distilled, of_token = encoder.distillation_token, encoder.pooling == "class_token"
    reasons = {
        f"attention={encoder.attention}": encoder.attention != "full",
        f"positions={encoder.positions}": encoder.positions in ("relative", "rotary"),
        f"positions_at={encoder.positions_at}": encoder.positions_at != "stem",
        "a hybrid's stem": encoder.stem is not None,
        "a distillation token without pooling=class_token": distilled and not of_token,
        "a distillation token and registers or mlp=swiglu": distilled and (encoder.registers or encoder.mlp != "gelu"),
        f"the mean of {encoder.class_tokens} class tokens": encoder.class_tokens > 1 and of_token,
        f"norm_epsilon={encoder.norm_epsilon:g}": encoder.norm_epsilon != 1e-6,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def config(
    encoder: "timm.Timm | vit.ViT", classes: Sequence[str], preprocessing: Mapping[str, object]
) -> dict[str, Any]:
    """Return the config.json that timm.create_model reads from a folder.

    Args:
        encoder: The encoder.
        classes: Class names, empty without a head.
        preprocessing: Result of `ssvit.exchange.preprocessing.timm`.
    """
    from ssvit.models.timm import Timm

    if isinstance(encoder, Timm):
        name, arguments, parts = encoder.options.model, encoder.model_arguments, encoder.model.pretrained_cfg
    else:
        name, arguments, parts = _vit(encoder)
    return {
        "architecture": name.partition(".")[0],
        "num_classes": len(classes),
        "num_features": encoder.width,
        **({"label_names": list(classes)} if classes else {}),
        "model_args": arguments,
        "pretrained_cfg": {
            "input_size": [encoder.channels, *encoder.image_size],
            "fixed_input_size": "img_size" in arguments,
            "interpolation": "bilinear",
            **preprocessing,
            "mean": per_channel(encoder.arguments["mean"], encoder.channels),
            "std": per_channel(encoder.arguments["std"], encoder.channels),
            "num_classes": len(classes),
            "first_conv": parts["first_conv"],
            "classifier": parts["classifier"],
        },
    }


def _vit(encoder: "vit.ViT") -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Return timm's name of a ViT, its arguments, and the names of its first convolution and its classifier."""
    name, options = "vit_base_patch16_224", encoder.arguments
    distilled, gated = options["distillation_token"], options["mlp"] == "swiglu"
    registers = options["registers"] + options["class_tokens"] - 1
    if distilled:
        name = "deit_base_distilled_patch16_224"
    if gated:
        name = "vit_giant_patch14_dinov2"
    width, hidden = encoder.width, encoder.blocks[0].expand.out_features  # with SwiGLU, of both halves
    # timm rounds the product of width and ratio down.
    ratio = next(ratio for ratio in (hidden / width, (hidden + 0.5) / width) if int(width * ratio) == hidden)
    pooling = {"global_pool": "token"} if encoder.pooling == "class_token" else {"global_pool": "avg", "fc_norm": False}
    arguments = {
        "img_size": list(encoder.image_size),
        "patch_size": list(encoder.patch_size),
        "in_chans": encoder.channels,
        "embed_dim": width,
        "depth": len(encoder.blocks),
        "num_heads": options["heads"],
        "mlp_ratio": ratio,
        **({} if options["gelu"] == "exact" else {"act_layer": "gelu_tanh"}),
        **({} if options["layer_scale"] is None and not gated else {"init_values": options["layer_scale"]}),
        **({"reg_tokens": registers, "no_embed_class": True} if registers else {}),
        **({} if distilled else {"class_token": options["class_token"]}),
        **pooling,
    }
    classifier = ["head", "head_dist"] if distilled else "head"
    return name, arguments, {"first_conv": "patch_embed.proj", "classifier": classifier}
