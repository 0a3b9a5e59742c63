"""Map tensor names of other projects (peers): one table of names and einops patterns for reading and writing.

A pattern has the peer's axes before the arrow and those of ssvit after it. Its letters are bound to the shapes before
torch is imported: c channels, p, q patch height and width, d width, h heads, k head width, m MLP width, e outputs of
the MLP's first layer (2 m for a packed SwiGLU), t tokens that have positions, registers, periods of rotary positions.
In a hybrid, r is the channels of the images, w the width of the root, and c, p, q refer to the stem's output.
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from einops import rearrange

from ssvit.atomic_io import read_json
from ssvit.options import UserError

if TYPE_CHECKING:
    from torch import Tensor

# Tensors of ssvit that some encoders do not have.
LAYER_SCALE = ("blocks.{i}.scale1.gamma", "blocks.{i}.scale2.gamma")
QKV_BIAS = "blocks.{i}.attention.qkv.bias"
OPTIONAL = ("class_token", "distillation_token", "register_tokens", "rotary.periods", QKV_BIAS, *LAYER_SCALE)
Shapes = Mapping[str, tuple[int, ...]]

IMAGENET = {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}
HALF = {"mean": 0.5, "std": 0.5}


@dataclass(frozen=True)
class Place:
    """Map one tensor of ssvit to tensors of a peer; several are stacked along a new first axis, with zeros for "".

    In a name, {i} is the layer, {s} and {u} are the stage and unit of a hybrid's stem, from 0, and {S}, {U} from 1.

    Attributes:
        ours: Name in ssvit.
        theirs: Names of the peer.
        pattern: einops pattern from the peer's axes to those of ssvit.
    """

    ours: str
    theirs: tuple[str, ...]
    pattern: str = "... -> ..."

    def at(self, **numbers: int) -> "Place":
        """Return the place for one layer, or one unit of a stage."""
        return Place(self.ours.format(**numbers), tuple(name.format(**numbers) for name in self.theirs), self.pattern)

    def within(self, names: Collection[str]) -> bool:
        """Return whether names contain all names of this place, for any layer."""
        return all(replace(self, theirs=(name,)).numbers(names) for name in self.theirs if name)

    def numbers(self, names: Iterable[str]) -> set[tuple[int, ...]]:
        """Return the numbers, such as the layer, in those of the names that match this place."""
        pattern = re.compile(re.sub(r"\\{\w\\}", r"([0-9]{1,9})", re.escape(self.theirs[0])))
        return {tuple(map(int, match.groups())) for name in names if (match := pattern.fullmatch(name))}

    def letters(self, shapes: Shapes) -> dict[str, int]:
        """Return the sizes of the peer's axes by letter; {} if there is no tensor of this name and rank."""
        axes = self.pattern.partition(" -> ")[0].split()[len(self.theirs) > 1 :]
        shape = shapes.get(self.theirs[0], ())
        if len(axes) != len(shape):
            return {}
        return {axis: size for axis, size in zip(axes, shape, strict=True) if axis.isalpha()}

    def read(self, tensors: "Mapping[str, Tensor]") -> "Tensor":
        """Convert the peer's tensors to the tensor of ssvit."""
        first = tensors[self.theirs[0]]
        parts = [tensors[name] if name else first.new_zeros(first.shape) for name in self.theirs]
        return rearrange(parts if len(parts) > 1 else parts[0], self.pattern)

    def write(self, tensor: "Tensor", letters: Mapping[str, int]) -> "dict[str, Tensor]":
        """Convert the tensor of ssvit to the peer's tensors, by the sizes of the letters."""
        theirs, _, ours = self.pattern.partition(" -> ")
        used = {letter: size for letter, size in letters.items() if letter in theirs.split()}
        whole = rearrange(tensor, f"{ours} -> {theirs}", **used)
        parts = whole.unbind(0) if len(self.theirs) > 1 else [whole]
        return {name: part.contiguous() for name, part in zip(self.theirs, parts, strict=True) if name}


def both(
    ours: str, *theirs: str, names: tuple[str, str] = (".weight", ".bias"), weight: str = "... -> ...",
    bias: str = "... -> ...",
) -> tuple[Place, Place]:  # fmt: skip
    """Return the places of a layer's weight and bias.

    Args:
        ours: Name of the layer in ssvit.
        theirs: Names of the layer in the peer; several are stacked.
        names: The peer's suffixes of weight and bias.
        weight: Pattern of the weight.
        bias: Pattern of the bias.
    """
    return (
        Place(f"{ours}.weight", tuple(name + names[0] for name in theirs), weight),
        Place(f"{ours}.bias", tuple(name + names[1] for name in theirs), bias),
    )


