"""Compute frozen features for the probes by an encoder in eval mode, and optionally cache them on disk.

An `Extractor` is a function of images that returns features, such as `Frozen` for an encoder or `Pixels` for a
baseline.

Shapes use b, n images, c channels, h, w pixels, y, x rows and columns of patches, d width.
"""

import contextlib
import hashlib
import itertools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, Unpack

import safetensors
import safetensors.torch
import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from ssvit.data.batch import Transform
from ssvit.data.loader import Loading, evaluation_batches
from ssvit.data.sources.base import Source, is_multi_label
from ssvit.evaluation.features_options import Reading
from ssvit.evaluation.processes import gather, rank_and_world
from ssvit.models.encoder import Encoder
from ssvit.options import UserError

_LARGEST = 32  # maximum side in pixels of an image that is used as features
_FILE = _VALUES, _PLACES, _DIGESTS = ("values", "places", "digests")  # tensors in a file of cached features


@dataclass(frozen=True)
class Features:
    """Store features of images, with labels and class names.

    Attributes:
        values: One vector for each image, (n, d), or for each patch, (n, y, x, d).
        labels: Labels of the source, (n,) or (n, classes) bool; None for images without labels.
        classes: Class names.
        masks: Segmentation masks, (n, h, w) uint8, where 255 is ignored; None for images without masks.
    """

    values: Tensor
    labels: Tensor | None
    classes: Sequence[str]
    masks: Tensor | None = None

    @property
    def known_labels(self) -> Tensor:
        """Return the labels of images that have labels."""
        assert self.labels is not None
        return self.labels

    @property
    def known_masks(self) -> Tensor:
        """Return the masks of images that have masks."""
        assert self.masks is not None
        return self.masks


def check(train: Features, test: Features, what: str) -> None:
    """Check that features and labels suffice for a probe.

    Args:
        train: Features of the training images.
        test: Features of the test images.
        what: Name of the probe in messages, such as "a k-NN vote".

    Raises:
        UserError: If there are fewer than two classes, labels are missing or wrong, or features are not finite.
    """
    if len(train.classes) < 2:
        raise UserError(f"{what} needs two classes or more, and there are {len(train.classes)}")
    for which, features in (("training", train), ("test", test)):
        count, labels, k = len(features.values), features.labels, len(train.classes)
        if labels is None:
            raise UserError(f"the {which} images have no labels, which {what} needs")
        if not count:
            raise UserError(f"there are no {which} images")
        if len(labels) != count:
            raise UserError(f"{len(labels)} labels for {count} {which} images")
        if is_multi_label(labels):
            if labels.shape[1] != k:
                raise UserError(f"labels of {labels.shape[1]} classes for {which} images of {k}")
        elif len(wrong := labels[(labels < 0) | (labels >= k)]):
            raise UserError(f"label {wrong[0].item()} of a {which} image is outside of [0, {k}), its classes")
        finite = features.values.flatten(1).isfinite().all(1)
        if not finite.all():
            row = (~finite).nonzero()[0, 0].item()
            raise UserError(f"the features of {which} image {row} are not finite")
    if train.values.shape[-1] != (width := test.values.shape[-1]):
        raise UserError(f"training features have width {train.values.shape[-1]}, but test features {width}")


class Extractor(Protocol):
    """Compute features of images (b, c, h, w) by name, each (b, d) or (b, y, x, d).

    Attributes:
        identity: String that identifies the function.
        identities: The same for each feature set separately.
    """

    @property
    def identity(self) -> str:
        """Return a string that identifies the function."""
        ...

    @property
    def identities(self) -> Mapping[str, str]:
        """Return a string that identifies the function of each feature set."""
        ...

    def __call__(self, images: Tensor) -> dict[str, Tensor]:
        """Return the features of images (b, c, h, w) by name."""
        ...


class Frozen:
    """Extract features of an encoder at some readings.

    Args:
        encoder: The encoder.
        readings: Readings, which the encoder must support.
        identity: String that identifies the weights, for a `Cache`.
    """

    def __init__(self, encoder: Encoder, readings: Sequence[Reading], *, identity: str) -> None:
        for reading in readings:
            reading.check(encoder.options)
        self.encoder, self.readings, self.weights = encoder, tuple(readings), identity
        self.identity = f"{identity} {' '.join(reading.name for reading in readings)}"
        self.identities = {reading.name: f"{identity} {reading.name}" for reading in readings}

    @torch.no_grad()
    def __call__(self, images: Tensor) -> dict[str, Tensor]:
        """Return the features of images by name of the reading.

        Args:
            images: Images, (b, c, h, w), uint8 or in [0, 1].

        Returns:
            Features, each (b, d), (b, 2 d) or (b, y, x, d) float32.
        """
        mode = self.encoder.training
        self.encoder.eval()
        try:
            last = max(reading.layer for reading in self.readings)
            return {
                reading.name: self._pooled(outputs, reading, images).float()
                for layer, outputs in enumerate(itertools.islice(self.encoder.layers(images), last), start=1)
                for reading in self.readings
                if reading.layer == layer
            }
        finally:
            self.encoder.train(mode)

    def _pooled(self, outputs: Tensor, reading: Reading, images: Tensor) -> Tensor:
        normed = self.encoder.norm(outputs) if reading.norm == "after" else outputs
        return self.encoder.pooled(normed, reading.pooling, images)


