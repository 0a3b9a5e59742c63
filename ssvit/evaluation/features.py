"""Compute frozen features for the probes by an encoder in eval mode, and optionally cache them on disk.

An `Extractor` is a function of images that returns features, such as `Frozen` for an encoder or `Pixels` for a
baseline.

Shapes use b, n images, c channels, h, w pixels, y, x rows and columns of patches, d width.
"""

import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, Unpack

import safetensors.torch
import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from ssvit.data.batch import Transform
from ssvit.data.loader import Loading, check_readable, evaluation_batches
from ssvit.data.sources import decode_options
from ssvit.data.sources.base import Source, Unreadable
from ssvit.devices import Precision
from ssvit.engine import atomic_io
from ssvit.engine.clock import clock
from ssvit.errors import UserError
from ssvit.evaluation.options import BF16, FeatureSpec
from ssvit.evaluation.processes import all_gather_results, rank_and_world
from ssvit.kernels import inference
from ssvit.models.encoder import Encoder, scaled

_FEW = 16  # images by which the cost of an extractor is measured
_LARGEST = 32  # maximum side in pixels of an image that is used as features
_VALUES, _ROWS = "values", "places"  # tensors in a file of cached features
_CHECKSUM_BYTES = hashlib.sha256().digest_size


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


class Extractor(Protocol):
    """Compute features of images (b, c, h, w) by name, each (b, d) or (b, y, x, d)."""

    @property
    def identities(self) -> Mapping[str, str]:
        """Return a string that identifies the function of each feature set by its name."""
        ...

    def __call__(self, images: Tensor) -> dict[str, Tensor]:
        """Return the features of images (b, c, h, w) by name."""
        ...