_STACKED = {1: "", 2: "two", 3: "three"}
_PATTERNS = {  # patterns of weights of linear layers and of single tensors that are rearranged
    "patch.weight": "d c p q -> d (c p q)",
    "register_tokens": "1 registers d -> 1 registers d",
    "positions.0.embedding": "1 t d -> t d",
    "expand.weight": "e d -> e d",
    "contract.weight": "... m -> ... m",
}


def table(layer: str, *names: tuple[str, str | tuple[str, ...]]) -> tuple[Place, ...]:
    """Return the places of an encoder whose linear layers have torch's layout.

    Args:
        layer: Prefix of the peer's names in a layer, with {i}.
        names: Modules or tensors of ssvit, each with the peer's name, or with several that are stacked. Modules of a
            layer (norm1, attention.qkv, ...) are named relative to it. A module may be listed again for files that use
            another name.
    """
    places = []
    for ours, theirs in names:
        inner = ours.startswith(("norm1", "norm2", "attention", "scale", "expand", "contract"))
        stacked = (theirs,) if isinstance(theirs, str) else theirs
        peers = tuple(layer + name if inner and name else name for name in stacked)
        is_tensor = ours in _PATTERNS or ours.endswith(("_token", ".weight", ".bias", ".gamma", ".periods"))
        for suffix in ("",) if is_tensor else (".weight", ".bias"):
            pattern = _PATTERNS.get(ours + suffix, "... -> ...")
            if count := _STACKED[len(peers)]:
                rest = "" if (ours + suffix).endswith(".bias") else " d"
                size = "m" if ours.startswith("expand") else "e"
                pattern = f"{count} {size}{rest} -> ({count} {size}){rest}"
            ours_in_full = f"blocks.{{i}}.{ours}{suffix}" if inner else ours + suffix
            places.append(Place(ours_in_full, tuple(name and name + suffix for name in peers), pattern))
    return tuple(places)


@dataclass(frozen=True)
class Layout:
    """Describe the complete encoder of a peer."""

    peer: str
    signature: str  # name of the patch projection, which identifies the layout
    table: tuple[Place, ...]  # tensors of the encoder
    left: str  # pattern of the names that are not read
    normalisation: Mapping[str, Any]  # default mean and std of the peer
    head: tuple[Place, ...] = ()  # tensors of a classifier
    aliases: tuple[tuple[str, str], ...] = ()  # names in older versions, as (pattern, replacement)
    marks: tuple[str, ...] = ()  # names of which a file must contain one, if several peers share the signature
    # Reads a folder's files: some of `reading_options.FOREIGN_OPTIONS`, "gelu", and "remark", a sentence to print.
    beside: Callable[[Path], dict[str, object]] = lambda folder: {}
    bare: tuple[str, str] = ("", "")  # names for export if a hybrid's stem has no stages, as (pattern, replacement)
    epsilons: str = "authors"
    norm_epsilon: float = 1e-6
    heads: Mapping[int, int] = field(default_factory=dict)  # number of heads by width, if it differs from the usual one
    rotary: bool = False  # whether positions are rotary; these are not in the table
    masks_keys: bool = False  # whether the bias of keys is zero, whatever the file contains
    gelu: str = "exact"
    places_registers: bool = False  # whether exports contain zero positions of registers
    # Heads that compute the peer's representation and are not read: description by the first part of the name.
    beyond: Mapping[str, str] = field(default_factory=dict)

    def usual(self, name: str) -> str:
        """Return the usual name of a tensor from its name in any version."""
        for pattern, replacement in self.aliases:
            name = re.sub(pattern, replacement, name)
        return name

    def has(self, ours: str, names: Collection[str]) -> bool:
        """Return whether names contain the peer's name of a tensor of ssvit."""
        return any(place.ours == ours and place.numbers(names) for place in self.table)

    def of(self, names: Collection[str]) -> "Layout":
        """Select the places that match a file with these names.

        Of several places for one tensor of ssvit, the first whose names are in the file is used, or else the last.
        """
        table: dict[str, Place] = {}
        for place in self.table:
            if place.ours not in table or not table[place.ours].within(names):
                table[place.ours] = place
        return replace(self, table=tuple(table.values()))

    def depth(self, names: Collection[str]) -> int:
        """Return the number of layers from the highest number in a name, at most one more than can be complete."""
        complete = len(names) // sum("{i}" in place.ours and place.ours not in OPTIONAL for place in self.table)
        return min(complete + 1, _count({i for (i,) in self._place("blocks.{i}.norm1.weight").numbers(names)}))

    def units(self, names: Collection[str]) -> list[int] | None:
        """Return the number of units in each stage of a hybrid's stem, or None without a stem."""
        if not self.has("stem.root.weight", names):
            return None
        place = self._place("stem.stages.{s}.{u}.conv1.weight")
        first = 1 if "{S}" in place.theirs[0] else 0
        numbers = {(stage - first, unit - first) for stage, unit in place.numbers(names)}
        stages = _count({stage for stage, _ in numbers})
        return [_count({unit for s, unit in numbers if s == stage}) for stage in range(stages)]

    def places(
        self, *, depth: int, absent: Collection[str] = (), units: Sequence[int] | None = None
    ) -> Iterator[Place]:
        """Yield every place of an encoder, for each layer and each unit.

        Args:
            depth: Number of layers.
            absent: Names in `OPTIONAL` that the encoder does not have.
            units: Number of units in each stage of a hybrid's stem; None without a stem.
        """
        for place in self.table:
            if place.ours in absent:
                continue
            if "{i}" in place.ours:
                yield from (place.at(i=layer) for layer in range(depth))
            elif "{s}" in place.ours:
                for stage, count in enumerate(units or ()):
                    # Only the first unit of a stage changes the shape, and has a shortcut for this.
                    for unit in range(1 if "shortcut" in place.ours else count):
                        yield place.at(s=stage, u=unit, S=stage + 1, U=unit + 1)
            elif units is not None or not place.ours.startswith("stem."):
                yield place

    def _place(self, ours: str) -> Place:
        """Return the first place of a tensor of ssvit."""
        return next(place for place in self.table if place.ours == ours)


