"""DINOv3's Vision Transformers: as facebookresearch writes them, timm (as its Eva) and Hugging Face transformers.

Their positions are rotary, and their keys have no bias. Facebook's files alone hold the periods, rounded to bfloat16.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from ssvit.exchange import huggingface, timm
from ssvit.exchange.layout import IMAGENET, QKV_BIAS, Layout, Place, both, described
from ssvit.options import UserError

_BASE = 100  # of the periods
_THREE, _TWO = "three e -> (three e)", "two m -> (two m)"
_REGISTERS = "1 registers d -> 1 registers d"

_TIMM = Layout(
    peer="timm's DINOv3",
    signature="reg_token",
    marks=("blocks.0.gamma_1",),
    table=(
        *both("patch", "patch_embed.proj", weight="d c p q -> d (c p q)"),
        Place("class_token", ("cls_token",)),
        Place("register_tokens", ("reg_token",), _REGISTERS),
        Place("rotary.periods", ("rope_embed.periods",), "periods -> periods"),
        *both("blocks.{i}.norm1", "blocks.{i}.norm1"),
        Place("blocks.{i}.attention.qkv.weight", ("blocks.{i}.attn.qkv.weight",)),
        Place(QKV_BIAS, ("blocks.{i}.attn.q_bias", "", "blocks.{i}.attn.v_bias"), _THREE),
        Place(QKV_BIAS, ("blocks.{i}.attn.qkv.bias",)),
        *both("blocks.{i}.attention.out", "blocks.{i}.attn.proj"),
        Place("blocks.{i}.scale1.gamma", ("blocks.{i}.gamma_1",)),
        *both("blocks.{i}.norm2", "blocks.{i}.norm2"),
        *both(
            "blocks.{i}.expand", "blocks.{i}.mlp.fc1_g", "blocks.{i}.mlp.fc1_x",
            weight="two m d -> (two m) d", bias=_TWO,
        ),
        *both("blocks.{i}.expand", "blocks.{i}.mlp.fc1", weight="e d -> e d"),
        *both("blocks.{i}.contract", "blocks.{i}.mlp.fc2", weight="... m -> ... m"),
        Place("blocks.{i}.scale2.gamma", ("blocks.{i}.gamma_2",)),
        *both("norm", "norm"),
    ),
    left=r"head\.",
    normalisation=IMAGENET,
    norm_epsilon=1e-5,
    heads={1280: 20, 4096: 32},  # of H+ and 7B
    rotary=True,
    beside=timm.beside,
)  # fmt: skip

_FACEBOOK = replace(
    _TIMM,
    peer="DINOv3",
    signature="storage_tokens",
    marks=(),
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
    """The options in config.json and preprocessor_config.json of Hugging Face. UserError for other periods."""
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
    table=(
        *both("patch", "embeddings.patch_embeddings", weight="d c p q -> d (c p q)"),
        Place("class_token", ("embeddings.cls_token",)),
        Place("register_tokens", ("embeddings.register_tokens",), _REGISTERS),
        *both("blocks.{i}.norm1", "layer.{i}.norm1"),
        Place(
            "blocks.{i}.attention.qkv.weight", tuple(f"layer.{{i}}.attention.{part}_proj.weight" for part in "qkv"),
            "three e d -> (three e) d",
        ),
        Place(QKV_BIAS, ("layer.{i}.attention.q_proj.bias", "", "layer.{i}.attention.v_proj.bias"), _THREE),
        *both("blocks.{i}.attention.out", "layer.{i}.attention.o_proj"),
        Place("blocks.{i}.scale1.gamma", ("layer.{i}.layer_scale1.lambda1",)),
        *both("blocks.{i}.norm2", "layer.{i}.norm2"),
        *both(
            "blocks.{i}.expand", "layer.{i}.mlp.gate_proj", "layer.{i}.mlp.up_proj",
            weight="two m d -> (two m) d", bias=_TWO,
        ),
        *both("blocks.{i}.expand", "layer.{i}.mlp.up_proj", weight="e d -> e d"),
        *both("blocks.{i}.contract", "layer.{i}.mlp.down_proj", weight="... m -> ... m"),
        Place("blocks.{i}.scale2.gamma", ("layer.{i}.layer_scale2.lambda1",)),
        *both("norm", "norm"),
    ),
    left=r"embeddings\.mask_token$",
    aliases=((r"^model\.layer\.", "layer."),),
    beside=_beside,
)  # fmt: skip

DINOV3 = (_FACEBOOK, _TIMM, _HUGGINGFACE)
