"""Read a file of another project's weights: its layout, its encoder, and its weights under the names of ssvit.

Values that the shapes do not determine are taken from the user's options, then from the files next to the weights, then
from defaults of the layout, and are printed. Torch is imported only to load the weights.
"""

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from ssvit.data.augment.options import CenterCrop
from ssvit.data.sources.decode_options import PixelFormat
from ssvit.errors import OptionError, UserError, pair
from ssvit.exchange import files, hub
from ssvit.exchange.files import ForeignError, shown
from ssvit.exchange.layouts import LAYOUTS
from ssvit.exchange.options import FOREIGN_OPTIONS
from ssvit.exchange.tensor_mapping import (
    IMAGENET,
    LAYER_SCALE,
    OPTIONAL,
    QKV_BIAS,
    Layout,
    Shapes,
    TensorMapping,
    read_description,
)
from ssvit.models import encoder_options, timm_options, vit_options
from ssvit.objectives import classify_options

if TYPE_CHECKING:
    from torch import Tensor

HEADS = {192: 3, 384: 6, 768: 12, 1024: 16, 1280: 16, 1536: 24, 3072: 32}  # by width: Ti to H, DINOv2's giant, Pixio-5B
# Modules around a model or a block: of DataParallel, of torch.compile, and of FSDP and its checkpointing.
_WRAPPERS = re.compile(r"(?<![^.])(module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
# Keys of the encoder that is used by default: of DINO, I-JEPA, MoCo v3 (main_lincls.py), and of averaged weights.
_DEFAULT_KEYS = ("teacher", "target_encoder", "base_encoder", "model_ema", "state_dict_ema", "ema")
_SIZE = 224  # default image size of an encoder whose positions do not determine it


class Foreign(NamedTuple):
    """Hold the description of an encoder, or of a classifier that ssvit exported, in a file.

    Attributes:
        name: Name of the file's repository on the Hugging Face Hub, or of the file without its suffix.
        arguments: Options of the encoder.
        notes: Remarks to print.
        weights: Returns the state dict of the model, under the names of ssvit. It raises ForeignError if a tensor is
            missing, cannot be read or has a wrong shape.
        entries: Entries "view", "range", "background" and "classifier" of a run's manifest that the file contains.
    """

    name: str
    arguments: dict[str, Any]
    notes: list[str]
    weights: Callable[[], "dict[str, Tensor]"]
    entries: Mapping[str, Any] = MappingProxyType({})


def _vit_weights(
    path: Path,
    arguments: Mapping[str, Any],
    names: Mapping[str, str],
    mappings: Sequence[TensorMapping],
    masks_keys: bool,
) -> "dict[str, Tensor]":
    """Return the state dict of a Vision Transformer of another project.

    Args:
        path: The file.
        arguments: Options of the encoder.
        names: Names in the file of the encoder's tensors, by their names in the layout.
        mappings: Mappings between the tensors of ssvit and of the file.
        masks_keys: Whether the bias of keys is set to zero.
    """
    import torch
    import torch.nn.functional as F

    from ssvit.models.positions import Rotary

    wanted = [name for mapping in mappings for name in mapping.theirs if name]
    stored = files.tensors(path, [names[name] for name in wanted])
    theirs = {name: stored[names[name]] for name in wanted}
    try:
        state = {mapping.ours: mapping.read(theirs) for mapping in mappings}
    except RuntimeError as error:  # the parts of one tensor have different shapes
        raise ForeignError(f"{path}: {' '.join(str(error).split())[:200]}") from None
    options = vit_options.ViT(**arguments)
    for name in ("mean", "std"):
        value = torch.tensor(arguments[name], dtype=torch.float32)
        state[name] = value.flatten().expand(options.channels).clone()
    with torch.device("meta"):  # no memory is allocated before the shapes are compared with the file
        expected = options.build().state_dict()
    for layer in range(options.depth):
        bias = state.setdefault(QKV_BIAS.format(i=layer), torch.zeros(3 * options.width))
        if masks_keys:
            bias.chunk(3)[1].zero_()
    if options.positions == "rotary":
        state.setdefault("rotary.periods", Rotary(options.width // options.heads).periods)
    else:  # prefix tokens without positions in the file get zeros
        rows = state["positions.0.embedding"]
        state["positions.0.embedding"] = F.pad(rows, (0, 0, len(expected["positions.0.embedding"]) - len(rows), 0))
    for mapping in mappings:
        if state[mapping.ours].shape != expected[mapping.ours].shape:
            shape, needed = ("x".join(map(str, tensors[mapping.ours].shape)) for tensors in (state, expected))
            names_of_file = ", ".join(mapping.theirs)
            raise ForeignError(f"{path}: {names_of_file}: has shape {shape}, must be {needed}")
    return {f"encoder.{name}": tensor for name, tensor in state.items()}


def _exported_weights(
    path: Path, arguments: Mapping[str, Any], classifier: classify_options.Classify | None
) -> "dict[str, Tensor]":
    """Return the state dict of a model that ssvit exported as safetensors, with names and shapes of ssvit."""
    import torch

    from ssvit.objectives.classify import Classify

    shapes = files.shapes(path)
    with torch.device("meta"):
        encoder = timm_options.options_from(arguments).build()
        model = (
            torch.nn.ModuleDict({"encoder": encoder}) if classifier is None else Classify(classifier, encoder=encoder)
        )
    expected = model.state_dict()
    for name, tensor in expected.items():
        if shapes.get(name) != tensor.shape:
            raise ForeignError(f"{path}: {name}: does not fit the model in config.json")
    return files.tensors(path, [*expected])


def read_foreign(path: Path, options: Mapping[str, Any]) -> Foreign:
    """Return the description of the encoder in a file.

    Args:
        path: The file.
        options: The user's options; those that are None or are not options of a ViT are ignored.

    Raises:
        ForeignError: A tensor is missing, or the layout has no tensor of its name.
        OptionError: An option is missing or contradicts the file.
    """
    # transformers writes register tokens of the shape (1, 0, d) for models without registers
    shapes = {name: shape for name, shape in files.shapes(path).items() if shape[:2] != (1, 0)}
    if exported := _exported(path, shapes, options):
        return exported
    unwrapped = {_WRAPPERS.sub("", name): name for name in shapes}
    if len(unwrapped) < len(shapes):
        names = sorted(shapes.keys() - unwrapped.values())
        raise ForeignError(f"{path}: contains tensors with and without prefixes of wrappers: {shown(*names)}")
    layout, prefix = _layout(path, unwrapped, options.get("checkpoint_key"))
    names_of_file = {name.removeprefix(prefix): full for name, full in unwrapped.items() if name.startswith(prefix)}
    stored = {name: shapes[full] for name, full in names_of_file.items()}
    layout = layout.select(stored)
    present = {mapping.ours for mapping in layout.table if mapping.numbers(stored)}
    scaled = not present.isdisjoint(LAYER_SCALE)
    absent = set(OPTIONAL) - present - (set(LAYER_SCALE) if scaled else set())
    units = layout.units(stored) if "stem.root.weight" in present else None
    mappings = tuple(layout.mappings(depth=layout.depth(stored), absent=absent, units=units))
    wanted = {name for mapping in mappings for name in mapping.theirs if name}
    for names, problem in (
        (sorted(wanted - stored.keys()), "lacks tensors"),
        ([n for n in stored if n not in wanted and not re.match(layout.ignored, n)], "contains unknown tensors"),
    ):
        if names:
            raise ForeignError(f"{path}: {problem} in {layout.peer}'s layout: {shown(*names)}")

    sizes = {letter: size for mapping in mappings for letter, size in mapping.sizes(stored).items()}
    if not sizes.keys() >= set("dcpqm" if layout.rotary else "dcpqmt"):
        raise ForeignError(f"{path}: its tensors must have the same number of axes as {layout.peer}'s")
    if sizes.get("periods"):  # one period for each four channels of a head
        sizes["h"] = sizes["d"] // (4 * sizes["periods"])
    described = _described(layout, path.parent) | ({"heads": sizes["h"]} if "h" in sizes else {})
    class_tokens = sizes.get("cls", 1)
    # LayerScale is in DINOv2, DeiT III and BEiT, several class tokens are in Pixio.
    normalisation = IMAGENET if scaled or class_tokens > 1 else layout.normalisation
    defaults = {"heads": {**HEADS, **layout.heads}.get(sizes["d"]), **normalisation}
    chosen, sources = _choose(defaults, described, options)
    if "heads" not in chosen:
        raise OptionError("heads", None, f"must be set: neither {path.name} nor its width {sizes['d']} determines it")
    if sizes.get("h") not in (None, chosen["heads"]):
        raise OptionError("heads", chosen["heads"], f"must be {sizes['h']}, as in {path.name}")
    step = 1 if units is None else vit_options.stride(units)
    patch = sizes["p"] * step, sizes["q"] * step
    has_token = {name: name not in absent for name in ("class_token", "distillation_token")}
    if layout.rotary:
        size = pair("trained_size", chosen.get("trained_size", _SIZE))
    else:
        special = sum(has_token.values()) + class_tokens - 1, 0
        size = _size(path, sizes["t"], patch, special, chosen.get("trained_size"))
    first = next(mapping for mapping in mappings if mapping.ours == "blocks.0.expand.weight")
    gated = len(first.theirs) > 1 or sizes.get("e") == 2 * sizes["m"]
    arguments: dict[str, Any] = {
        "image_size": size,
        "patch_size": patch,
        "width": sizes["d"],
        "depth": layout.depth(stored),
        "heads": chosen["heads"],
        "mlp_width": sizes["m"],
        "channels": sizes["c" if units is None else "r"],
        **has_token,
        "class_tokens": class_tokens,
        "mlp": "swiglu" if gated else "gelu",
        "gelu": "exact" if gated else described.get("gelu") or layout.gelu,
        "norm_epsilon": described.get("norm_epsilon") or layout.norm_epsilon,
        "layer_scale": 1e-5 if scaled else None,  # the initial value, as in DINOv2
        "registers": sizes.get("registers", 0),
        "pooling": described.get("pooling") or ("class_token" if has_token["class_token"] else "patch_mean"),
        "positions": "rotary" if layout.rotary else "learned_1d",
        "mean": chosen["mean"],
        "std": chosen["std"],
        "stem": None if units is None else {"layers": units, "width": sizes["w"]},
    }
    encoder = vit_options.ViT(**arguments)
    notes = [
        f"{layout.peer}'s layout, images of {size[0]}x{size[1]}",
        *(f"{name} {chosen[name]} ({sources[name]})" for name in ("heads", "mean", "std")),
        f"pooling {encoder.pooling}",
        f"gelu {encoder.gelu}",
    ]
    if unread := sorted(shapes.keys() - {names_of_file[name] for name in wanted}):
        notes.append(f"not read: {shown(*unread)}")
    values = {**encoder.values(), "image_size": list(size), "patch_size": list(patch)}  # as in a manifest
    return Foreign(
        hub.name(path), values, notes, partial(_vit_weights, path, values, names_of_file, mappings, layout.masks_keys)
    )


def _exported(path: Path, shapes: Shapes, options: Mapping[str, Any]) -> Foreign | None:
    """Return the model of an export of ssvit as safetensors, or None if the file is not such an export.

    Args:
        path: The file.
        shapes: Names and shapes of its tensors.
        options: The user's options.

    Raises:
        UserError: The config.json is damaged.
        ForeignError: The file has fewer tensors than the encoder has layers.
        OptionError: The user sets an option that the config.json contains.
    """
    names = [name for name in shapes if name.startswith("encoder.")]
    description = read_description(path.parent / "config.json")
    arguments = description.get("encoder")
    if not names or not isinstance(arguments, Mapping) or "model_type" in description:  # an encoder of transformers
        return None
    try:
        encoder = timm_options.options_from(arguments)
        names_of_entries = ("view", "range", "background", "classifier")
        entries = {name: value for name, value in description.items() if name in names_of_entries}
        if "view" in entries:
            CenterCrop(**entries["view"])
            PixelFormat(channels=encoder.channels, range=entries.get("range"), background=entries.get("background"))
        head = classify_options.Classify(**entries["classifier"]) if "classifier" in entries else None
    except (TypeError, ValueError) as error:
        raise UserError(f"{path.parent / 'config.json'}: does not describe an encoder ({error})") from None
    if encoder.depth > len(names):  # reject a depth that the file cannot contain before a model is built
        raise ForeignError(f"{path}: has fewer tensors than the encoder in config.json has layers")
    for name in FOREIGN_OPTIONS:
        if options.get(name) is not None:
            raise OptionError(name, options[name], f"must not be set: the config.json next to {path.name} contains it")
    weights = partial(_exported_weights, path, arguments, head)
    return Foreign(hub.name(path), dict(arguments), ["exported by ssvit"], weights, entries)


def _choose(
    defaults: Mapping[str, Any], described: Mapping[str, Any], options: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Select the values of `FOREIGN_OPTIONS` by precedence: the user's options, the files, the defaults.

    Args:
        defaults: Default values.
        described: Values from the files next to the weights.
        options: The user's options.

    Returns:
        The values and their sources, both by name.
    """
    values, sources = {}, {}
    for source, candidates in (("default", defaults), ("from the files", described), ("option", options)):
        for name in FOREIGN_OPTIONS:
            if candidates.get(name) is not None:
                values[name], sources[name] = candidates[name], source
    return values, sources


def _layout(path: Path, names: Collection[str], key: str | None) -> tuple[Layout, str]:
    """Return the layout of a file, and the prefix of the names of its encoder.

    Args:
        path: The file, for messages.
        names: Names of its tensors without wrappers.
        key: The user's option checkpoint_key.

    Raises:
        ForeignError: No layout matches the names.
        OptionError: The key does not determine the encoder.
    """
    for layout in LAYOUTS:
        signature = re.compile(rf"(|.*[./]){re.escape(layout.signature)}", re.DOTALL)
        prefixes = [match[1] for name in names if (match := signature.fullmatch(name))]
        if len(prefixes) > 1 or (prefixes and key is not None):
            keys = _DEFAULT_KEYS if key is None else (key,)
            chosen = [prefix for prefix in prefixes if any(f".{part}." in f".{prefix}" for part in keys)]
            if len(chosen) != 1:
                encoders = f"{len(prefixes)} encoders in {path.name}: {shown(*prefixes)}"
                raise OptionError("checkpoint_key", key, f"must select one of the {encoders}")
            prefixes = chosen
        for prefix in prefixes:
            relative = (name.removeprefix(prefix) for name in names)
            if not layout.marks or not {*names, *relative}.isdisjoint(layout.marks):
                return layout, prefix
    peers = ", ".join(layout.peer for layout in LAYOUTS)
    raise ForeignError(f"{path}: must have the layout of {peers}; its first tensors are {shown(*names) or 'none'}")


def _described(layout: Layout, folder: Path) -> dict[str, Any]:
    """Return the options in the files next to the weights.

    Raises:
        UserError: One of the files is not a description by this peer.
    """
    try:
        return layout.read_config(folder)
    except UserError:
        raise
    except (AttributeError, LookupError, TypeError, ValueError):
        raise UserError(f"{folder / 'config.json'}: does not describe a model of {layout.peer}") from None


def _size(
    path: Path, rows: int, patch: tuple[int, int], special: Sequence[int], trained_size: object
) -> tuple[int, int]:
    """Return the height and width of the images for which a number of positions was learned.

    Args:
        path: The file, for messages.
        rows: Number of positions.
        patch: Height and width of a patch in pixels.
        special: Possible numbers of positions of prefix tokens, the most probable first.
        trained_size: The user's option; None: assume a square grid of patches.

    Raises:
        OptionError: The positions do not fit the size, or are not a square.
    """
    if trained_size is None:
        for prefix_tokens in special:
            side = math.isqrt(max(rows - prefix_tokens, 0))
            if side and side**2 == rows - prefix_tokens:
                return side * patch[0], side * patch[1]
        expected = f"must be [height, width]: the {rows} positions in {path.name} form no square"
        raise OptionError("trained_size", None, expected)
    size = pair("trained_size", trained_size)
    grid = encoder_options.grid(size, patch)
    if rows - math.prod(grid) not in special:
        expected = f"has {grid[0]}x{grid[1]} patches, and {path.name} has {rows} positions"
        raise OptionError("trained_size", trained_size, expected)
    return size
