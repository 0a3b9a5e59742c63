"""Define the options that select the outputs of an encoder used as features, and those of the indexes of a store."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from annotated_types import Ge, MinLen

from ssvit.config.declaration import Count, Distinct, Expect, Options, Whole, among
from ssvit.devices import Precision
from ssvit.errors import OptionError, whole
from ssvit.models.encoder_options import PATCHES, POOLED, TOKENS
from ssvit.models.timm_options import options_from

AUTO: Final = "auto"
POOLINGS = (*TOKENS, POOLED)
BF16: Final = "bf16"  # part of the identity of features in this precision


@dataclass(frozen=True)
class FeatureSpec:
    """Describe outputs of an encoder that are used as features."""

    layer: int
    """Layer number, counted from 1."""
    pooling: str = "patch_mean"
    """patch_mean; class_token; both: concatenated, the class token first; pooled (timm models only): the input of the
    classifier; patches: one vector for each patch."""
    norm: str = "after"
    """after: with the final norm of the encoder; before: without it."""

    def __post_init__(self) -> None:
        whole("layer", self.layer)

    @property
    def name(self) -> str:
        """Return the name in tables and files, such as layer6_patch_mean."""
        return f"layer{self.layer}_{self.pooling}" + ("_before_norm" if self.norm == "before" else "")

    def check(self, encoder: Any) -> None:
        """Raise OptionError unless an encoder with these options supports the features."""
        if self.layer > encoder.depth:
            raise OptionError("layer", self.layer, f"must be at most {encoder.depth}, the encoder's layers")
        if self.pooling not in (PATCHES, *encoder.poolings):
            raise OptionError("pooling", self.pooling, f"must be one of {', '.join(encoder.poolings)} for this encoder")


def spec_of(name: str) -> FeatureSpec | None:
    """Return the description of features whose name is a suffix of the text, or None."""
    match = re.search(rf"layer([1-9]\d*)_({'|'.join((*POOLINGS, PATCHES))})(_before_norm)?$", name)
    return match and FeatureSpec(int(match[1]), match[2], "before" if match[3] else "after")


def precision_of(identity: str) -> Precision:
    """Return the precision of features with this `Frozen.identity`."""
    return BF16 if f" {BF16} " in identity else 32


def size_of(identity: str) -> tuple[int, int] | None:
    """Return the image size of features with this `Frozen.identity`; None for the size in the checkpoint."""
    match = re.search(r" (\d+)x(\d+) ", identity)
    return (int(match[1]), int(match[2])) if match else None


def fit_of(identity: str) -> str | None:
    """Return how images are fitted for features with this `Frozen.identity`; None for the fit in the checkpoint."""
    match = re.search(r'"fit":"(\w+)"', identity)
    return match and match[1]


class Outputs(Options):
    """Select the outputs of a layer that are used as features."""

    pooling: Annotated[str, *among(POOLINGS)] | None = None
    """patch_mean; class_token; both: concatenated; pooled (timm models only). None: encoder.pooling."""
    norm: Literal["after", "before"] = "after"
    """after: with the final norm of the encoder, at any layer; before: without it."""


class OneLayer(Outputs):
    """Select the outputs of one layer that are used as features."""

    pooling: Annotated[str, *among((*POOLINGS, PATCHES))] | None = None
    """patch_mean; class_token; both: concatenated; pooled (timm models only); patches: one vector for each patch. None:
    that of the existing store, or else encoder.pooling."""
    layer: Annotated[Literal["auto", "last"] | Count, Expect("one of auto, last, a layer's number")] = AUTO
    """Layer number, counted from 1, or last. auto: the layer of the existing store or, without one, the layer
    chosen by the last evaluation of the checkpoint, or else the last layer."""


class Features(Outputs):
    """Select the outputs of one or more layers that are used as features."""

    layer: Annotated[
        Literal["last", "all"] | Count | Annotated[Sequence[Count], Distinct, MinLen(1)],
        Expect("last, all, a layer's number, or a list of different numbers"),
    ] = "last"
    """Layer: last, a number counted from 1, a list of numbers, or all."""

    def specs(self, encoder: Mapping[str, Any]) -> list[FeatureSpec]:
        """Return the descriptions of the features of an encoder, one for each layer.

        Args:
            encoder: Arguments of the encoder.

        Raises:
            OptionError: If the encoder does not support the features.
        """
        options = options_from(encoder)
        last = options.depth
        if isinstance(self.layer, str):
            numbers = [last] if self.layer == "last" else list(range(1, last + 1))
        else:
            numbers = [self.layer] if isinstance(self.layer, int) else list(self.layer)
        specs = [FeatureSpec(number, self.pooling or options.pooling, self.norm) for number in numbers]
        for spec in specs:
            spec.check(options)
        return specs


class Flat(Options):
    """Search exactly, by comparison with each image of the store."""


class IVF(Options):
    """Search the nearest cells of a spherical k-means clustering, fitted to 64 images for each cell."""

    nlist: Count | None = None
    """Number of cells. None: 4 sqrt(n), as recommended by faiss for up to a million images."""
    nprobe: Count | None = None
    """Number of cells searched. None: sqrt(nlist)."""
    seed: Whole = 0
    """Seed of the k-means clustering."""

    def check_consistency(self) -> None:
        """Raise OptionError if more cells are searched than there are."""
        if self.nlist is not None and self.nprobe is not None and self.nprobe > self.nlist:
            raise OptionError("nprobe", self.nprobe, f"must be at most nlist={self.nlist}")


class HNSW(Options):
    """Search a graph of neighbours (Malkov and Yashunin 2018). Larger values increase recall and time."""

    links: Annotated[int, Ge(2)] = 32
    """Neighbours of an image in the graph (M in the paper; the lowest layer has twice as many)."""
    ef_construction: Count = 80
    """Candidates kept during construction."""
    ef_search: Count = 64
    """Candidates kept during search."""