class Frozen:
    """Extract features of an encoder described by some specs.

    Until `prepare` is called, weights may change, and the precision is that of the context.

    Args:
        encoder: The encoder.
        specs: Descriptions of the features, which the encoder must support.
        identity: String that identifies the weights, for `cached`.
        dtype: Data type of the features.
    """

    def __init__(
        self,
        encoder: Encoder,
        specs: Sequence[FeatureSpec],
        *,
        identity: str,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        for spec in specs:
            spec.check(encoder.options)
        self.encoder, self.specs, self.weights, self.dtype = encoder, tuple(specs), identity, dtype
        self.precision: Precision | None = None
        self._prepared = encoder

    @property
    def identity(self) -> str:
        """Return a string that identifies the features: weights, specs and precision."""
        return f"{self._function} {' '.join(spec.name for spec in self.specs)}"

    @property
    def identities(self) -> Mapping[str, str]:
        """Return a string that identifies each feature set by its name."""
        return {spec.name: f"{self._function} {spec.name} {self.dtype}" for spec in self.specs}

    @property
    def _function(self) -> str:
        return f"{self.weights} {BF16}" if self.precision == BF16 else self.weights

    def prepare(self, device: torch.device, precision: Precision) -> None:
        """Move the encoder to a device, whose weights no longer change, and compute in a precision from now on."""
        if precision == self.precision and device == next(self.encoder.parameters()).device:
            return
        self.encoder.to(device).eval()
        self.precision, self._prepared = precision, inference.prepared(self.encoder, precision)

    @torch.no_grad()
    def __call__(self, images: Tensor) -> dict[str, Tensor]:
        """Return the features of images by name of the spec.

        Args:
            images: Images, (b, c, h, w), uint8 or in [0, 1].

        Returns:
            Features, each (b, d), (b, 2 d) or (b, y, x, d). Values out of the range of the data type are infinite.
        """
        encoder = self._prepared
        mode = encoder.training
        encoder.eval()
        context = inference.autocast(self.precision, images.device) if self.precision else nullcontext()
        try:
            chosen = {spec.layer for spec in self.specs}
            with context:
                outputs: Iterable[tuple[int, Tensor]]
                if chosen == {encoder.depth}:
                    outputs = [(encoder.depth, encoder.last_layer(images))]
                else:
                    outputs = enumerate(itertools.islice(encoder.layers(images), max(chosen)), start=1)
                return {
                    spec.name: self._pooled(tokens, spec, images)
                    for layer, tokens in outputs
                    for spec in self.specs
                    if spec.layer == layer
                }
        finally:
            encoder.train(mode)

    def _pooled(self, outputs: Tensor, spec: FeatureSpec, images: Tensor) -> Tensor:
        encoder = self._prepared
        normed = encoder.norm(outputs) if spec.norm == "after" else outputs
        pooled = encoder.pooled(normed, spec.pooling, images)
        return pooled.to(self.dtype, copy=True)  # a view of one token would keep all tokens in memory


class Pixels:
    """Use the pixels of an image as its features, (b, c h w) in [0, 1], average-pooled to at most 32 pixels a side."""

    identities: Mapping[str, str] = {"pixels": f"pixels, at most {_LARGEST} a side"}

    def __call__(self, images: Tensor) -> dict[str, Tensor]:
        """Return the pixels of images (b, c, h, w), uint8 or in [0, 1]."""
        images = scaled(images)
        h, w = (min(side, _LARGEST) for side in images.shape[2:])
        return {"pixels": F.adaptive_avg_pool2d(images, (h, w)).flatten(1)}


class PatchPixels:
    """Use the pixels of each patch of p x q pixels as its features, (b, y, x, c p q) in [0, 1]."""

    def __init__(self, patch_size: tuple[int, int], dtype: torch.dtype = torch.float32) -> None:
        self.patch_size, self.dtype = patch_size, dtype
        self.identities: Mapping[str, str] = {"pixels": "pixels of patches of {} x {} {}".format(*patch_size, dtype)}

    def __call__(self, images: Tensor) -> dict[str, Tensor]:
        """Return the pixels of images (b, c, h, w), uint8 or in [0, 1]."""
        images = scaled(images)
        p, q = self.patch_size
        return {"pixels": rearrange(images, "b c (y p) (x q) -> b y x (c p q)", p=p, q=q).to(self.dtype)}


@dataclass(frozen=True)
class FeatureSets:
    """Store features of the same images by several extractors.

    Attributes:
        values: Features by name, each (n, d) or (n, y, x, d).
        source: Source of the images.
        indices: Indices of the images in the source, (n,).
        masks: Segmentation masks, (n, h, w) uint8, or None.
    """

    values: dict[str, Tensor]
    source: Source
    indices: Tensor
    masks: Tensor | None = None

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, name: str) -> Features:
        return Features(self.values[name], self.labels, self.source.classes, self.masks)

    @property
    def labels(self) -> Tensor | None:
        """Return the labels of the source, or None."""
        return None if self.source.labels is None else self.source.labels[self.indices]

    @property
    def known_labels(self) -> Tensor:
        """Return the labels of images that have labels."""
        assert self.source.labels is not None
        return self.source.labels[self.indices]

    def joined(self, other: "FeatureSets") -> "FeatureSets":
        """Return these feature sets together with others of the same images.

        Raises:
            UserError: The images differ, because files became readable or unreadable.
        """
        if not torch.equal(other.indices, self.indices):
            raise UserError("the readable images have changed since features were cached: evaluate with cache=null")
        return replace(self, values=self.values | other.values)

    def images(self, rows: Tensor, transform: Transform) -> Tensor:
        """Return the transformed images at some rows: (b,) -> (b, c, h, w) uint8."""
        batches = evaluation_batches(self.source.take(self.indices[rows]), transform, batch_size=len(rows))
        return torch.cat([batch.images for batch in batches])

    def picture(self, row: int) -> str:
        """Return the name of the image at a row."""
        return self.source.name(int(self.indices[row]))


def extract(
    function: Extractor,
    source: Source,
    transform: Transform,
    *,
    batch_size: int = 256,
    progress: Callable[[int, int], None] | None = None,
    report: Callable[[int, list[Unreadable]], None] | None = None,
    **loading: Unpack[Loading],
) -> FeatureSets:
    """Extract the features of all images of a source in order.

    Images are distributed over processes, and each process receives all features. Unreadable files are skipped.

    Args:
        function: Extractor.
        source: Images.
        transform: Transform of the evaluation.
        batch_size: Batch size of each process.
        progress: Called with the numbers of processed and of all images after each batch.
        report: As for `evaluation_batches`.
        **loading: Further options of `evaluation_batches`.

    Raises:
        UserError: In all processes, if no image is readable or a feature is not finite.
    """
    rank, world = rank_and_world()

    def read() -> list[tuple[dict[str, Tensor], Tensor]]:
        parts, done = [], 0
        batches = evaluation_batches(
            source, transform, batch_size=batch_size, rank=rank, world=world, report=report, **loading
        )
        for batch in batches:
            values = {name: value.cpu() for name, value in function(batch.images).items()}
            parts.append((values, batch.slots.cpu()))
            done += world * len(batch.slots)
            if progress:
                progress(min(done, len(source)), len(source))
        return parts

    parts = list(itertools.chain.from_iterable(all_gather_results(read)))
    if not parts:
        raise UserError("none of the images can be read, so there are no features")
    values, indices = zip(*parts, strict=True)
    if report is None:
        check_readable(sum(map(len, indices)), len(source))
    joined = {name: torch.cat([part[name] for part in values]) for name in values[0]}
    for name, value in joined.items():
        if not value.isfinite().all():
            raise UserError(f"{name}: some features are not finite, so they cannot be evaluated")
    return FeatureSets(joined, source, torch.cat(indices))


