"""What must hold between the options of each built-in part: called by its constructor, and by the tools before torch.

`check` walks a whole configuration: wherever a `_target_` has rules here, they are applied to its options. A part
that is not in RULES checks itself when it is built, a few seconds later. Standard library only.
"""

import os
from collections.abc import Callable, Mapping
from typing import Any

from ssvit.data import folder
from ssvit.options import OptionError, flag, number, one_of, pair, whole, within

POSITIONS = ("learned_1d", "learned_2d", "sine_cosine_2d", "relative", "none")
PLACES = ("stem", "every_layer", "every_layer_shared")
POOLINGS = ("patch_mean", "class_token")


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
) -> None:
    """OptionError unless these can be the arguments of `ssvit.encoder.vit.ViT`."""
    grid(image_size, patch_size)
    for name, value in (("width", width), ("depth", depth), ("heads", heads), ("channels", channels)):
        whole(name, value)
    if mlp_width is not None:
        whole("mlp_width", mlp_width)
    if width % heads:
        raise OptionError("heads", heads, f"must divide width={width}")
    flag("class_token", class_token)
    one_of("pooling", pooling, POOLINGS)
    if pooling == "class_token" and not class_token:
        raise OptionError("pooling", pooling, "needs class_token=true; without one, pool by patch_mean")
    one_of("positions", positions, POSITIONS)
    one_of("positions_at", positions_at, PLACES)
    if positions in ("learned_2d", "sine_cosine_2d") and width % 4:
        raise OptionError("width", width, f"must be a multiple of 4 for positions={positions}")
    if positions in ("relative", "none") and positions_at != "stem":
        raise OptionError("positions_at", positions_at, f"must be stem for positions={positions}, which adds nothing")
    number("dropout", dropout, 0, 0.99)
    number("stochastic_depth", stochastic_depth, 0, 0.99)
    for name, values in (("mean", mean), ("std", std)):
        values = list(values) if isinstance(values, list | tuple) else [values]
        if len(values) not in (1, channels):
            raise OptionError(name, values, f"must be one number, or one for each of the {channels} channels")
        for value in values:
            number(name, value, 0, 1, above=name == "std")


def masking(*, corrupted: Any, mask: Any, replace: Any, keep: Any, shape: Any) -> None:
    """OptionError unless these can be the arguments of `ssvit.masking.Masking`."""
    number("corrupted", corrupted, 0, 1, above=True)
    for name, value in (("mask", mask), ("replace", replace), ("keep", keep)):
        number(name, value, 0, 1)
    if abs(mask + replace + keep - 1) > 1e-6:
        raise OptionError("mask + replace + keep", f"{mask + replace + keep:g}", "the three fractions must sum to 1")
    one_of("shape", shape, ("random", "block"))


def target(*, patch_size: Any, channels: Any, grid: Any = 1, bits: Any = 3) -> None:
    """OptionError unless these can be the arguments of a target in `ssvit.targets`."""
    patch = pair("patch_size", patch_size)
    for name, value in (("channels", channels), ("grid", grid), ("bits", bits)):
        whole(name, value)
    if patch[0] % grid or patch[1] % grid:
        raise OptionError("grid", grid, f"must divide the patch of {patch[0]}x{patch[1]} pixels")
    if bits > 8 or bits * channels > 16:
        raise OptionError("bits", bits, f"must be at most {min(8, 16 // channels)} for {channels} channels")


def crop(
    *,
    size: Any,
    scale: Any = (0.08, 1.0),
    ratio: Any = (0.75, 4 / 3),
    flip: Any = 0.5,
    padding: Any = 0,
    resize: Any = None,
) -> None:
    """OptionError unless these can be the arguments of a transform in `ssvit.data.transforms`."""
    pair("size", size)
    for name, value, high in (("scale", scale, 1), ("ratio", ratio, float("inf"))):
        if not isinstance(value, list | tuple) or len(value) != 2:
            raise OptionError(name, value, "must be two numbers, [least, most]")
        for part in value:
            number(name, part, 0, high, above=True)
        if value[0] > value[1]:
            raise OptionError(name, value, "must be [least, most], and the first is larger")
    number("flip", flip, 0, 1)
    whole("padding", padding, at_least=0)
    if resize is not None:
        whole("resize", resize)


def images_in_folder(*, root: Any, held_out: Any = 0.1, seed: Any = 0) -> None:
    """OptionError unless a folder holds images and the fraction to hold out is one."""
    folder.check(root)
    number("held_out", held_out, 0, 0.9, above=True)
    whole("seed", seed, at_least=0)


def public_set(*, name: Any, root: Any, download: Any, split: Any, held_out: Any, seed: Any) -> None:
    """OptionError unless a public set is there, or may be fetched."""
    flag("download", download)
    if not download and not os.path.isdir(str(root)):
        raise OptionError("root", root, f"no such folder; give the one that holds {name}, or data.download=true")
    if held_out is not None:
        number("held_out", held_out, 0, 0.9, above=True)
    whole("seed", seed, at_least=0)


def drawn_set(*, size: Any, images: Any, held_out_images: Any, seed: Any) -> None:
    """OptionError unless these can be the arguments of `ssvit.data.sources.synthetic`."""
    pair("size", size)
    for name, value in (("images", images), ("held_out_images", held_out_images)):
        whole(name, value)
    whole("seed", seed, at_least=0)


def batch_fits(batch_size: int, source: Mapping[str, Any]) -> None:
    """OptionError if one batch is known to hold more images than there are, as far as names and numbers tell."""
    known = source.get("images")
    if source.get("_target_") == "ssvit.data.sources.folder":
        known = folder.count(source["root"], at_most=batch_size)
    if known is not None and batch_size > known:
        raise OptionError("batch_size", batch_size, f"must be no more than the {known} images to train on")


RULES: Mapping[str, Callable[..., None]] = {
    "ssvit.encoder.vit.ViT": encoder,
    "ssvit.masking.Masking": masking,
    "ssvit.targets.MeanColor": target,
    "ssvit.targets.ColorGrid": target,
    "ssvit.targets.Pixels": target,
    "ssvit.data.transforms.InceptionCrop": crop,
    "ssvit.data.transforms.ShiftCrop": crop,
    "ssvit.data.transforms.CenterCrop": crop,
    "ssvit.data.sources.folder": images_in_folder,
    "ssvit.data.sources.torchvision_set": public_set,
    "ssvit.data.sources.synthetic": drawn_set,
    "ssvit.data.sources.imagenet": images_in_folder,
}


def check(config: Any, name: str = "") -> None:
    """Apply RULES to every part of a configuration (nested dictionaries and lists); errors name the full option."""
    if isinstance(config, Mapping):
        for key, value in config.items():
            check(value, f"{name}.{key}" if name else str(key))
        if rule := RULES.get(config.get("_target_", "")):
            with within(name):
                rule(**{key: value for key, value in config.items() if not key.startswith("_")})
    elif isinstance(config, list):
        for place, value in enumerate(config):
            check(value, f"{name}[{place}]")
