"""Map the tensor names of DINOv3's Vision Transformers in facebookresearch, timm (Eva) and Hugging Face transformers.

Their positions are rotary, and their keys have no bias, unlike those of ssvit. Only Facebook's files contain the
periods, rounded to bfloat16.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ssvit.exchange import huggingface, timm
from ssvit.exchange.layout import IMAGENET, Layout, Place, both, described, table
from ssvit.options import UserError

if TYPE_CHECKING:
    from ssvit.models.vit import ViT

_BASE = 100  # base of the periods
_QKV = tuple(f"attention.{part}_proj" for part in "qkv")

_TIMM = Layout(
    peer="timm's DINOv3",
    signature="reg_token",
    marks=("blocks.0.gamma_1",),
    table=table(
        "blocks.{i}.",
        ("patch", "patch_embed.proj"), ("class_token", "cls_token"), ("register_tokens", "reg_token"),
        ("norm1", "norm1"), ("attention.qkv.weight", "attn.qkv.weight"),
        ("attention.qkv.bias", ("attn.q_bias", "", "attn.v_bias")), ("attention.qkv.bias", "attn.qkv.bias"),
        ("attention.out", "attn.proj"), ("scale1.gamma", "gamma_1"), ("norm2", "norm2"),
        ("expand", ("mlp.fc1_g", "mlp.fc1_x")), ("expand", "mlp.fc1"), ("contract", "mlp.fc2"),
        ("scale2.gamma", "gamma_2"), ("norm", "norm"),
    ),
    head=both("head", "head"),
    left=r"head\.",
    normalisation=IMAGENET,
    norm_epsilon=1e-5,
    heads={1280: 20, 4096: 32},  # H+ and 7B
    rotary=True,
    beside=timm.beside,
)  # fmt: skip

_FACEBOOK = replace(
    _TIMM,
    peer="DINOv3",
    signature="storage_tokens",
    marks=(),
    table=(*_TIMM.table, Place("rotary.periods", ("rope_embed.periods",), "periods -> periods")),
    masks_keys=True,
    left=r"mask_token$|local_cls_norm\.|blocks\.\d+\.attn\.qkv\.bias_mask$",
    aliases=(
        (r"^storage_tokens$", "reg_token"),
        (r"\.ls([12])\.gamma$", r".gamma_\1"),
        (r"\.mlp\.w1\.", ".mlp.fc1_g."),
        (r"\.mlp\.w2\.", ".mlp.fc1_x."),
        (r"\.mlp\.w3\.", ".mlp.fc2."),
    ),
    beside=lambda folder: {},
)


def _beside(folder: Path) -> dict[str, Any]:
    """Return the options in config.json and preprocessor_config.json of Hugging Face.

    Raises:
        UserError: The periods have another base.
    """
    config, file = described(folder / "config.json"), folder / "config.json"
    if (base := config.get("rope_theta", _BASE)) != _BASE:
        raise UserError(f"{file}: rope_theta {base!r:.100} is not {_BASE}")
    known = huggingface.beside(folder)
    known.pop("remark", None)
    return known | {"norm_epsilon": config.get("layer_norm_eps")}


_HUGGINGFACE = replace(
    _TIMM,
    peer="Hugging Face's DINOv3",
    signature="embeddings.patch_embeddings.weight",
    marks=(),
    table=table(
        "layer.{i}.",
        ("patch", "embeddings.patch_embeddings"), ("class_token", "embeddings.cls_token"),
        ("register_tokens", "embeddings.register_tokens"), ("norm1", "norm1"), ("attention.qkv", _QKV),
        ("attention.qkv.bias", ("attention.q_proj.bias", "", "attention.v_proj.bias")),
        ("attention.out", "attention.o_proj"), ("scale1.gamma", "layer_scale1.lambda1"), ("norm2", "norm2"),
        ("expand", ("mlp.gate_proj", "mlp.up_proj")), ("expand", "mlp.up_proj"), ("contract", "mlp.down_proj"),
        ("scale2.gamma", "layer_scale2.lambda1"), ("norm", "norm"),
    ),
    left=r"embeddings\.mask_token$",
    aliases=((r"^model\.layer\.", "layer."),),
    beside=_beside,
)  # fmt: skip

DINOV3 = (_FACEBOOK, _TIMM, _HUGGINGFACE)


def lacks(arguments: Mapping[str, Any], classifier: Mapping[str, Any] | None, *, of_timm: bool) -> str | None:
    """Return a property of an encoder with rotary positions that the peer's DINOv3 model does not support, or None.

    Args:
        arguments: Options of the encoder.
        classifier: Options of the head; None without one.
        of_timm: Whether the peer is timm, otherwise Hugging Face.
    """
    for name in ("layer_scale", "registers"):
        if not arguments[name]:
            return f"rotary positions without {name}"
    if arguments["stem"] is not None or not arguments["class_token"] or arguments["distillation_token"]:
        return "rotary positions in a hybrid, or with other tokens than the class token and registers"
    if of_timm and (arguments["norm_epsilon"], arguments["gelu"]) != (_TIMM.norm_epsilon, "exact"):
        return f"rotary positions and norm_epsilon={arguments['norm_epsilon']:g} or gelu={arguments['gelu']}"
    if classifier is not None and (not of_timm or classifier["hidden"] is not None):
        return "rotary positions and such a head"
    return None


def timm_export(encoder: "ViT", classes: Sequence[str], resized: Mapping[str, object]) -> tuple[Layout, dict[str, Any]]:
    """Return the layout and the config.json of an export for timm.create_model.

    Args:
        encoder: The encoder.
        classes: Class names, empty without a head.
        resized: Options from `Preprocessing.timm`.
    """
    config = timm.config(encoder, classes, resized)
    usual, hidden, width = config["model_args"], encoder.blocks[0].contract.in_features, encoder.width
    names = ("img_size", "patch_size", "in_chans", "embed_dim", "depth", "num_heads", "init_values", "global_pool")
    arguments = {name: usual[name] for name in names} | {
        "num_reg_tokens": encoder.arguments["registers"],
        "mlp_ratio": timm.ratio(hidden, width),
        "swiglu_mlp": encoder.arguments["mlp"] == "swiglu",
        "attn_type": "rope",  # the attention class with a bias of keys
        "qkv_bias": True,
    }
    return _TIMM.of(()), config | {"architecture": "vit_small_patch16_dinov3", "model_args": arguments}


def huggingface_export(encoder: "ViT") -> tuple[Layout, dict[str, Any]]:
    """Return the layout and the config.json of an export for from_pretrained."""
    gated = encoder.arguments["mlp"] == "swiglu"
    config = huggingface.config(encoder, ()) | {
        "model_type": "dinov3_vit",
        "layerscale_value": encoder.arguments["layer_scale"],
        "num_register_tokens": encoder.arguments["registers"],
        "key_bias": True,
        "use_gated_mlp": gated,
        **({"hidden_act": "silu"} if gated else {}),
    }
    biases = [f"layer.0.attention.{part}_proj.bias" for part in "qkv"]
    gates = [f"layer.0.mlp.{part}_proj.{kind}" for part in ("gate", "up") for kind in ("weight", "bias")]
    return _HUGGINGFACE.of(biases + gates * gated), config


def remarks(encoder: "ViT") -> list[str]:
    """Return a remark if the periods that a peer computes differ from those of the encoder."""
    assert encoder.rotary is not None
    periods = encoder.rotary.periods.tolist()
    off = max(abs(period / _BASE ** (i / len(periods)) - 1) for i, period in enumerate(periods))
    return [] if off < 1e-5 else [f"the peer's periods differ by up to {off:.1%}, and its outputs a little"]
