"""Map the tensor names in files of Hugging Face transformers: ViT, DeiT, ViTMAE and DINOv2 (its classes use others)."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ssvit.exchange.layout import HALF, IMAGENET, Layout, Place, both, described, per_channel, table
from ssvit.models.encoder_options import grid
from ssvit.options import UserError

if TYPE_CHECKING:
    from ssvit.models.vit import ViT

# Keys: Hugging Face's names of the GELUs, the usual one of each first.
_ACTIVATIONS = {"gelu": "exact", "gelu_pytorch_tanh": "tanh", "gelu_new": "tanh", "gelu_python": "exact"}


def beside(folder: Path) -> dict[str, Any]:
    """Return the options in config.json and preprocessor_config.json.

    Raises:
        UserError: The model is not a plain ViT.
    """
    config, images = described(folder / "config.json"), described(folder / "preprocessor_config.json")
    expected, name = (("silu",), "SiLU") if config.get("use_gated_mlp") else (_ACTIVATIONS, "GELU")
    if (activation := config.get("hidden_act", "gelu")) not in expected:
        raise UserError(f"{folder / 'config.json'}: hidden_act {activation!r:.100} is no {name}")
    epsilon = config.get("layer_norm_eps", 1e-6 if str(config.get("model_type")).startswith("dinov2") else 1e-12)
    remark = f"norms add 1e-06 to the variance where theirs add {epsilon:g}: it matters where tokens vary little"
    return {
        "heads": config.get("num_attention_heads"),
        "trained_size": config.get("image_size"),
        "mean": images.get("image_mean"),
        "std": images.get("image_std"),
        "gelu": _ACTIVATIONS.get(activation) if "hidden_act" in config else None,
        **({"remark": remark} if epsilon != 1e-6 else {}),
    }


def is_dinov2(arguments: Mapping[str, Any]) -> bool:
    """Return whether an encoder has properties that transformers supports only in DINOv2, not in ViT."""
    return arguments.get("layer_scale") is not None or bool(arguments.get("registers"))


def lacks(arguments: Mapping[str, Any], classifier: Mapping[str, object] | None) -> str | None:
    """Return a property of an encoder and its head that the models of transformers do not support, or None.

    Args:
        arguments: Options of the encoder.
        classifier: Options of the head; None without one.
    """
    if arguments.get("stem") is not None:
        return "a hybrid's stem"
    if not arguments["class_token"] or arguments.get("distillation_token", False):
        return "any special tokens but the class token alone"
    if arguments["mlp"] != "gelu":
        return f"mlp={arguments['mlp']} beside learned positions"
    if is_dinov2(arguments):
        if arguments.get("layer_scale") is None:
            return "registers without layer_scale"
        rows, columns = grid(arguments["image_size"], arguments["patch_size"])
        if rows != columns:
            return f"a grid of {rows}x{columns} patches, no square, with layer_scale"
        if classifier is not None:
            return "a head on one vector beside layer_scale"
        if (arguments["mlp_width"] or 0) % arguments["width"]:
            return f"an MLP of width {arguments['mlp_width']} with layer_scale"
    if classifier is not None and arguments["pooling"] != "class_token":
        return f"a head on pooling={arguments['pooling']}"
    if classifier is not None and classifier["hidden"] is not None:
        return "a head with a hidden layer"
    return None


def architecture(arguments: Mapping[str, Any], *, is_classifier: bool) -> str:
    """Return the class of transformers that loads an export of an encoder with these options."""
    if arguments["positions"] == "rotary":
        return "DINOv3ViTModel"
    if is_dinov2(arguments):
        return "Dinov2WithRegistersModel" if arguments["registers"] else "Dinov2Model"
    return "ViTForImageClassification" if is_classifier else "ViTModel"


def config(encoder: "ViT", classes: Sequence[str], *, multi_label: bool = False) -> dict[str, Any]:
    """Return the config.json that from_pretrained reads.

    Args:
        encoder: The encoder.
        classes: Class names, empty without a head.
        multi_label: Whether the head was trained for multi-label classification.
    """
    labels = {str(label): name for label, name in enumerate(classes)}
    hidden, count = encoder.blocks[0].contract.in_features, encoder.arguments["registers"]
    kind: dict[str, Any] = {"model_type": "vit"}
    if is_dinov2(encoder.arguments):
        kind = {
            "model_type": "dinov2_with_registers" if count else "dinov2",
            "mlp_ratio": hidden // encoder.width,
            "layerscale_value": encoder.arguments["layer_scale"],
            "use_swiglu_ffn": False,
            **({"num_register_tokens": count} if count else {}),
        }
    return {
        "architectures": [architecture(encoder.arguments, is_classifier=bool(classes))],
        **kind,
        "hidden_size": encoder.width,
        "num_hidden_layers": len(encoder.blocks),
        "num_attention_heads": encoder.arguments["heads"],
        "intermediate_size": hidden,
        "hidden_act": next(name for name, gelu in _ACTIVATIONS.items() if gelu == encoder.arguments["gelu"]),
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "layer_norm_eps": encoder.norm.eps,
        "image_size": _one_or_two(encoder.image_size),
        "patch_size": _one_or_two(encoder.patch_size),
        "num_channels": encoder.channels,
        "qkv_bias": True,
        **({"problem_type": "multi_label_classification"} if multi_label else {}),
        **({"id2label": labels, "label2id": {name: int(label) for label, name in labels.items()}} if classes else {}),
    }


def preprocessor(encoder: "ViT", resized: Mapping[str, object]) -> dict[str, Any]:
    """Return the preprocessor_config.json.

    Args:
        encoder: The encoder.
        resized: Options from `Preprocessing.huggingface`.
    """
    return {
        "image_processor_type": "BitImageProcessor",  # ViT's image processor does not crop before version 5
        "do_rescale": True,
        **resized,
        "resample": 2,  # bilinear
        "do_convert_rgb": encoder.channels == 3,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": per_channel(encoder.arguments["mean"], encoder.channels),
        "image_std": per_channel(encoder.arguments["std"], encoder.channels),
    }


def _one_or_two(size: tuple[int, int]) -> int | list[int]:
    return size[0] if size[0] == size[1] else list(size)


def _table(norms: tuple[str, str], mlp: tuple[str, str]) -> tuple[Place, ...]:
    """Return the places of an encoder, by the peer's names of the two norms and the two MLP layers of a layer."""
    qkv = tuple(f"attention.attention.{part}" for part in ("query", "key", "value"))
    return table(
        "encoder.layer.{i}.",
        ("patch", "embeddings.patch_embeddings.projection"), ("class_token", "embeddings.cls_token"),
        ("distillation_token", "embeddings.distillation_token"), ("register_tokens", "embeddings.register_tokens"),
        ("positions.0.embedding", "embeddings.position_embeddings"), ("norm1", norms[0]), ("attention.qkv", qkv),
        ("attention.out", "attention.output.dense"), ("scale1.gamma", "layer_scale1.lambda1"), ("norm2", norms[1]),
        ("expand", mlp[0]), ("contract", mlp[1]), ("scale2.gamma", "layer_scale2.lambda1"), ("norm", "layernorm"),
    )  # fmt: skip


HUGGINGFACE = Layout(
    peer="Hugging Face",
    signature="embeddings.patch_embeddings.projection.weight",
    table=_table(("layernorm_before", "layernorm_after"), ("intermediate.dense", "output.dense")),
    head=both("head", "classifier"),
    left=r"pooler\.|embeddings\.mask_token$",
    normalisation=HALF,
    beside=beside,
)
_SCALE = "encoder.layer.0.layer_scale1.lambda1"
DINOV2 = Layout(
    peer="Hugging Face DINOv2",
    signature=HUGGINGFACE.signature,
    table=_table(("norm1", "norm2"), ("mlp.fc1", "mlp.fc2")),
    left=HUGGINGFACE.left,
    aliases=((r"\.mlp\.weights_in\.", ".mlp.fc1."), (r"\.mlp\.weights_out\.", ".mlp.fc2.")),  # packed SwiGLU
    normalisation=IMAGENET,
    marks=(_SCALE, *(f"{model}.{_SCALE}" for model in ("dinov2", "dinov2_with_registers", "backbone"))),
    beside=beside,
)