class Half:
    """Convert the features of another extractor to float16, which halves the memory."""

    def __init__(self, function: Extractor) -> None:
        self.function, self.identity = function, f"{function.identity} in float16"
        self.identities = {name: f"{identity} in float16" for name, identity in function.identities.items()}

    def __call__(self, images: Tensor) -> dict[str, Tensor]:
        """Return the features in float16; values out of its range are infinite."""
        return {name: values.half() for name, values in self.function(images).items()}


class Pixels:
    """Use the pixels of an image as its features, (b, c h w) in [0, 1], average-pooled to at most 32 pixels a side."""

    identity = f"pixels, at most {_LARGEST} a side"
    identities: Mapping[str, str] = {"pixels": identity}

    def __call__(self, images: Tensor) -> dict[str, Tensor]:
        """Return the pixels of images (b, c, h, w), uint8 or in [0, 1]."""
        images = images.float() / (255 if images.dtype == torch.uint8 else 1)
        h, w = (min(side, _LARGEST) for side in images.shape[2:])
        return {"pixels": F.adaptive_avg_pool2d(images, (h, w)).flatten(1)}


class PatchPixels:
    """Use the pixels of each patch of p x q pixels as its features, (b, y, x, c p q) in [0, 1]."""

    def __init__(self, patch_size: tuple[int, int]) -> None:
        self.patch_size = patch_size
        self.identity = "pixels of patches of {} x {}".format(*patch_size)
        self.identities: Mapping[str, str] = {"pixels": self.identity}

    def __call__(self, images: Tensor) -> dict[str, Tensor]:
        """Return the pixels of images (b, c, h, w), uint8 or in [0, 1]."""
        images = images.float() / (255 if images.dtype == torch.uint8 else 1)
        p, q = self.patch_size
        return {"pixels": rearrange(images, "b c (y p) (x q) -> b y x (c p q)", p=p, q=q)}


@dataclass(frozen=True)
class FeatureSets:
    """Store features of the same images by several extractors.

    Attributes:
        values: Features by name, each (n, d) or (n, y, x, d).
        source: Source of the images.
        places: Indices of the images in the source, (n,).
        digests: Hashes of the transformed pixels, (n, 2) int64.
        masks: Segmentation masks, (n, h, w) uint8, or None.
    """

    values: dict[str, Tensor]
    source: Source
    places: Tensor
    digests: Tensor
    masks: Tensor | None = None

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, name: str) -> Features:
        return Features(self.values[name], self.labels, self.source.classes, self.masks)

    @property
    def labels(self) -> Tensor | None:
        """Return the labels of the source, or None."""
        return None if self.source.labels is None else self.source.labels[self.places]

    @property
    def known_labels(self) -> Tensor:
        """Return the labels of images that have labels."""
        assert self.source.labels is not None
        return self.source.labels[self.places]

    def shows(self, other: "FeatureSets", *, seen_alike: bool = True) -> bool:
        """Return whether these feature sets are of the same images as others.

        If `seen_alike` (both used the same transform), the transformed pixels are compared too.
        """
        same = torch.equal(other.places, self.places)
        return same and (torch.equal(other.digests, self.digests) or not seen_alike)

    def beside(self, other: "FeatureSets") -> "FeatureSets":
        """Return these feature sets joined with others of the same images."""
        return replace(self, values=self.values | other.values)

    def images(self, rows: Tensor, transform: Transform) -> Tensor:
        """Return the transformed images at some rows: (b,) -> (b, c, h, w) uint8."""
        batches = evaluation_batches(self.source.take(self.places[rows]), transform, batch_size=len(rows))
        return torch.cat([batch.images for batch in batches])

    def picture(self, row: int) -> str:
        """Return the name of the image at a row."""
        return self.source.name(int(self.places[row]))


def copies(train: FeatureSets, test: FeatureSets) -> list[tuple[int, int]]:
    """Return exact copies of training images among the test images as pairs of rows (test, train)."""
    rows: dict[tuple[int, ...], int] = {}
    for row, digest in enumerate(map(tuple, train.digests.tolist())):
        rows.setdefault(digest, row)
    return [(row, rows[digest]) for row, digest in enumerate(map(tuple, test.digests.tolist())) if digest in rows]


