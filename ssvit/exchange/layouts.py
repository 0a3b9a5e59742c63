"""Define the tensor names and default values of the projects from which weights can be read.

The published DeiT, MAE and DINOv2 encoders also use timm's names of layers. DINOv3's positions are
rotary and its keys have no bias, unlike those of ssvit; only Facebook's files contain the periods, rounded to bfloat16.
"""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from ssvit.errors import UserError
from ssvit.exchange.tensor_mapping import (
    HALF,
    IMAGENET,
    Layout,
    TensorMapping,
    encoder_mappings,
    read_description,
    weight_and_bias,
)

_BASE = 100  # base of DINOv3's periods
# Keys: names of the GELUs in Hugging Face and in timm.
_HUGGINGFACE_GELUS = {"gelu": "exact", "gelu_pytorch_tanh": "tanh", "gelu_new": "tanh", "gelu_python": "exact"}
_TIMM_GELUS = {"gelu": "exact", "gelu_tanh": "tanh"}
_TIMM_POOLINGS = {"token": "class_token", "avg": "patch_mean"}
# Architectures whose activation or number of heads is defined in timm's code alone, and differs from the usual one.
_TIMM_TANH = re.compile(r"(giantopt_patch16|so400m_patch16|base_patch32)_siglip|large_patch16_siglip(_gap)?_512")
_TIMM_16_HEADS = re.compile(r"vit_(giantopt_patch16_siglip|base_patch16_gap)_")


def _read_timm(folder: Path) -> dict[str, Any]:
    """Return the options in timm's config.json.

    Raises:
        UserError: The model is not a plain ViT.
    """
    config = read_description(folder / "config.json")
    arguments, pretrained = config.get("model_args") or {}, config.get("pretrained_cfg") or {}
    architecture = str(config.get("architecture"))
    usual = "gelu_tanh" if _TIMM_TANH.search(architecture) else "gelu"
    if (activation := arguments.get("act_layer") or usual) not in _TIMM_GELUS:
        raise UserError(f"{folder / 'config.json'}: act_layer={activation!r:.100}: must be a GELU")
    return {
        "heads": arguments.get("num_heads") or (16 if _TIMM_16_HEADS.match(architecture) else None),
        "trained_size": arguments.get("img_size") or (pretrained.get("input_size") or (None,))[1:] or None,
        "mean": pretrained.get("mean"),
        "std": pretrained.get("std"),
        "gelu": _TIMM_GELUS[activation],
        "pooling": _TIMM_POOLINGS.get(str(arguments.get("global_pool") or config.get("global_pool"))),
    }


def _read_huggingface(folder: Path) -> dict[str, Any]:
    """Return the options in config.json and preprocessor_config.json of Hugging Face.

    Raises:
        UserError: The model is not a plain ViT, or its rotary positions have another base.
    """
    file = folder / "config.json"
    config, images = read_description(file), read_description(folder / "preprocessor_config.json")
    config = config.get("encoder", config)  # of a model with a decoder, such as TrOCR
    is_plain = images.get("do_normalize") is False
    gated, activation = config.get("use_gated_mlp"), config.get("hidden_act", "gelu")
    if activation not in (("silu",) if gated else _HUGGINGFACE_GELUS):
        raise UserError(f"{file}: hidden_act={activation!r:.100}: must be a {'SiLU' if gated else 'GELU'}")
    if (base := config.get("rope_theta", _BASE)) != _BASE:
        raise UserError(f"{file}: rope_theta={base!r:.100}: must be {_BASE}")
    return {
        "heads": config.get("num_attention_heads"),
        "trained_size": config.get("image_size"),
        "mean": 0.0 if is_plain else images.get("image_mean"),
        "std": 1.0 if is_plain else images.get("image_std"),
        "gelu": _HUGGINGFACE_GELUS.get(activation),
        "norm_epsilon": config.get("layer_norm_eps"),
    }


_LAYER = "Transformer/encoderblock_{i}"
_ATTENTION = f"{_LAYER}/MultiHeadDotProductAttention_1"
_LINEAR, _NORM = ("/kernel", "/bias"), ("/scale", "/bias")
_OURS, _THEIRS = "stem.stages.{s}.{u}", "block{S}/unit{U}"
# The convolutions of a hybrid's stem, each with its norm, in ssvit and in Google's files.
_CONVOLUTIONS = (
    ("stem.root", "conv_root", "stem.norm", "gn_root"),
    (f"{_OURS}.shortcut.0", f"{_THEIRS}/conv_proj", f"{_OURS}.shortcut.1", f"{_THEIRS}/gn_proj"),
    *((f"{_OURS}.conv{n}", f"{_THEIRS}/conv{n}", f"{_OURS}.norm{n}", f"{_THEIRS}/gn{n}") for n in (1, 2, 3)),
)


