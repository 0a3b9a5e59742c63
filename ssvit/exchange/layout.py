"""What a peer calls its tensors, as one table for both directions: which of its own each of ours is made of.

A place's pattern is einops', the peer's axes before the arrow and ours after it; read backwards it writes the peer's.
Its letters are measured on the shapes, before torch is loaded: c channels, p, q patch height and width, d width,
h heads, k head width, m MLP width, t tokens that have positions, r channels of the images and w width of the root of a
hybrid, where c, p and q are of the map that its stem makes.
"""

import json
import re
import stat
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from einops import rearrange

from ssvit.options import UserError

Shapes = Mapping[str, tuple[int, ...]]

IMAGENET = {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}
HALF = {"mean": 0.5, "std": 0.5}
_LONGEST_DESCRIPTION = 10_000_000  # bytes


@dataclass(frozen=True)
class Place:
    """One tensor of ours, and those of the peer that it is made of: several are stacked along a new first axis.

    In a name {i} stands for the layer, {s} and {u} for a stage of a hybrid's stem and a unit of it, all from 0, and
    {S} and {U} for the same from 1.
    """

    ours: str
    theirs: tuple[str, ...]
    pattern: str = "... -> ..."

    def at(self, **numbers: int) -> "Place":
        """The same place of a certain layer, or unit of a stage."""
        return Place(self.ours.format(**numbers), tuple(name.format(**numbers) for name in self.theirs), self.pattern)

    def numbers(self, names: Iterable[str]) -> set[tuple[int, ...]]:
        """The numbers that stand in names that are this place's first."""
        pattern = re.compile(re.sub(r"\\{\w\\}", r"([0-9]{1,9})", re.escape(self.theirs[0])))
        return {tuple(map(int, match.groups())) for name in names if (match := pattern.fullmatch(name))}

    def letters(self, shapes: Shapes) -> dict[str, int]:
        """The sizes of the peer's axes by their letters, none where the peer has no such tensor of that rank."""
        axes = self.pattern.partition(" -> ")[0].split()[len(self.theirs) > 1 :]
        shape = shapes.get(self.theirs[0], ())
        if len(axes) != len(shape):
            return {}
        return {axis: size for axis, size in zip(axes, shape, strict=True) if axis.isalpha()}

    def read(self, tensors: Mapping[str, Any]) -> Any:
        """Our tensor, of the peer's."""
        found = [tensors[name] for name in self.theirs]
        return rearrange(found if len(found) > 1 else found[0], self.pattern)

    def write(self, tensor: Any, letters: Mapping[str, int]) -> dict[str, Any]:
        """The peer's tensors, of ours."""
        theirs, _, ours = self.pattern.partition(" -> ")
        used = {letter: size for letter, size in letters.items() if letter in theirs.split()}
        whole = rearrange(tensor, f"{ours} -> {theirs}", **used)
        parts = whole.unbind(0) if len(self.theirs) > 1 else [whole]
        return {name: part.contiguous() for name, part in zip(self.theirs, parts, strict=True)}


def both(
    ours: str, *theirs: str, names: tuple[str, str] = (".weight", ".bias"), weight: str = "... -> ...",
    bias: str = "... -> ...",
) -> tuple[Place, Place]:  # fmt: skip
    """The places of a layer's weight and bias, which the peer calls by `names` behind its own."""
    return (
        Place(f"{ours}.weight", tuple(name + names[0] for name in theirs), weight),
        Place(f"{ours}.bias", tuple(name + names[1] for name in theirs), bias),
    )