def extract(
    function: Extractor,
    source: Source,
    transform: Transform,
    *,
    batch_size: int = 256,
    limit: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    **loading: Unpack[Loading],
) -> FeatureSets:
    """Extract the features of all images of a source in order, or of a fixed sample of `limit` images.

    Images are distributed over processes, and each process receives all features. Unreadable files are skipped.

    Args:
        function: Extractor.
        source: Images.
        transform: Transform of the evaluation.
        batch_size: Batch size of each process.
        limit: Number of images; None for all.
        progress: Called with the numbers of processed and of all images after each batch.
        **loading: Further options of `evaluation_batches`.

    Raises:
        UserError: In all processes, if no image is readable or a feature is not finite.
    """
    rank, world = rank_and_world()
    count = len(source) if limit is None else min(limit, len(source))

    def read() -> list[tuple[dict[str, Tensor], Tensor, Tensor]]:
        parts, done = [], 0
        for batch in evaluation_batches(
            source, transform, batch_size=batch_size, limit=limit, rank=rank, world=world, **loading
        ):
            values = {name: value.cpu() for name, value in function(batch.images).items()}
            parts.append((values, batch.slots.cpu(), _digests(batch.images)))
            done += world * len(batch.slots)
            if progress:
                progress(min(done, count), count)
        return parts

    parts = list(itertools.chain.from_iterable(gather(read)))
    if not parts:
        raise UserError("none of the images can be read, so there are no features")
    values, places, digests = zip(*parts, strict=True)
    joined = {name: torch.cat([part[name] for part in values]) for name in values[0]}
    for name, value in joined.items():
        if not value.isfinite().all():
            raise UserError(f"{name}: some features are not finite, so nothing can be measured on them")
    return FeatureSets(joined, source, torch.cat(places), torch.cat(digests))


def _digests(images: Tensor) -> Tensor:
    """Return the 128-bit BLAKE2b hash of each image's pixels: (b, c, h, w) uint8 -> (b, 2) int64."""
    hashes = (hashlib.blake2b(pixels, digest_size=16).digest() for pixels in images.contiguous().cpu().numpy())
    return torch.frombuffer(bytearray(b"".join(hashes)), dtype=torch.int64).view(-1, 2)


class Cache:
    """Cache features in a folder, under a hash of extractor, images, transform and precision.

    Each feature set has a file, which is written atomically and verified by its sha256; damaged files are recomputed.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def extract(
        self,
        function: Extractor,
        source: Source,
        transform: Transform,
        *,
        transform_options: Mapping[str, object],
        anew: bool = False,
        **options: Any,
    ) -> FeatureSets:
        """Return the features from the cache, or compute and store them by `extract`.

        If one of the feature sets is not cached, all are recomputed, since that takes a single forward pass. Labels are
        not cached, because features do not depend on them.

        Args:
            function: Extractor.
            source: Images.
            transform: Transform of the evaluation.
            transform_options: Options of the transform, for the hash.
            anew: Recompute the features and replace those in the cache.
            **options: Further arguments of `extract`.
        """
        device = torch.device(options.get("device", "cpu"))
        shared = {
            "images": source.fingerprint,
            "view": dict(transform_options),
            "limit": options.get("limit"),
            "precision": str(torch.get_autocast_dtype(device.type)) if torch.is_autocast_enabled(device.type) else "",
        }
        made_of = {
            name: json.dumps(shared | {"function": identity}, sort_keys=True)
            for name, identity in function.identities.items()
        }
        paths = {
            name: self.folder / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.safetensors"
            for name, text in made_of.items()
        }
        kept = {name: file for name, path in paths.items() if (file := _read(path, made_of[name])) is not None}
        first: dict[str, Tensor] = next(iter(kept.values()), {})
        of_images = (_PLACES, _DIGESTS)
        is_kept = (
            not anew
            and len(kept) == len(paths)
            and all(file[part].equal(first[part]) for file in kept.values() for part in of_images)
        )
        # All processes use the cache or none does, since their folders may be on different machines.
        if all(gather(lambda: is_kept)):
            values = {name: file[_VALUES] for name, file in kept.items()}
            return FeatureSets(values, source, first[_PLACES], first[_DIGESTS])
        features = extract(function, source, transform, **options)

        def write() -> None:
            for name, path in paths.items():
                file = {_VALUES: features.values[name], _PLACES: features.places, _DIGESTS: features.digests}
                _write(path, made_of[name], file)

        gather(write if rank_and_world()[0] == 0 else lambda: None)
        return features


def _digest(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(f"{name} {tuple(tensors[name].shape)}".encode())
        digest.update(tensors[name].contiguous().numpy().data)
    return digest.hexdigest()


def _write(path: Path, made_of: str, tensors: Mapping[str, Tensor]) -> None:
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    beside = path.with_suffix(f".{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for leftover in path.parent.glob(f"{path.stem}.*.part"):
            leftover.unlink(missing_ok=True)
        safetensors.torch.save_file(tensors, beside, metadata={"made_of": made_of, "sha256": _digest(tensors)})
        beside.replace(path)
    except FileNotFoundError:
        pass  # a process that writes the same features removed the partial file
    except (OSError, safetensors.SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{path.parent}: features cannot be kept there ({reason})") from None
    finally:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)


def _read(path: Path, made_of: str) -> dict[str, Tensor] | None:
    """Return the tensors of a file, or None if it is missing, incomplete or damaged."""
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no dictionary)
    except (OSError, safetensors.SafetensorError):
        return None
    is_whole = metadata.get("made_of") == made_of and metadata.get("sha256") == _digest(tensors)
    return tensors if is_whole and set(tensors) == set(_FILE) else None
