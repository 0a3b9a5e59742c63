"""The options of evaluations, and the definition of an encoder's features. No torch."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, Self

from annotated_types import Ge
from pydantic import model_validator

from ssvit.config.declaration import Count, Expect, NotNegative, Options, ShareLimits, Whole, make
from ssvit.models.build_options import kind
from ssvit.models.encoder_options import PATCHES, TOKENS
from ssvit.models.timm_options import Timm
from ssvit.models.vit_options import ViT
from ssvit.options import OptionError, one_of, whole

POOLINGS = (*TOKENS, Timm.pooling)
OWN = ""  # the encoder in question among those that are measured beside it, by their names
RANDOM, PIXELS = "random weights", "pixels"
RANDOM_PREFIX = "random_"  # of the names of the feature sets of random weights
AUTO: Final = "auto"
Every = Annotated[Literal["auto"] | Count, Expect("a whole number of steps, 1 or more, or auto")]
AtLeastTwo = Annotated[int, Ge(2)]


@dataclass(frozen=True)
class Reading:
    """Which outputs of an encoder are its features."""

    layer: int
    """The layer whose outputs are taken, 1 for the first."""
    pooling: str = "patch_mean"
    """patch_mean; class_token; both: concatenated, the class token first; pooled, of timm's models: what their
    classifier takes; patches: each patch separately."""
    norm: str = "after"
    """after: with the encoder's last norm; before: without it."""

    def __post_init__(self) -> None:
        whole("layer", self.layer)
        one_of("pooling", self.pooling, (*POOLINGS, PATCHES))
        one_of("norm", self.norm, ("after", "before"))

    @property
    def name(self) -> str:
        """The name for tables and files: layer6_patch_mean."""
        return f"layer{self.layer}_{self.pooling}" + ("_before_norm" if self.norm == "before" else "")

    def check(self, encoder: ViT | Timm) -> None:
        """OptionError unless an encoder with these options has it."""
        if self.layer > encoder.depth:
            raise OptionError("layer", self.layer, f"must be at most {encoder.depth}, the encoder's layers")
        if self.pooling == PATCHES or self.pooling in encoder.poolings:
            return
        if isinstance(encoder, Timm):
            right = f"must be {Timm.pooling}: timm's {encoder.model} has no tokens to choose from"
        elif self.pooling == Timm.pooling:
            right = f"is of timm's models alone; there are {', '.join(encoder.poolings)}"
        else:
            right = "must be patch_mean: the encoder has no class token"
        raise OptionError("pooling", self.pooling, right)


def pooling_of(name: str) -> str | None:
    """The pooling in the name of a reading; None for other names."""
    found = re.search(rf"layer\d+_({'|'.join(POOLINGS)})(_before_norm)?$", name)
    return found and found[1]


def readings(
    encoder: Mapping[str, Any], *, layer: Any = "last", pooling: Any = None, norm: Any = "after"
) -> list[Reading]:
    """The readings that options choose for an encoder (its arguments). OptionError for one that it does not have.

    layer: its number, a list of numbers, last, or all. pooling: None for the encoder's own, with which it was trained.
    """
    options = make(kind(encoder), encoder)
    pooling = options.pooling if pooling is None else pooling
    one_of("pooling", pooling, POOLINGS)
    if isinstance(layer, str):
        one_of("layer", layer, ("last", "all", "a layer's number", "a list of numbers"))
        numbers = [options.depth] if layer == "last" else list(range(1, options.depth + 1))
    else:
        numbers = layer if isinstance(layer, list) else [layer]
    if not numbers or len(set(map(str, numbers))) < len(numbers):
        raise OptionError("layer", layer, "must be a list of different layers, one or more")
    found = [Reading(number, pooling, norm) for number in numbers]
    for reading in found:
        reading.check(options)
    return found


class Classification(Options):
    """How a classifier is evaluated."""

    batch_size: Count = 256
    """Images classified at a time, by each process."""
    workers: Whole = 0
    """Processes that read files, for each process."""
    timeout: NotNegative = 300.0
    """Seconds to wait for a batch from these processes; 0: no limit."""
    real: str | None = None
    """A file of ImageNet's ReaL labels, which are then evaluated too (Beyer et al. 2020)."""

    @model_validator(mode="after")
    def _check_real(self) -> Self:
        if self.real is not None and not os.path.isfile(self.real):
            raise OptionError("real", self.real, "no such file; null for none")
        return self


class HeldOut(Options):
    """The held-out images on which an objective is evaluated."""

    images: Count = 1024
    """The most held-out images."""
    batch_size: Count = 128
    """Images predicted at a time."""


class Reconstruction(HeldOut):
    """The evaluation of an objective that predicts patches."""

    seed: Whole = 0
    """Seed of the objective's random choices about the images."""


Prediction = Autoencoding = LatentPrediction = Reconstruction


class Collapse(HeldOut):
    """The evaluation of self-distillation."""

    images: AtLeastTwo = 1024
    """The most held-out images."""


class PatchCollapse(Collapse):
    """The evaluation of self-distillation with masked patches."""


class Contrast(HeldOut):
    """The evaluation of contrastive methods."""

    images: AtLeastTwo = 1024
    """The most held-out images."""
    seed: Whole = 0
    """Seed of the views."""


class LabelFree(HeldOut):
    """The measures of features without labels."""

    images: Count = 512
    """The most held-out images; ranks are at most their number, so there should be more than the encoder's width."""
    every: Every = AUTO
    """Steps from one evaluation to the next; auto: as often as takes less than 5 % of the training time, at steps of
    the probes (see `evaluation.base.interval`)."""
    views: Annotated[Literal[0] | AtLeastTwo, Expect("0, or a whole number, 2 or more")] = 3
    """Crops of each image for LiDAR, 2 or more; 0: without LiDAR."""
    scale: ShareLimits = (0.4, 1.0)
    """Least and greatest part of the image's area that a crop has."""
    seed: Whole = 0
    """Seed of the crops."""


class Probing(Options):
    """The options of all probes of a run."""

    every: Every = AUTO
    """Steps from one evaluation to the next; auto: as often as takes less than 5 % of the training time, in multiples
    of recipe.evaluate_every (see `evaluation.base.interval`)."""
    train_images: Count = 500
    """Labelled training images of the probes, balanced over the classes."""
    test_images: Count = 750
    """Held-out images on which the probes are measured."""
    batch_size: Count = 128
    """Images encoded at a time."""