@dataclass(frozen=True)
class Layout:
    """A peer's whole encoder.

    signature: the name of the patch projection, by which a file is known. table: the places of the encoder; head:
    those of a classifier's head. left: what is not the encoder's, as a pattern of names. normalisation: mean and std,
    by the peer's convention. aliases: names of older versions, as (pattern, what stands for it). marks: names of which
    a file must have one, where the signature is not the peer's alone. beside: what files beside the weights tell, of
    `reading.TOLD` and as "remark", a sentence to print. bare: how names are written where a hybrid's stem has no
    stages, as (pattern, what stands for it). epsilons, gelu: those of the
    encoder. beyond: what makes the peer's representation of an encoder's outputs and is left behind, by the first part
    of its name.
    """

    peer: str
    signature: str
    table: tuple[Place, ...]
    left: str
    normalisation: Mapping[str, Any]
    head: tuple[Place, ...] = ()
    aliases: tuple[tuple[str, str], ...] = ()
    marks: tuple[str, ...] = ()
    beside: Callable[[Path], dict[str, Any]] = lambda folder: {}
    bare: tuple[str, str] = ("", "")
    epsilons: str = "authors"
    gelu: str = "exact"
    beyond: Mapping[str, str] = field(default_factory=dict)

    def usual(self, name: str) -> str:
        """A tensor's name, for one of an older version."""
        for pattern, usual in self.aliases:
            name = re.sub(pattern, usual, name)
        return name

    def has(self, ours: str, names: Collection[str]) -> bool:
        """Whether what the peer calls a tensor of ours is among some names."""
        return any(place.ours == ours and place.theirs[0] in names for place in self.table)

    def depth(self, names: Collection[str]) -> int:
        """How many layers there are, by the highest number in a name, and at most one more than can be complete."""
        whole = len(names) // sum("{i}" in place.ours for place in self.table)
        return min(whole + 1, len(_counted(self._place("blocks.{i}.norm1.weight").numbers(names))))

    def units(self, names: Collection[str]) -> list[int] | None:
        """The units of each stage of a hybrid's stem, None where there is no stem."""
        if not self.has("stem.root.weight", names):
            return None
        stages: dict[int, set[int]] = {}
        for stage, unit in self._place("stem.stages.{s}.{u}.conv1.weight").numbers(names):
            stages.setdefault(stage, set()).add(unit)
        first = min(stages, default=0)
        least = min(stages.get(first, {0}))
        return [
            len(_counted({(unit - least,) for unit in stages.get(first + step, ())})) for step in range(len(stages))
        ]

    def places(
        self, *, depth: int, class_token: bool, distillation_token: bool, units: Sequence[int] | None = None
    ) -> Iterator[Place]:
        """Every place of an encoder, each layer's and each unit's in turn."""
        absent = {"class_token": not class_token, "distillation_token": not distillation_token}
        for place in self.table:
            if "{i}" in place.ours:
                yield from (place.at(i=layer) for layer in range(depth))
            elif "{s}" in place.ours:
                for stage, count in enumerate(units or ()):
                    # Only the first unit of a stage has another shape than its input, and a shortcut for it.
                    for unit in range(1 if "shortcut" in place.ours else count):
                        yield place.at(s=stage, u=unit, S=stage + 1, U=unit + 1)
            elif not absent.get(place.ours, units is None and place.ours.startswith("stem.")):
                yield place

    def _place(self, ours: str) -> Place:
        return next(place for place in self.table if place.ours == ours)


def _counted(numbers: Collection[tuple[int, ...]]) -> range:
    """All numbers from 0 to the highest of those found, or to the first that is left out, which is then missed."""
    return range(min(1 + max((number for (number,) in numbers), default=-1), len(numbers) + 1))


def per_channel(value: float | Sequence[float], channels: int) -> list[float]:
    """One number for each channel, where one may stand for all."""
    values = list(value) if isinstance(value, list | tuple) else [value]
    return values * channels if len(values) == 1 else values


def described(file: Path) -> dict[str, Any]:
    """What a JSON file beside weights says, nothing where there is none. UserError if it cannot be read."""
    try:
        facts = file.stat()
        if not stat.S_ISREG(facts.st_mode) or facts.st_size > _LONGEST_DESCRIPTION:
            raise ValueError
        found = json.loads(file.read_bytes())
        if not isinstance(found, dict):
            raise ValueError
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError):
        raise UserError(f"{file}: cannot be read as JSON, and is to describe the weights beside it") from None
    return found


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
    """The places of a hybrid's stem.

    root, shortcut: what the peer calls their convolution and norm; unit: what it calls a bottleneck; norm: its norms,
    of number {n}. names: what stands behind for a kernel, a norm's scale and its bias.
    """
    pairs = [("stem.root", "stem.norm", *root, root_kernel)]
    ours = "stem.stages.{s}.{u}"
    pairs += [
        (f"{ours}.conv{n}", f"{ours}.norm{n}", f"{unit}conv{n}", unit + norm.replace("{n}", str(n)), kernel)
        for n in (1, 2, 3)
    ]
    pairs.append((f"{ours}.shortcut.0", f"{ours}.shortcut.1", unit + shortcut[0], unit + shortcut[1], kernel))
    return tuple(
        place
        for convolution, normed, theirs, their_norm, pattern in pairs
        for place in (
            Place(f"{convolution}.weight", (theirs + names[0],), pattern),
            *both(normed, their_norm, names=names[1:], weight=scale, bias=scale),
        )
    )