def _google_stem() -> list[TensorMapping]:
    """Return the mappings of a hybrid's stem. The scales in some files have four axes."""
    mappings: list[TensorMapping] = []
    for convolution, their_convolution, norm, their_norm in _CONVOLUTIONS:
        pattern = "y x r w -> w r y x" if convolution == "stem.root" else "y x f g -> g f y x"
        mappings.append(TensorMapping(f"{convolution}.weight", (f"{their_convolution}/kernel",), pattern))
        mappings += weight_and_bias(norm, their_norm, names=_NORM, weight="... -> (...)", bias="... -> (...)")
    return mappings


# Published .npz files of google-research/vision_transformer: JAX arrays with inputs first, and JAX's default GELU.
GOOGLE = Layout(
    peer="Google",
    signature="embedding/kernel",
    table=(
        *_google_stem(),
        *weight_and_bias("patch", "embedding", weight="p q c d -> d (c p q)", names=_LINEAR),
        TensorMapping("class_token", ("cls",)),
        TensorMapping("positions.0.embedding", ("Transformer/posembed_input/pos_embedding",), "1 t d -> t d"),
        *weight_and_bias("blocks.{i}.norm1", f"{_LAYER}/LayerNorm_0", names=_NORM),
        *weight_and_bias(
            "blocks.{i}.attention.qkv", *(f"{_ATTENTION}/{part}" for part in ("query", "key", "value")),
            weight="parts d h k -> (parts h k) d", bias="parts h k -> (parts h k)", names=_LINEAR,
        ),
        *weight_and_bias("blocks.{i}.attention.out", f"{_ATTENTION}/out", weight="h k d -> d (h k)", names=_LINEAR),
        *weight_and_bias("blocks.{i}.norm2", f"{_LAYER}/LayerNorm_2", names=_NORM),
        *weight_and_bias("blocks.{i}.expand", f"{_LAYER}/MlpBlock_3/Dense_0", weight="d m -> m d", names=_LINEAR),
        *weight_and_bias("blocks.{i}.contract", f"{_LAYER}/MlpBlock_3/Dense_1", weight="m d -> d m", names=_LINEAR),
        *weight_and_bias("norm", "Transformer/encoder_norm", names=_NORM),
    ),
    ignored=r"head/|pre_logits/",
    normalisation=HALF,
    gelu="tanh",
)  # fmt: skip

TORCHVISION = Layout(
    peer="torchvision",
    signature="conv_proj.weight",
    table=encoder_mappings(
        "encoder.layers.encoder_layer_{i}.",
        ("patch", "conv_proj"), ("class_token", "class_token"), ("positions.0.embedding", "encoder.pos_embedding"),
        ("norm1", "ln_1"), ("attention.qkv.weight", "self_attention.in_proj_weight"),
        ("attention.qkv.bias", "self_attention.in_proj_bias"), ("attention.out", "self_attention.out_proj"),
        ("norm2", "ln_2"), ("expand", "mlp.linear_1"), ("expand", "mlp.0"), ("contract", "mlp.linear_2"),
        ("contract", "mlp.3"), ("norm", "encoder.ln"),
    ),
    ignored=r"heads\.",
    normalisation=IMAGENET,
)  # fmt: skip

TIMM = Layout(
    peer="timm",
    signature="patch_embed.proj.weight",
    table=encoder_mappings(
        "blocks.{i}.",
        ("patch", "patch_embed.proj"), ("class_token", "cls_token"), ("distillation_token", "dist_token"),
        ("register_tokens", "reg_token"), ("positions.0.embedding", "pos_embed"), ("norm1", "norm1"),
        ("attention.qkv", "attn.qkv"), ("attention.out", "attn.proj"), ("scale1.gamma", "ls1.gamma"),
        ("norm2", "norm2"), ("expand", "mlp.fc1"), ("contract", "mlp.fc2"), ("scale2.gamma", "ls2.gamma"),
        ("norm", "norm"),
    ),
    ignored=r"head\.|head_dist\.|pre_logits\.",
    normalisation=HALF,
    read_config=_read_timm,
)  # fmt: skip

TIMM_HEAD = (*weight_and_bias("head", "head"), *weight_and_bias("distilled_head", "head_dist"))  # of a classifier

# Files of Facebook nest their weights under these keys (MAE and DeiT; I-JEPA; DINO; MoCo v3); files of timm do not.
_KEYS = (
    "model", "target_encoder", "teacher.backbone", "student.backbone", "state_dict.base_encoder",
    "state_dict.momentum_encoder",
)  # fmt: skip
# DINOv2's giant has a packed SwiGLU.
FACEBOOK = Layout(
    peer="MAE, DeiT or DINOv2",
    signature=TIMM.signature,
    table=encoder_mappings(
        "blocks.{i}.", ("register_tokens", "register_tokens"), ("expand", "mlp.w12"), ("contract", "mlp.w3")
    )
    + TIMM.table,
    ignored=r"head\.|head_dist\.|mask_token$|decoder_",
    normalisation=IMAGENET,
    marks=(
        *(f"{key}.patch_embed.proj.weight" for key in _KEYS),
        "mask_token",
        "decoder_embed.weight",
    ),
)

