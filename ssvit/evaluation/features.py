"""Frozen features: what every probe measures, read once from an encoder in eval mode, and kept on disk if asked.

A probe knows a function of images that gives features, never a model: `Frozen` makes one of an encoder, with the
encoder's own normalisation, and `Pixels` is the floor that needs no model at all.

Letters: b, n images, t tokens, d width.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from ssvit.data.loader import evaluation_batches
from ssvit.data.sources import Source
from ssvit.encoder.vit import ViT
from ssvit.options import OptionError, UserError, one_of, whole

POOLINGS = ("patch_mean", "class_token", "both")
NORMS = ("after", "before")


@dataclass(frozen=True)
class Reading:
    """Which of an encoder's numbers are its features.

    layer: after which block, 1 for the first. pooling: patch_mean, class_token, or both, one beside the other. norm:
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


class Extractor(Protocol):
    """A function of images (b, c, h, w) that gives named features, each (b, d) float32; what it is, in one string."""

    identity: str

    def __call__(self, images: Tensor) -> dict[str, Tensor]: ...


class Frozen:
    """An encoder's features at some readings. OptionError for one that the encoder does not have."""

    def __init__(self, encoder: ViT, readings: Sequence[Reading], *, identity: str) -> None:
        depth = len(encoder.blocks)
        for reading in readings:
            if reading.layer > depth:
                raise OptionError("layer", reading.layer, f"must be at most {depth}, the encoder's layers")
            if reading.pooling != "patch_mean" and encoder.class_token is None:
                raise OptionError("pooling", reading.pooling, "must be patch_mean: the encoder has no class token")
        self.encoder, self.readings, self.identity = encoder, tuple(readings), identity

    @torch.no_grad()
    def __call__(self, images: Tensor) -> dict[str, Tensor]:
        """(b, c, h, w), uint8 or in [0, 1] -> {reading's name: (b, d) or (b, 2 d)}; the encoder's mode is put back."""
        mode = self.encoder.training
        self.encoder.eval()
        wanted = {reading.layer for reading in self.readings}
        features = {}
        for layer, tokens in enumerate(self.encoder.layers(images), start=1):
            if layer in wanted:
                for reading in (reading for reading in self.readings if reading.layer == layer):
                    features[reading.name] = self._pooled(tokens, reading).float()
            if layer == max(wanted):
                break
        self.encoder.train(mode)
        return features

    def _pooled(self, tokens: Tensor, reading: Reading) -> Tensor:
        if reading.norm == "after":
            tokens = self.encoder.norm(tokens)
        parts = {"class_token": tokens[:, 0], "patch_mean": tokens[:, self.encoder.special :].mean(1)}
        return torch.cat(list(parts.values()), dim=1) if reading.pooling == "both" else parts[reading.pooling]


class Pixels:
    """The image itself as its features, (b, c h w) in [0, 1]."""

    identity = "pixels"

    def __call__(self, images: Tensor) -> dict[str, Tensor]:
        unit = 255 if images.dtype == torch.uint8 else 1
        return {"pixels": images.flatten(1).float() / unit}


@dataclass(frozen=True)
class Features:
    """Features of images by name, each (n, d) float32; labels (n,) or None; which images of the source, (n,)."""

    values: dict[str, Tensor]
    labels: Tensor | None
    places: Tensor


