"""Read a file of another project's weights: its layout, its encoder, and its weights under the names of ssvit.

Values that the shapes do not determine are taken from the user's options, then from the files next to the weights, then
from defaults of the layout, and are printed. Torch is imported only to load the weights.
"""

import itertools
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ssvit.exchange import files, hub
from ssvit.exchange.dinov3 import DINOV3
from ssvit.exchange.files import ForeignError
from ssvit.exchange.google import GOOGLE
from ssvit.exchange.huggingface import DINOV2, HUGGINGFACE
from ssvit.exchange.layout import IMAGENET, LAYER_SCALE, OPTIONAL, QKV_BIAS, Layout, Place, Shapes, described
from ssvit.exchange.reading_options import ForeignEncoder
from ssvit.exchange.timm import FACEBOOK, TIMM
from ssvit.exchange.torchvision import TORCHVISION
from ssvit.models import encoder_options, timm_options, vit_options
from ssvit.options import OptionError, UserError, pair

if TYPE_CHECKING:
    from torch import Tensor

LAYOUTS = (GOOGLE, *DINOV3, DINOV2, HUGGINGFACE, TORCHVISION, FACEBOOK, TIMM)
_TOLD = tuple(ForeignEncoder.model_fields)
HEADS = {192: 3, 384: 6, 768: 12, 1024: 16, 1280: 16, 1536: 24}  # by width: from Ti to H, DINOv2's giant
_SIZE = 224  # default image size of an encoder whose positions do not determine it
_SHOWN = 3  # maximum number of names in a message


@dataclass(frozen=True)
class Foreign:
    """Hold the description of an encoder in a file.

    Attributes:
        path: The file.
        names: Names of the tensors in the file, by the usual names of the peer.
        places: Correspondences between the tensors of ssvit and of the file.
        arguments: Options of the encoder.
        notes: Remarks to print.
        masks_keys: Whether the bias of keys is set to zero.
    """

    path: Path
    names: Mapping[str, str]  # tensor names in the file, by the usual names of the peer
    places: tuple[Place, ...]
    arguments: Mapping[str, Any]
    notes: tuple[str, ...]
    masks_keys: bool

    @property
    def name(self) -> str:
        """Return the name of the file's repository on the Hugging Face Hub, or of the file without its suffix."""
        return hub.name(self.path)

    def weights(self) -> dict[str, "Tensor"]:
        """Return the state dict of the encoder, under the names of ssvit.

        Raises:
            ForeignError: A tensor cannot be read or has a wrong shape.
        """
        import torch
        import torch.nn.functional as F

        from ssvit.models.positions import Rotary
        from ssvit.models.vit import ViT

        tensors = files.tensors(self.path, self.names.values())
        theirs = {usual: tensors[name] for usual, name in self.names.items()}
        try:
            state = {place.ours: place.read(theirs) for place in self.places}
        except RuntimeError as error:  # the parts of one tensor have different shapes
            raise ForeignError(f"{self.path}: {' '.join(str(error).split())[:200]}") from None
        channels = self.arguments["channels"]
        for name in ("mean", "std"):
            state[name] = torch.tensor(self.arguments[name], dtype=torch.float32).flatten().expand(channels).clone()
        with torch.device("meta"):  # no memory is allocated before the shapes are compared with the file
            expected = ViT(vit_options.ViT(**self.arguments)).state_dict()
        for layer in range(self.arguments["depth"]):
            bias = state.setdefault(QKV_BIAS.format(i=layer), torch.zeros(3 * self.arguments["width"]))
            if self.masks_keys:
                bias.chunk(3)[1].zero_()
        if self.arguments["positions"] == "rotary":
            head_width = self.arguments["width"] // self.arguments["heads"]
            state.setdefault("rotary.periods", Rotary(head_width).periods)
        else:
            rows, wanted = state["positions.0.embedding"], len(expected["positions.0.embedding"])
            if (registers := self.arguments.get("registers")) and len(rows) == wanted + registers:
                # Registers of ssvit have no positions: their constant position embeddings are added to the tokens.
                first = wanted - math.prod(
                    encoder_options.grid(self.arguments["image_size"], self.arguments["patch_size"])
                )
                state["register_tokens"] = state["register_tokens"] + rows[first : first + registers]
                rows = torch.cat([rows[:first], rows[first + registers :]])
            # Prefix tokens without positions in the file get zeros.
            missing = wanted - len(rows)
            state["positions.0.embedding"] = F.pad(rows, (0, 0, missing, 0))
        for place in self.places:
            if state[place.ours].shape != expected[place.ours].shape:
                ours, right = ("x".join(map(str, weights[place.ours].shape)) for weights in (state, expected))
                names = ", ".join(place.theirs)
                raise ForeignError(f"{self.path}: {names} makes {place.ours} of {ours}, and the others need {right}")
        return state