def timed(function: Extractor, source: Source, transform: Transform, **loading: Any) -> tuple[float, FeatureSets]:
    """Return the seconds in which an extractor reads and processes an image, and the features of a few images.

    Args:
        function: Extractor.
        source: Images.
        transform: Transform of the evaluation.
        **loading: Further arguments of `extract`.
    """
    loading = {"report": lambda *_: None, **loading}  # the pass over all images counts the unreadable ones
    few, device = source.take(torch.arange(min(_FEW, len(source)))), torch.device(loading.get("device", "cpu"))
    for _ in range(2):  # the first pass initialises libraries
        began = clock(device)
        features = extract(function, few, transform, **loading)
        seconds = clock(device) - began
    return seconds / len(few), features


def cached(
    folder: Path,
    function: Extractor,
    source: Source,
    transform: Transform,
    *,
    transform_options: Mapping[str, object],
    **options: Any,
) -> FeatureSets:
    """Return the features from a folder, or compute them by `extract` and store them there.

    They are stored under a hash of extractor, images, their contents, transform and precision. Each feature set has a
    file with its sha256; damaged files are recomputed. If one of the feature sets is not stored, all are recomputed,
    since that takes a single forward pass. Labels are not stored, because features do not depend on them.

    Args:
        folder: The folder.
        function: Extractor.
        source: Images.
        transform: Transform of the evaluation.
        transform_options: Options of the transform, for the hash.
        **options: Further arguments of `extract`.
    """
    keys = _keys(function, source, transform_options)
    paths = {name: _path(folder, key) for name, key in keys.items()}
    files = {name: _read(path, keys[name]) for name, path in paths.items()}
    complete = [file for file in files.values() if file is not None]
    is_cached = len(complete) == len(files) and all(file[_ROWS].equal(complete[0][_ROWS]) for file in complete)
    # All processes use the cache or none does, since their folders may be on different machines.
    if all(all_gather_results(lambda: is_cached)):
        values = dict(zip(files, (file[_VALUES] for file in complete), strict=True))
        return FeatureSets(values, source, complete[0][_ROWS])
    features = extract(function, source, transform, **options)

    def write() -> None:
        for name, path in paths.items():
            tensors = {_VALUES: features.values[name].contiguous(), _ROWS: features.indices}
            content = safetensors.torch.save(tensors)
            atomic_io.write_files(folder, {path.name: _checksum(content, keys[name]) + content})

    all_gather_results(write if rank_and_world()[0] == 0 else lambda: None)
    return features


def is_cached(folder: Path, function: Extractor, source: Source, *, transform_options: Mapping[str, object]) -> bool:
    """Return whether all features are in the folder, see `cached`; their files are not read."""
    return all(_path(folder, key).is_file() for key in _keys(function, source, transform_options).values())


def _keys(function: Extractor, source: Source, transform_options: Mapping[str, object]) -> dict[str, str]:
    """Return what determines each feature set, as text, by its name."""
    images = [source.fingerprint, source.contents, decode_options.VERSION]
    shared = {"images": images, "view": dict(transform_options)}
    return {name: json.dumps([shared, identity], sort_keys=True) for name, identity in function.identities.items()}


def _path(folder: Path, key: str) -> Path:
    return folder / hashlib.sha256(key.encode()).hexdigest()[:32]


def _checksum(content: bytes, key: str) -> bytes:
    return hashlib.sha256(key.encode() + content).digest()


def _read(path: Path, key: str) -> dict[str, Tensor] | None:
    """Return the tensors of a cached file, or None if it is missing, incomplete or damaged."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    content = data[_CHECKSUM_BYTES:]
    return safetensors.torch.load(content) if _checksum(content, key) == data[:_CHECKSUM_BYTES] else None