def extract(
    function: Extractor,
    source: Source,
    transform: Any,
    *,
    batch_size: int = 256,
    limit: int | None = None,
    workers: int = 0,
    device: torch.device | str = "cpu",
    progress: Callable[[int, int], None] | None = None,
) -> Features:
    """The features of each image of a source once, in order, or of `limit` of them that are always the same.

    With torch.distributed each process reads a part, and all have the whole in the end. progress(done, all) is called
    after each batch. Unreadable files are left out. UserError if none can be read, or if a feature is not finite.
    """
    from torch import distributed

    together = distributed.is_available() and distributed.is_initialized()
    rank, world = (distributed.get_rank(), distributed.get_world_size()) if together else (0, 1)
    shared = {"batch_size": batch_size, "limit": limit, "workers": workers, "device": device}
    parts, count = [], min(len(source), limit or len(source))
    for batch in evaluation_batches(source, transform, rank=rank, world=world, **shared):
        values = {name: value.cpu() for name, value in function(batch.images).items()}
        labels = None if batch.labels is None else batch.labels.cpu()
        parts.append((values, labels, batch.slots.cpu()))
        if progress:
            progress(min(world * sum(len(places) for *_, places in parts), count), count)
    if together:
        gathered: list[Any] = [None] * world
        distributed.all_gather_object(gathered, parts)
        parts = [part for own in gathered for part in own]
    if not parts:
        raise UserError("none of the images can be read, so there are no features")
    values = {name: torch.cat([part[name] for part, *_ in parts]) for name in parts[0][0]}
    for name, value in values.items():
        if not value.isfinite().all():
            raise UserError(f"{name}: some features are not finite, so nothing can be measured on them")
    labels = None if source.labels is None else torch.cat([labels for _, labels, _ in parts])
    return Features(values, labels, torch.cat([places for *_, places in parts]))


class Cache:
    """Features kept in a folder, found again by what they were made of: the same encoder, images and transform.

    A file is written whole or not at all, and verified by its sha256 when it is read; a damaged one is made anew.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def extract(
        self, function: Extractor, source: Source, transform: Any, *, view: Mapping[str, Any], **options: Any
    ) -> Features:
        """As the function `extract`; view: the options of the transform, since it cannot tell them itself."""
        device = torch.device(options.get("device", "cpu"))
        made_of = {
            "function": function.identity,
            "readings": [reading.name for reading in getattr(function, "readings", ())],
            "images": source.fingerprint,
            "view": dict(view),
            "limit": options.get("limit"),
            "precision": str(torch.get_autocast_dtype(device.type)) if torch.is_autocast_enabled(device.type) else "",
        }
        text = json.dumps(made_of, sort_keys=True)
        path = self.folder / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.safetensors"
        if (kept := _read(path, text)) is not None:
            return kept
        features = extract(function, source, transform, **options)
        if int(os.environ.get("RANK", 0)) == 0:
            _write(path, text, features)
        return features


def _digest(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(f"{name} {tuple(tensors[name].shape)}".encode())
        digest.update(tensors[name].contiguous().numpy())
    return digest.hexdigest()


def _write(path: Path, made_of: str, features: Features) -> None:
    tensors = {f"values/{name}": value.contiguous() for name, value in features.values.items()}
    tensors["places"] = features.places
    if features.labels is not None:
        tensors["labels"] = features.labels
    beside = path.with_suffix(f".{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        safetensors.torch.save_file(tensors, beside, metadata={"made_of": made_of, "sha256": _digest(tensors)})
        beside.replace(path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise UserError(f"{path.parent}: features cannot be kept there ({error.strerror or error})") from None


def _read(path: Path, made_of: str) -> Features | None:
    """The features of a file, or None if there is none or it is not whole."""
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no dictionary)
    except (OSError, safetensors.SafetensorError):
        return None
    if metadata.get("made_of") != made_of or metadata.get("sha256") != _digest(tensors):
        return None
    values = {name.removeprefix("values/"): value for name, value in tensors.items() if name.startswith("values/")}
    return Features(values, tensors.get("labels"), tensors["places"])


def readings(encoder: ViT, *, layer: Any = "last", pooling: str = "patch_mean", norm: str = "after") -> list[Reading]:
    """The readings that options mean: layer is a number, a list of them, "last" or "all"."""
    depth = len(encoder.blocks)
    layers: Iterator[int] | list[int] = {"last": [depth], "all": list(range(1, depth + 1))}.get(
        layer if isinstance(layer, str) else "", layer if isinstance(layer, list) else [layer]
    )
    return [Reading(number, pooling, norm) for number in layers]