# ViT, DeiT, ViTMAE and DINOv2 of transformers.
HUGGINGFACE = Layout(
    peer="Hugging Face",
    signature="embeddings.patch_embeddings.projection.weight",
    table=encoder_mappings(
        "encoder.layer.{i}.",
        ("patch", "embeddings.patch_embeddings.projection"), ("class_token", "embeddings.cls_token"),
        ("distillation_token", "embeddings.distillation_token"), ("register_tokens", "embeddings.register_tokens"),
        ("positions.0.embedding", "embeddings.position_embeddings"), ("norm1", "norm1"), ("norm1", "layernorm_before"),
        ("attention.qkv", tuple(f"attention.attention.{part}" for part in ("query", "key", "value"))),
        ("attention.out", "attention.output.dense"), ("scale1.gamma", "layer_scale1.lambda1"), ("norm2", "norm2"),
        ("norm2", "layernorm_after"), ("expand", "mlp.weights_in"), ("expand", "mlp.fc1"),
        ("expand", "intermediate.dense"), ("contract", "mlp.weights_out"), ("contract", "mlp.fc2"),
        ("contract", "output.dense"), ("scale2.gamma", "layer_scale2.lambda1"), ("norm", "layernorm"),
    ),
    ignored=r"pooler\.|embeddings\.mask_token$",
    normalisation=HALF,
    read_config=_read_huggingface,
)  # fmt: skip

_TIMM_DINOV3 = Layout(
    peer="timm's DINOv3",
    signature="reg_token",
    marks=("blocks.0.gamma_1",),
    table=encoder_mappings(
        "blocks.{i}.",
        ("patch", "patch_embed.proj"), ("class_token", "cls_token"), ("register_tokens", "reg_token"),
        ("norm1", "norm1"), ("attention.qkv.weight", "attn.qkv.weight"),
        ("attention.qkv.bias", ("attn.q_bias", "", "attn.v_bias")), ("attention.qkv.bias", "attn.qkv.bias"),
        ("attention.out", "attn.proj"), ("scale1.gamma", "gamma_1"), ("norm2", "norm2"),
        ("expand", ("mlp.fc1_g", "mlp.fc1_x")), ("expand", "mlp.fc1"), ("contract", "mlp.fc2"),
        ("scale2.gamma", "gamma_2"), ("norm", "norm"),
    ),
    ignored=r"head\.",
    normalisation=IMAGENET,
    norm_epsilon=1e-5,
    heads={1280: 20, 4096: 32},  # H+ and 7B
    rotary=True,
    read_config=_read_timm,
)  # fmt: skip

_FACEBOOK_DINOV3 = replace(
    _TIMM_DINOV3,
    peer="DINOv3",
    signature="storage_tokens",
    marks=(),
    table=encoder_mappings(
        "blocks.{i}.",
        ("register_tokens", "storage_tokens"), ("scale1.gamma", "ls1.gamma"), ("expand", ("mlp.w1", "mlp.w2")),
        ("contract", "mlp.w3"), ("scale2.gamma", "ls2.gamma"), ("rotary.periods", "rope_embed.periods"),
    ) + _TIMM_DINOV3.table,
    masks_keys=True,
    ignored=r"mask_token$|local_cls_norm\.|blocks\.\d+\.attn\.qkv\.bias_mask$",
    read_config=lambda folder: {},
)  # fmt: skip


def _huggingface_dinov3(layer: str) -> tuple[TensorMapping, ...]:
    """Return the table of an encoder whose names in a layer begin with `layer`."""
    return encoder_mappings(
        layer,
        ("patch", "embeddings.patch_embeddings"), ("class_token", "embeddings.cls_token"),
        ("register_tokens", "embeddings.register_tokens"), ("norm1", "norm1"),
        ("attention.qkv", tuple(f"attention.{part}_proj" for part in "qkv")),
        ("attention.qkv.bias", ("attention.q_proj.bias", "", "attention.v_proj.bias")),
        ("attention.out", "attention.o_proj"), ("scale1.gamma", "layer_scale1.lambda1"), ("norm2", "norm2"),
        ("expand", ("mlp.gate_proj", "mlp.up_proj")), ("expand", "mlp.up_proj"), ("contract", "mlp.down_proj"),
        ("scale2.gamma", "layer_scale2.lambda1"), ("norm", "norm"),
    )  # fmt: skip


_HUGGINGFACE_DINOV3 = replace(
    _TIMM_DINOV3,
    peer="Hugging Face's DINOv3",
    signature="embeddings.patch_embeddings.weight",
    marks=(),
    table=_huggingface_dinov3("model.layer.{i}.") + _huggingface_dinov3("layer.{i}."),
    ignored=r"embeddings\.mask_token$",
    read_config=_read_huggingface,
)

LAYOUTS = (
    GOOGLE, _FACEBOOK_DINOV3, _TIMM_DINOV3, _HUGGINGFACE_DINOV3, HUGGINGFACE, TORCHVISION, FACEBOOK, TIMM,
)  # fmt: skip
