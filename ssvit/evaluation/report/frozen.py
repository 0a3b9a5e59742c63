"""Compute the frozen features of encoders and baselines in all processes. This module imports torch."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning_fabric import Fabric

from ssvit.checkpoints.checkpoint import Checkpoint
from ssvit.config.composed import Config
from ssvit.config.declaration import Options
from ssvit.data.augment.crop_options import CenterCrop
from ssvit.data.batch import EvalTransform
from ssvit.data.sources.base import Data, Source, masks, subset
from ssvit.evaluation.baselines import OWN, PIXELS, RANDOM, RANDOM_PREFIX
from ssvit.evaluation.duplicates import Thumbnails, duplicates
from ssvit.evaluation.features import Cache, Extractor, FeatureSets, Frozen, Half, PatchPixels, Pixels, extract
from ssvit.evaluation.features_options import Reading
from ssvit.evaluation.probes.base import Probe, check_labels
from ssvit.evaluation.report.against import Other
from ssvit.evaluation.report.options import Evaluate
from ssvit.evaluation.report.scores import Split
from ssvit.figures.display import Display
from ssvit.loading.encoder import load_encoder
from ssvit.models.encoder import Encoder
from ssvit.models.encoder_options import PATCHES
from ssvit.options import UserError, within
from ssvit.progress import progress
from ssvit.randomness import key


class EncoderViews(NamedTuple):
    """Combine an extractor with its name and transform.

    Attributes:
        name: Name of the encoder or baseline.
        prefix: Prefix of the names of its feature sets.
        function: The extractor.
        eval_transform: Transform of its images.
        view: Options of the transform.
        seen_alike: Whether the transform is that of the evaluated encoder.
    """

    name: str
    prefix: str
    function: Extractor
    eval_transform: EvalTransform
    view: CenterCrop
    seen_alike: bool = True


def images(config: Config, probes: Mapping[str, Probe]) -> Data:
    """Build the images of an evaluation.

    Args:
        config: Configuration of the evaluation.
        probes: Probes by name.

    Raises:
        UserError: If images or labels do not suffice for the probes.
    """
    options: Evaluate = config.options
    data: Data = config.build("data.source")
    part, test = data.reported
    labelled = any(probe.truth == "labels" for probe in probes.values())
    if labelled and (data.train.labels is None or test.labels is None):
        raise UserError("the images have no labels: give each class a folder of its own, or another data set (data=…)")
    if test.classes != data.train.classes:
        raise UserError(f"the {part} images are of other classes than the training images")
    data = _fewer(data, options.train_images, options.test_images)
    eval_transform = config.build("data.view")
    _, test = data.reported
    for name, probe in probes.items():
        with within(f"probes.{name}"):
            if data.train.labels is not None and test.labels is not None:
                check_labels(probe, data.train.labels, test.labels, data.classes)
        if probe.truth == "masks":
            for source in (data.train, test):
                masks(source, eval_transform.mask, torch.tensor([0]))
    return data


def read(
    options: Evaluate, data: Data, encoders: Sequence[EncoderViews], probes: Mapping[str, Probe], fabric: Fabric
) -> dict[str, Split]:
    """Compute the features for each probe in all processes, or read them from the cache.

    Args:
        options: The options of the evaluation.
        data: The images, as `images` returns them.
        encoders: The encoders, as `encoders_of` returns them.
        probes: The probes, by name.
        fabric: The processes.

    Returns:
        Feature sets by probe. Those of whole images come first and are shared by their probes; those of patches are of
        the
        last reading only.
    """
    of_images = [name for name, probe in probes.items() if probe.features != PATCHES]
    paired = options.duplicates and options.report  # near-duplicates are reported once, for the first probe's split
    splits = dict.fromkeys(of_images, _split(data, encoders, options, fabric, paired=paired)) if of_images else {}
    for name, probe in probes.items():
        if probe.features == PATCHES:
            fewer = _fewer(data, *probe.most_images)
            of_patches = [
                encoder._replace(function=_of_patches(encoder.function, encoders[0], half=probe.half))
                for encoder in encoders
            ]
            masked, first = probe.truth == "masks", paired and not splits
            splits[name] = _split(fewer, of_patches, options, fabric, masked=masked, paired=first)
    return splits


def _fewer(data: Data, train_images: int | None, test_images: int | None) -> Data:
    """Reduce the training and the reported images to these numbers (None: all) and drop other splits."""
    part, test = data.reported
    train, test = (
        source if images is None else subset(source, images=min(images, len(source)))
        for images, source in ((train_images, data.train), (test_images, test))
    )
    is_test = part == "test"
    return replace(data, train=train, validation=None if is_test else test, test=test if is_test else None)


def encoders_of(
    config: Config, checkpoint: Checkpoint, readings: Sequence[Reading], others: Sequence[Other]
) -> list[EncoderViews]:
    """Return the encoder of the checkpoint, the baselines, and the encoders for comparison.

    Args:
        config: Configuration of the evaluation.
        checkpoint: The evaluated checkpoint.
        readings: Readings of its features.
        others: Encoders for comparison.
    """

    def frozen(encoder: Encoder, readings: Sequence[Reading], weights: str) -> Frozen:
        return Frozen(encoder, readings, identity=json.dumps([weights, encoder.arguments]))

    def built(options: Options) -> Encoder:
        torch.manual_seed(key(0, "weights"))
        with within("encoder"):
            encoder: Encoder = options.build()
        return encoder

    options: Evaluate = config.options
    view = options.data.view
    transform = config.build("data.view")
    weights = f"{checkpoint.checksum}, resized as {options.encoder.resize}"
    found = [EncoderViews(OWN, "", frozen(built(options.encoder), readings, weights), transform, view)]
    if options.baselines:
        weights = f"random weights of torch {torch.__version__}"
        untrained = frozen(built(options.encoder.loaded()), readings, weights)
        found.append(EncoderViews(RANDOM, RANDOM_PREFIX, untrained, transform, view))
        found.append(EncoderViews(PIXELS, PIXELS, Pixels(), transform, view))
    for other in others:
        encoder = load_encoder(other.loading.changed(announce=True))
        weights = f"{other.loading.checkpoint().checksum}, resized as {other.loading.resize}"
        own = _resized(view, other.image_size)
        function = frozen(encoder, other.readings, weights)
        seen = transform if own == view else own.build()
        found.append(EncoderViews(other.name, f"{other.name} ", function, seen, own, own == view))
    return found


def _of_patches(function: Extractor, own: EncoderViews, *, half: bool) -> Extractor:
    """Return an extractor of patch features: those of an encoder's last reading, or the pixels of patches.

    Args:
        function: Extractor of whole images.
        own: The evaluated encoder.
        half: Whether to convert to float16.
    """
    of_patches: Extractor
    if isinstance(function, Frozen):
        last = max(function.readings, key=lambda reading: reading.layer)
        of_patches = Frozen(function.encoder, [replace(last, pooling=PATCHES)], identity=function.weights)
    else:
        assert isinstance(own.function, Frozen)
        of_patches = PatchPixels(own.function.encoder.patch_size)
    return Half(of_patches) if half else of_patches


def _resized(view: CenterCrop, size: tuple[int, int]) -> CenterCrop:
    """Return the options of a transform that shows the same part of an image at another size (height, width)."""
    if size == view.size:
        return view
    resize = None if view.resize is None else round(view.resize * min(size) / min(view.size))
    return view.changed(size=size, resize=resize)


def _split(
    data: Data,
    encoders: Sequence[EncoderViews],
    options: Evaluate,
    fabric: Fabric,
    *,
    masked: bool = False,
    paired: bool = False,
) -> Split:
    """Compute the features, distributed over processes, or read them from the cache.

    Args:
        data: The images.
        encoders: The encoders, the evaluated one first.
        options: The options of the evaluation.
        fabric: The processes.
        masked: Whether to read segmentation masks.
        paired: Whether to detect near-duplicates.
    """
    loading: dict[str, Any] = {
        "batch_size": options.batch_size,
        "workers": options.workers,
        "timeout": options.loader_timeout,
        "device": fabric.device,
    }
    read_as = {name: getattr(options.data.source, name, None) for name in ("channels", "range")}

    def extracted(
        function: Extractor, source: Source, transform: EvalTransform, view: CenterCrop, what: str, *, anew: bool
    ) -> FeatureSets:
        if fabric.is_global_zero:
            loading["progress"] = progress(what, " images")
        with fabric.autocast():
            if options.cache is None:
                return extract(function, source, transform, **loading)
            cache = Cache(Path(options.cache))
            made_of = {"kind": type(view).__name__, **view.values(), **read_as}
            return cache.extract(function, source, transform, transform_options=made_of, anew=anew, **loading)

    own, *others = encoders
    seen = [*encoders]
    if paired:
        seen.append(EncoderViews("thumbnails", "", Thumbnails(), own.eval_transform, own.view))

    def all_extracted(source: Source, which: str, *, anew: bool = False) -> FeatureSets:
        found: FeatureSets | None = None
        for encoder in seen:
            function, prefix = encoder.function, encoder.prefix
            inner = function.function if isinstance(function, Half) else function
            if isinstance(inner, Frozen):
                inner.encoder.to(fabric.device)
            what = f"{encoder.name or 'encoder'}, {which} images"
            sets = extracted(function, source, encoder.eval_transform, encoder.view, what, anew=anew)
            named = {_named(prefix, name): value for name, value in sets.values.items()}
            sets = replace(sets, values=named)
            if found and not found.shows(sets, seen_alike=encoder.seen_alike):
                if anew:
                    raise UserError(f"the {which} images change while features of them are computed")
                # The cached features are of files that were replaced by others of the same name and size.
                return all_extracted(source, which, anew=True)
            found = found.beside(sets) if found else sets
        assert found is not None
        return found

    parts, thumbnails = [], []
    part, test_source = data.reported
    for which, source in (("training", data.train), (part, test_source)):
        found = all_extracted(source, which)
        if paired:
            thumbnails.append(found.values.pop("thumbnails"))
        if masked:
            found = replace(found, masks=masks(source, own.eval_transform.mask, found.places))
        parts.append(found)
    train, test = parts
    pairs = duplicates(*thumbnails) if paired and fabric.is_global_zero else None
    names = {one.name: tuple(_named(one.prefix, name) for name in one.function.identities) for one in others}
    display = Display.of(options.data)
    return Split(tuple(own.function.identities), train, test, own.eval_transform, part, names, pairs, display)


def _named(prefix: str, features: str) -> str:
    """Return the name of a feature set with the prefix of its encoder."""
    return features if features == prefix else f"{prefix}{features}"