class Own(Foreign):
    """Hold the description of an encoder that ssvit exported as safetensors, with names and shapes of ssvit."""

    def weights(self) -> dict[str, "Tensor"]:
        """Return the state dict of the encoder.

        Raises:
            ForeignError: A tensor is missing, cannot be read or has a wrong shape.
        """
        import torch

        tensors = files.tensors(self.path, self.names.values())
        with torch.device("meta"):
            expected = timm_options.of(self.arguments).build().state_dict()
        for name, tensor in expected.items():
            if name not in self.names or tensors[self.names[name]].shape != tensor.shape:
                raise ForeignError(f"{self.path}: {name} is not that of the encoder in its config.json")
        return {name: tensors[self.names[name]] for name in expected}


def _own(path: Path, shapes: Shapes, given: Mapping[str, Any]) -> Own | None:
    """Return the encoder of an export of ssvit as safetensors, or None if the file is not such an export.

    Args:
        path: The file.
        shapes: Names and shapes of its tensors.
        given: The user's options.

    Raises:
        UserError: The config.json is damaged.
        ForeignError: The file has fewer tensors than the encoder has layers.
        OptionError: The user sets an option that the config.json contains.
    """
    names = {name.removeprefix("encoder."): name for name in shapes if name.startswith("encoder.")}
    arguments = described(path.parent / "config.json").get("encoder")
    if not names or not isinstance(arguments, Mapping):
        return None
    try:
        encoder = timm_options.of(arguments)
    except (TypeError, ValueError) as error:
        raise UserError(f"{path.parent / 'config.json'}: describes no encoder ({error})") from None
    if encoder.depth > len(names):  # reject a depth that the file cannot contain before a model is built
        raise ForeignError(f"{path}: has fewer tensors than its config.json says layers")
    for name in _TOLD:
        if given.get(name) is not None:
            raise OptionError(name, given[name], f"is told by the config.json beside {path.name}")
    behind = sorted({_first_part(name) for name in shapes if name not in names.values()})
    notes = ["exported by ssvit", *([f"left behind: {first_of(behind)}"] if behind else [])]
    return Own(path, names, (), dict(arguments), tuple(notes), masks_keys=False)


