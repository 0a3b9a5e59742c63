"""Map tensor names of other projects (peers): one table of names and einops patterns for reading and writing.

A pattern has the peer's axes before the arrow and ssvit's axes after it. Its letters are bound to the shapes before
torch is imported: c channels, p, q patch height and width, d width, h heads, k head width, m MLP width, e outputs of
the MLP's first layer (2 m for a packed SwiGLU), t tokens that have positions, cls class tokens, registers, periods of
rotary positions, parts tensors that are stacked. In a hybrid, r is the channels of the images, w the width of the root,
and c, p, q refer to the stem's output.
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from einops import rearrange

from ssvit.engine.atomic_io import read_json
from ssvit.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

# Tensors of ssvit that some encoders do not have.
LAYER_SCALE = ("blocks.{i}.scale1.gamma", "blocks.{i}.scale2.gamma")
QKV_BIAS = "blocks.{i}.attention.qkv.bias"
OPTIONAL = ("class_token", "distillation_token", "register_tokens", "rotary.periods", QKV_BIAS, *LAYER_SCALE)
Shapes = Mapping[str, tuple[int, ...]]

IMAGENET = {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}
HALF = {"mean": 0.5, "std": 0.5}
_SAME = "... -> ..."  # pattern of a tensor that has the same axes in the peer


@dataclass(frozen=True)
class TensorMapping:
    """Map one tensor of ssvit to tensors of a peer; several are stacked along a new first axis, with zeros for "".

    In a name, {i} is the layer, {s} and {u} are the stage and unit of a hybrid's stem, from 0, and {S}, {U} from 1.

    Attributes:
        ours: Name in ssvit.
        theirs: Names of the peer.
        pattern: einops pattern from the peer's axes to ssvit's axes.
    """

    ours: str
    theirs: tuple[str, ...]
    pattern: str = _SAME

    def numbered(self, **numbers: int) -> "TensorMapping":
        """Return the mapping for one layer, or one unit of a stage."""
        theirs = tuple(name.format(**numbers) for name in self.theirs)
        return TensorMapping(self.ours.format(**numbers), theirs, self.pattern)

    def is_complete(self, names: Collection[str]) -> bool:
        """Return whether names contain all names of this mapping, for any layer."""
        return all(replace(self, theirs=(name,)).numbers(names) for name in self.theirs if name)

    def numbers(self, names: Iterable[str]) -> set[tuple[int, ...]]:
        """Return the numbers, such as the layer, in the names that match the first name of this mapping."""
        pattern = re.compile(re.sub(r"\\{\w\\}", r"([0-9]{1,9})", re.escape(self.theirs[0])))
        return {tuple(map(int, match.groups())) for name in names if (match := pattern.fullmatch(name))}

    def sizes(self, shapes: Shapes) -> dict[str, int]:
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
        theirs, _, ours = self.pattern.partition(" -> ")
        if theirs == ours:
            return first
        return rearrange(parts if len(parts) > 1 else parts[0], self.pattern)

    def write(self, tensor: "Tensor", sizes: Mapping[str, int]) -> "tuple[str, Tensor]":
        """Convert the tensor of ssvit to the only tensor of the peer, by the sizes of the axes: its name and value."""
        theirs, _, ours = self.pattern.partition(" -> ")
        axes = {axis: sizes[axis] for axis in theirs.split() if axis in sizes}
        return self.theirs[0], rearrange(tensor, f"{ours} -> {theirs}", **axes)


def weight_and_bias(
    ours: str, *theirs: str, names: tuple[str, str] = (".weight", ".bias"), weight: str = _SAME, bias: str = _SAME
) -> tuple[TensorMapping, TensorMapping]:
    """Return the mappings of a layer's weight and bias.

    Args:
        ours: Name of the layer in ssvit.
        theirs: Names of the layer in the peer; several are stacked.
        names: The peer's suffixes of weight and bias.
        weight: Pattern of the weight.
        bias: Pattern of the bias.
    """
    return (
        TensorMapping(f"{ours}.weight", tuple(name + names[0] for name in theirs), weight),
        TensorMapping(f"{ours}.bias", tuple(name + names[1] for name in theirs), bias),
    )


_PATTERNS = {  # patterns of weights of linear layers and of single tensors that are rearranged
    "patch.weight": "d c p q -> d (c p q)",
    "class_token": "1 cls d -> 1 cls d",
    "register_tokens": "1 registers d -> 1 registers d",
    "positions.0.embedding": "1 t d -> t d",
    "rotary.periods": "periods -> periods",
    "expand.weight": "e d -> e d",
    "contract.weight": "... m -> ... m",
}


def encoder_mappings(layer: str, *names: tuple[str, str | tuple[str, ...]]) -> tuple[TensorMapping, ...]:
    """Return the mappings of an encoder whose linear layers have torch's layout.

    Args:
        layer: Prefix of the peer's names in a layer, with {i}.
        names: Modules or tensors of ssvit, each with the peer's name, or with several that are stacked. Modules of a
            layer (norm1, attention.qkv, ...) are named relative to it. A module may be listed again for files that use
            another name.
    """
    mappings = []
    for ours, theirs in names:
        in_layer = ours.startswith(("norm1", "norm2", "attention", "scale", "expand", "contract"))
        stacked = (theirs,) if isinstance(theirs, str) else theirs
        peers = tuple(layer + name if in_layer and name else name for name in stacked)
        is_tensor = ours in _PATTERNS or ours.endswith(("_token", ".weight", ".bias", ".gamma"))
        for suffix in ("",) if is_tensor else (".weight", ".bias"):
            pattern = _PATTERNS.get(ours + suffix, _SAME)
            if len(peers) > 1:
                size = "m" if ours.startswith("expand") else "e"
                inputs = "" if (ours + suffix).endswith(".bias") else " d"
                pattern = f"parts {size}{inputs} -> (parts {size}){inputs}"
            full_name = f"blocks.{{i}}.{ours}{suffix}" if in_layer else ours + suffix
            mappings.append(TensorMapping(full_name, tuple(name and name + suffix for name in peers), pattern))
    return tuple(mappings)


@dataclass(frozen=True)
class Layout:
    """Describe the complete encoder of a peer."""

    peer: str
    signature: str  # name of the patch projection, which identifies the layout
    table: tuple[TensorMapping, ...]  # tensors of the encoder
    ignored: str  # pattern of the names that are not read
    normalisation: Mapping[str, Any]  # default mean and std of the peer
    marks: tuple[str, ...] = ()  # at least one of these names must be in the file, if peers share the signature
    # Reads the files in a folder: some of `options.FOREIGN_OPTIONS`, "gelu", "norm_epsilon" and "pooling".
    read_config: Callable[[Path], dict[str, Any]] = lambda folder: {}
    norm_epsilon: float = 1e-6
    heads: Mapping[int, int] = field(default_factory=dict)  # number of heads by width, if it differs from the usual one
    rotary: bool = False  # whether positions are rotary; these are not in the table
    masks_keys: bool = False  # whether the bias of keys is zero, whatever the file contains
    gelu: str = "exact"

    def select(self, names: Collection[str]) -> "Layout":
        """Select the mappings that match a file with these names.

        Of several mappings for one tensor of ssvit, the first whose names are in the file is used, or else the last.
        """
        table: dict[str, TensorMapping] = {}
        for mapping in self.table:
            if mapping.ours not in table or not table[mapping.ours].is_complete(names):
                table[mapping.ours] = mapping
        return replace(self, table=tuple(table.values()))

    def depth(self, names: Collection[str]) -> int:
        """Return the number of layers from the highest number in a name, at most one more than can be complete."""
        complete = len(names) // sum("{i}" in entry.ours and entry.ours not in OPTIONAL for entry in self.table)
        layers = self._mapping("blocks.{i}.norm1.weight").numbers(names)
        return min(complete + 1, _count({layer for (layer,) in layers}))

    def units(self, names: Collection[str]) -> list[int]:
        """Return the number of units in each stage of a hybrid's stem; the peer numbers stages and units from 1."""
        numbers = self._mapping("stem.stages.{s}.{u}.conv1.weight").numbers(names)
        stages = _count({stage - 1 for stage, _ in numbers})
        return [_count({unit - 1 for s, unit in numbers if s == stage + 1}) for stage in range(stages)]

    def mappings(
        self, *, depth: int, absent: Collection[str] = (), units: Sequence[int] | None = None
    ) -> Iterator[TensorMapping]:
        """Yield every mapping of an encoder, for each layer and each unit.

        Args:
            depth: Number of layers.
            absent: Names in `OPTIONAL` that the encoder does not have.
            units: Number of units in each stage of a hybrid's stem; None without a stem.
        """
        for mapping in self.table:
            if mapping.ours in absent:
                continue
            if "{i}" in mapping.ours:
                yield from (mapping.numbered(i=layer) for layer in range(depth))
            elif "{s}" in mapping.ours:
                for stage, count in enumerate(units or ()):
                    # Only the first unit of a stage changes the shape, and has a shortcut for this.
                    for unit in range(1 if "shortcut" in mapping.ours else count):
                        yield mapping.numbered(s=stage, u=unit, S=stage + 1, U=unit + 1)
            elif units is not None or not mapping.ours.startswith("stem."):
                yield mapping

    def _mapping(self, ours: str) -> TensorMapping:
        """Return the first mapping of a tensor of ssvit."""
        return next(mapping for mapping in self.table if mapping.ours == ours)


def _count(numbers: Collection[int]) -> int:
    """Return the highest number plus one; if numbers are missing, at most one more than there are."""
    return 1 + min(max(numbers, default=-1), len(numbers))


def per_channel(value: float | Sequence[float], channels: int) -> list[float]:
    """Return one value per channel; a single value is repeated."""
    values = [value] if isinstance(value, int | float) else list(value)
    return values * channels if len(values) == 1 else values


def read_description(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file next to weights, or {} if there is no file.

    Raises:
        UserError: It cannot be read as JSON.
    """
    try:
        return read_json(file)[0]
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError):
        raise UserError(f"{file}: must be a JSON file that describes the weights next to it") from None