def _count(numbers: Collection[int]) -> int:
    """Return the highest number plus one; if numbers are missing, at most one more than there are."""
    return 1 + min(max(numbers, default=-1), len(numbers))


def per_channel(value: float | Sequence[float], channels: int) -> list[float]:
    """Return one value per channel; a single value is repeated."""
    values = [value] if isinstance(value, int | float) else list(value)
    return values * channels if len(values) == 1 else values


def described(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file next to weights, or {} if there is no file.

    Raises:
        UserError: It cannot be read as JSON.
    """
    try:
        return read_json(file)[0]
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError):
        raise UserError(f"{file}: cannot be read as JSON, and is to describe the weights beside it") from None


def stem(
    *,
    root: tuple[str, str],
    unit: str,
    shortcut: tuple[str, str],
    norm: str,
    names: tuple[str, str, str] = (".weight", ".weight", ".bias"),
    kernel: str = "... -> ...",
    root_kernel: str = "w r y x -> w r y x",
    scale: str = "... -> ...",
) -> tuple[Place, ...]:
    """Return the places of a hybrid's stem.

    Args:
        root: The peer's names of the root's convolution and norm.
        unit: Prefix of a bottleneck's names.
        shortcut: Names of the shortcut's convolution and norm.
        norm: Name of the norm {n} in a bottleneck.
        names: Suffixes of a kernel, and of a norm's scale and bias.
        kernel: Pattern of a kernel.
        root_kernel: Pattern of the root's kernel.
        scale: Pattern of a norm's scale and bias.
    """

    def pair(conv: str, normed: str, their_conv: str, their_norm: str, pattern: str = kernel) -> tuple[Place, ...]:
        weight = Place(f"{conv}.weight", (their_conv + names[0],), pattern)
        return (weight, *both(normed, their_norm, names=names[1:], weight=scale, bias=scale))

    ours = "stem.stages.{s}.{u}"
    places = pair("stem.root", "stem.norm", *root, root_kernel)
    for n in (1, 2, 3):
        places += pair(f"{ours}.conv{n}", f"{ours}.norm{n}", f"{unit}conv{n}", unit + norm.replace("{n}", str(n)))
    return places + pair(f"{ours}.shortcut.0", f"{ours}.shortcut.1", *(unit + name for name in shortcut))