def read(path: Path, given: Mapping[str, Any]) -> Foreign:
    """Return the description of the encoder in a file.

    Args:
        path: The file.
        given: The user's options; those that are None or are not options of a ViT are ignored.

    Raises:
        ForeignError: A tensor is missing or has no place in the layout.
        OptionError: An option is missing or contradicts the file.
    """
    shapes = files.shapes(path)
    if own := _own(path, shapes, given):
        return own
    layout, prefix = _layout(path, shapes)
    inside = {name: layout.usual(name.removeprefix(prefix)) for name in shapes if name.startswith(prefix)}
    usual = {usual: shapes[name] for name, usual in inside.items()}
    layout = layout.of(usual)

    scaled = any(layout.has(name, usual) for name in LAYER_SCALE)
    absent = {name for name in OPTIONAL if not (layout.has(name, usual) or (scaled and name in LAYER_SCALE))}
    special = {name: name not in absent for name in ("class_token", "distillation_token")}
    units = layout.units(usual)
    places = tuple(layout.places(depth=layout.depth(usual), absent=absent, units=units))
    wanted = {name for place in places for name in place.theirs if name}
    _refuse(path, f"{layout.peer}'s layout wants", sorted(wanted - usual.keys()))
    count = Counter(inside.values())
    _refuse(path, "holds under two names", [name for name, known in inside.items() if count[known] > 1])
    left = re.compile(layout.left)
    _refuse(path, "there is no place for", [name for name in usual if name not in wanted and not left.match(name)])

    letters = {letter: size for place in places for letter, size in place.letters(usual).items()}
    if not letters.keys() >= set("dcpqm" if layout.rotary else "dcpqmt"):
        raise ForeignError(f"{path}: its tensors have other shapes than {layout.peer}'s")
    if letters.get("periods"):  # one period for each four channels of a head
        letters["h"] = letters["d"] // (4 * letters["periods"])
    known = _beside(layout, path.parent) | ({"heads": letters["h"]} if "h" in letters else {})
    normalisation = IMAGENET if scaled else layout.normalisation  # as in DINOv2, DeiT III and BEiT
    usual_values = {"heads": {**HEADS, **layout.heads}.get(letters["d"]), **normalisation}
    chosen, sources = choose(_TOLD, usual_values, known, given)
    if "heads" not in chosen:
        raise OptionError("heads", None, f"an encoder of width {letters['d']} may have any; how many has {path.name}?")
    if letters.get("h") not in (None, chosen["heads"]):
        raise OptionError("heads", chosen["heads"], f"{path.name} has {letters['h']}")
    step = 1 if units is None else vit_options.stride(units)
    patch = letters["p"] * step, letters["q"] * step
    registers, tokens = letters.get("registers", 0), sum(special.values())
    if layout.rotary:
        size = pair("trained_size", chosen.get("trained_size", _SIZE))
    else:
        size = _size(path, letters["t"], patch, (tokens, 0, tokens + registers), chosen.get("trained_size"))
    first = next(place for place in places if place.ours == "blocks.0.expand.weight")
    gated = len(first.theirs) > 1 or letters.get("e") == 2 * letters["m"]
    epsilon = known.get("norm_epsilon") or layout.norm_epsilon
    gelu = known.get("gelu") or layout.gelu
    arguments = {
        "image_size": list(size),
        "patch_size": list(patch),
        "width": letters["d"],
        "depth": layout.depth(usual),
        "heads": chosen["heads"],
        "mlp_width": letters["m"],
        "channels": letters["c" if units is None else "r"],
        **special,
        "mlp": "swiglu" if gated else "gelu",
        "gelu": "exact" if gated else gelu,
        "norm_epsilon": epsilon,
        "layer_scale": 1e-5 if scaled else None,  # the initial value, as in DINOv2
        "registers": registers,
        "pooling": known.get("pooling") or ("class_token" if special["class_token"] else "patch_mean"),
        "positions": "rotary" if layout.rotary else "learned_1d",
        "positions_at": "stem",
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "stochastic_depth": 0.0,
        "mean": chosen["mean"],
        "std": chosen["std"],
        **({} if units is None else {"stem": {"layers": units, "width": letters["w"], "epsilons": layout.epsilons}}),
    }
    vit_options.ViT(**arguments)
    outside = {_first_part(name, prefix) for name in shapes if not name.startswith(prefix)}
    # A part that is read only partially is reported by the last names of the tensors that are not read.
    kept = {_first_part(name) for name in wanted}
    within = {(_first_part(name), name.rpartition(".")[2]) for name in usual if name not in wanted}
    behind = sorted(outside | {last if part in kept else part for part, last in within})
    patches = math.prod(encoder_options.grid(size, patch))
    notes = [
        f"{layout.peer}'s layout, images of {size[0]}x{size[1]}",
        *(f"{name} {chosen[name]} {sources[name]}" for name in ("heads", "mean", "std")),
        *([f"pooling {known['pooling']} as it says"] if known.get("pooling") else []),
        *([] if letters.get("t", math.inf) > patches else ["none of its positions is for special tokens"]),
        *([] if gelu == "exact" or gated else [f"gelu {gelu}, as {layout.peer}'s"]),
        *([known["remark"]] if "remark" in known else []),
        *([f"left behind: {first_of(behind)}"] if behind else []),
        *(
            f"{layout.peer}'s representation is not what pooling gives, but what {name} makes of it: {what}"
            for name, what in layout.beyond.items()
            if name in behind
        ),
    ]
    names = {usual: name for name, usual in inside.items() if usual in wanted}
    return Foreign(path, names, places, arguments, tuple(notes), layout.masks_keys)


