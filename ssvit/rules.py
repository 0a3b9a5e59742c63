"""What must hold between the options of an encoder: asked by its constructor, and by the tools before torch is
loaded. Standard library only.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from ssvit.options import OptionError, flag, number, one_of, pair, whole

POSITIONS = ("learned_1d", "learned_2d", "sine_cosine_2d", "relative", "none")
PLACES = ("stem", "every_layer", "every_layer_shared")
POOLINGS = ("patch_mean", "class_token")
RESIZE = ("paper", "timm")
# Groups of channels that a hybrid's stem normalises.
GROUPS = 32
# Whose code it follows in the small numbers that keep deviations there from being zero.
EPSILONS = ("authors", "timm")
# The MLP's GELU: x * Phi(x), or its approximation by tanh, which JAX's is (Hendrycks and Gimpel 2016, section 2).
GELUS = ("exact", "tanh")
# Arguments of an encoder that do not change which weights it has, so that those of another can be used.
CHANGEABLE = (
    "image_size", "pooling", "dropout", "attention_dropout", "stochastic_depth", "activation_checkpointing",
)  # fmt: skip


def grid(image_size: Any, patch_size: Any) -> tuple[int, int]:
    """Patches in a column and in a row of an image: (rows, columns). OptionError unless the patch divides it."""
    height, width = pair("image_size", image_size)
    patch = pair("patch_size", patch_size)
    for side, pixels, step in (("height", height, patch[0]), ("width", width, patch[1])):
        if step > pixels:
            raise OptionError("patch_size", patch_size, f"must be at most the image's {side} of {pixels} pixels")
        if pixels % step:
            divisors = ", ".join(str(d) for d in range(2, pixels // 2 + 1) if pixels % d == 0) or pixels
            raise OptionError("patch_size", patch_size, f"must divide the image's {side} of {pixels} ({divisors})")
    return height // patch[0], width // patch[1]


def stride(layers: Sequence[int]) -> int:
    """Pixels from one place to the next in the feature map of a hybrid's stem of so many units a stage."""
    return 2 ** (1 + max(len(layers), 1))


def hybrid(stem: Any, patch_size: Any) -> None:
    """OptionError unless this can be the stem of a hybrid, under patches of this size."""
    if not isinstance(stem, Mapping) or set(stem) - {"epsilons"} != {"layers", "width"}:
        right = "{layers: units of each stage, width: channels of the first, epsilons: authors (as usual) or timm}"
        raise OptionError("stem", stem, f"must be null, or {right}")
    layers, width = stem["layers"], stem["width"]
    if not isinstance(layers, list | tuple):
        raise OptionError("stem.layers", layers, "must be a list, the units of each stage, as [3, 4, 9]")
    for units in layers:
        whole("stem.layers", units)
    whole("stem.width", width)
    if width % GROUPS:
        raise OptionError("stem.width", width, f"must be a multiple of {GROUPS}, the groups of channels to normalise")
    one_of("stem.epsilons", stem.get("epsilons", "authors"), EPSILONS)
    step = stride(layers)
    if any(side % step for side in pair("patch_size", patch_size)):
        raise OptionError("patch_size", patch_size, f"must be a multiple of {step}, the stride of stem.layers={layers}")


def encoder(
    *,
    image_size: Any,
    patch_size: Any,
    width: Any,
    depth: Any,
    heads: Any,
    mlp_width: Any,
    channels: Any,
    class_token: Any,
    pooling: Any,
    positions: Any,
    positions_at: Any,
    dropout: Any,
    stochastic_depth: Any,
    mean: Any,
    std: Any,
    attention_dropout: Any = 0.0,
    distillation_token: Any = False,
    activation_checkpointing: Any = False,
    stem: Any = None,
    gelu: Any = "exact",
) -> None:
    """OptionError unless these can be the arguments of `ssvit.models.vit.ViT`."""
    grid(image_size, patch_size)
    if stem is not None:
        hybrid(stem, patch_size)
    for name, value in (("width", width), ("depth", depth), ("heads", heads), ("channels", channels)):
        whole(name, value)
    if mlp_width is not None:
        whole("mlp_width", mlp_width)
    if width % heads:
        raise OptionError("heads", heads, f"must divide width={width}")
    flag("class_token", class_token)
    flag("distillation_token", distillation_token)
    flag("activation_checkpointing", activation_checkpointing)
    if distillation_token and not class_token:
        raise OptionError("distillation_token", distillation_token, "needs class_token=true, after which it stands")
    one_of("pooling", pooling, POOLINGS)
    if pooling == "class_token" and not class_token:
        raise OptionError("pooling", pooling, "needs class_token=true; without one, pool by patch_mean")
    one_of("gelu", gelu, GELUS)
    one_of("positions", positions, POSITIONS)
    one_of("positions_at", positions_at, PLACES)
    if positions in ("learned_2d", "sine_cosine_2d") and width % 4:
        raise OptionError("width", width, f"must be a multiple of 4 for positions={positions}")
    if positions in ("relative", "none") and positions_at != "stem":
        raise OptionError("positions_at", positions_at, f"must be stem for positions={positions}, which adds nothing")
    for name, value in (
        ("dropout", dropout), ("attention_dropout", attention_dropout), ("stochastic_depth", stochastic_depth)
    ):  # fmt: skip
        number(name, value, 0, 0.99)
    for name, values in (("mean", mean), ("std", std)):
        values = list(values) if isinstance(values, list | tuple) else [values]
        if len(values) not in (1, channels):
            raise OptionError(name, values, f"must be one number, or one for each of the {channels} channels")
        for value in values:
            number(name, value, 0, 1, above=name == "std")
