"""Which of an encoder's numbers may be its features. Standard library only."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ssvit.options import OptionError, one_of, whole

POOLINGS = ("patch_mean", "class_token", "both")
NORMS = ("after", "before")


@dataclass(frozen=True)
class Reading:
    """Which of an encoder's numbers are its features.

    layer: after which block, 1 for the first. pooling: patch_mean, class_token, or both, the class token first. norm:
    after the encoder's last norm, or before it. OptionError names one that cannot be.
    """

    layer: int
    pooling: str = "patch_mean"
    norm: str = "after"

    def __post_init__(self) -> None:
        whole("layer", self.layer)
        one_of("pooling", self.pooling, POOLINGS)
        one_of("norm", self.norm, NORMS)

    @property
    def name(self) -> str:
        """For tables and files: layer6_patch_mean."""
        return f"layer{self.layer}_{self.pooling}" + ("_before_norm" if self.norm == "before" else "")

    def check(self, *, depth: int, class_token: bool) -> None:
        """OptionError unless an encoder of so many layers, with a class token or without, has it."""
        if self.layer > depth:
            raise OptionError("layer", self.layer, f"must be at most {depth}, the encoder's layers")
        if self.pooling != "patch_mean" and not class_token:
            raise OptionError("pooling", self.pooling, "must be patch_mean: the encoder has no class token")


def pooling_of(name: str) -> str | None:
    """The pooling of the reading that has this name; None for what is no reading's name."""
    found = re.search(rf"layer\d+_({'|'.join(POOLINGS)})(_before_norm)?$", name)
    return found and found[1]


def readings(
    encoder: Mapping[str, Any], *, layer: Any = "last", pooling: Any = None, norm: Any = "after"
) -> list[Reading]:
    """The readings of an encoder (its arguments) that options mean.

    layer: its number, a list of numbers, last, or all. pooling: None for the encoder's own, by which it was trained.
    OptionError for one that it does not have.
    """
    depth = encoder["depth"]
    pooling = encoder["pooling"] if pooling is None else pooling
    if isinstance(layer, str):
        one_of("layer", layer, ("last", "all", "a layer's number", "a list of numbers"))
        numbers = [depth] if layer == "last" else list(range(1, depth + 1))
    else:
        numbers = layer if isinstance(layer, list) else [layer]
    if not numbers or len(set(map(str, numbers))) < len(numbers):
        raise OptionError("layer", layer, "must be a list of different layers, one or more")
    found = [Reading(number, pooling, norm) for number in numbers]
    for reading in found:
        reading.check(depth=depth, class_token=encoder["class_token"])
    return found