def choose(
    names: Sequence[str], usual: Mapping[str, Any], known: Mapping[str, Any], given: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Select values by precedence: the user's options, the files next to the weights, the defaults.

    Args:
        names: Names of the values.
        usual: Default values.
        known: Values from the files next to the weights.
        given: The user's options.

    Returns:
        The values and their sources, both by name.
    """
    values, sources = {}, {}
    for source, found in (("as usual", usual), ("as it says", known), ("as told", given)):
        for name in names:
            if found.get(name) is not None:
                values[name], sources[name] = found[name], source
    return values, sources


def _layout(path: Path, shapes: Shapes) -> tuple[Layout, str]:
    """Return the layout of a file, and the prefix of the names of its encoder."""
    for layout in LAYOUTS:
        names = [name for name in shapes if re.search(rf"(^|[./]){re.escape(layout.signature)}\Z", name)]
        if len(names) > 1:
            raise ForeignError(f"{path}: holds {len(names)} encoders ({first_of(names)}); leave one in it")
        if names and (not layout.marks or shapes.keys() & set(layout.marks)):
            return layout, names[0].removesuffix(layout.signature)
    peers = ", ".join(layout.peer for layout in LAYOUTS)
    first = first_of(list(shapes)) or "nothing"
    raise ForeignError(f"{path}: is in none of the layouts known here ({peers}); it begins with {first}")


def _beside(layout: Layout, folder: Path) -> dict[str, Any]:
    """Return the options in the files next to the weights.

    Raises:
        UserError: One of the files is not a description by this peer.
    """
    try:
        return layout.beside(folder)
    except UserError:
        raise
    except (AttributeError, LookupError, TypeError, ValueError):
        raise UserError(f"{folder / 'config.json'}: does not describe a model as {layout.peer} does") from None


def _first_part(name: str, beside: str = "") -> str:
    """Return the first part of a tensor's name that differs from the prefix."""
    parts, above = re.split(r"[./]", name), re.split(r"[./]", beside)
    return next((part for part, other in itertools.zip_longest(parts, above) if part != other), name)


def _size(path: Path, rows: int, patch: tuple[int, int], special: Sequence[int], given: object) -> tuple[int, int]:
    """Return the height and width of the images for which a number of positions was learned.

    Args:
        path: The file, for messages.
        rows: Number of positions.
        patch: Height and width of a patch in pixels.
        special: Possible numbers of positions of prefix tokens, the most probable first.
        given: The user's option; None: assume a square grid of patches.

    Raises:
        OptionError: The positions do not fit the size, or are not a square.
    """
    if given is None:
        for others in special:
            patches = rows - others
            side = math.isqrt(max(patches, 0))
            if side and side**2 == patches:
                return side * patch[0], side * patch[1]
        raise OptionError("trained_size", None, f"{path.name} has {rows} positions, no square; give [height, width]")
    size = pair("trained_size", given)
    grid = encoder_options.grid(size, patch)
    if rows - math.prod(grid) not in special:
        right = f"is {grid[0]}x{grid[1]} patches, and {path.name} has {rows} positions"
        raise OptionError("trained_size", given, right)
    return size


def _refuse(path: Path, what: str, names: list[str]) -> None:
    """Raise ForeignError if there are names."""
    if names:
        raise ForeignError(f"{path}: {what} {first_of(names)}")


def first_of(names: list[str]) -> str:
    """Format the first names of a list for a one-line message."""
    more = len(names) - _SHOWN
    return ", ".join(map(files.shown, names[:_SHOWN])) + (f" and {more} more" if more > 0 else "")
