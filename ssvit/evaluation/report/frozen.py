"""Compute the frozen features of encoders and baselines in all processes. This module imports torch."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ssvit.checkpoints.checkpoint import Checkpoint
from ssvit.config.declaration import Options
from ssvit.data.fingerprints import fingerprints, read_fingerprints
from ssvit.data.loader import Loading, Tally
from ssvit.data.sources.base import IGNORED, Data, Source, Unreadable, masks, missing_labels, reduced
from ssvit.data.sources.base_options import View
from ssvit.engine.processes import is_main_process
from ssvit.engine.progress import progress
from ssvit.engine.randomness import key
from ssvit.errors import UserError, print_lines, within
from ssvit.evaluation.baselines import OWN, PIXELS, RANDOM, RANDOM_PREFIX
from ssvit.evaluation.duplicates import Grey, Thumbnails, duplicates
from ssvit.evaluation.features import Extractor, FeatureSets, Frozen, PatchPixels, Pixels, cached, extract
from ssvit.evaluation.leakage import Fingerprints, overlap
from ssvit.evaluation.options import FeatureSpec
from ssvit.evaluation.probes.base import Probe, check_labels
from ssvit.evaluation.report.against import Other
from ssvit.evaluation.report.options import Evaluate
from ssvit.evaluation.report.scores import Split
from ssvit.figures.display import Display
from ssvit.kernels.inference import resolved
from ssvit.loading.encoder import load_encoder
from ssvit.loading.options import LoadEncoder
from ssvit.models.encoder import Encoder
from ssvit.models.encoder_options import PATCHES

_SAMPLED = 16  # masks whose values are checked at the start


class Evaluated(NamedTuple):
    """Combine an extractor with its name and transform.

    Attributes:
        name: Name of the encoder or baseline.
        prefix: Prefix of the names of its feature sets.
        function: The extractor.
        view: Options of the transform of its images.
        source: Options of the data set, with the pixel format of the encoder.
        data: The images of this data set, as `images` returns them.
        run_folder: Folder of the run that trained the encoder; None for a baseline or foreign weights.
    """

    name: str
    prefix: str
    function: Extractor
    view: View
    source: Options
    data: Data
    run_folder: Path | None = None

    def named(self, features: str) -> str:
        """Return the name of a feature set with the prefix."""
        return features if features == self.prefix else f"{self.prefix}{features}"


def images(options: Evaluate, probes: Mapping[str, Probe]) -> Data:
    """Build the images of an evaluation.

    Args:
        options: Options of the evaluation.
        probes: Probes by name.

    Raises:
        UserError: If images or labels do not suffice for the probes.
    """
    data: Data = options.build_part("data").for_development(options.development)
    part, test = data.test_or_validation
    missing = missing_labels(data.train, **{part: test})
    if missing and any(probe.truth == "labels" for probe in probes.values()):
        raise UserError(missing)
    if test.classes != data.train.classes:
        raise UserError(f"the {part} images have other classes than the training images")
    data = fewer(data, options.train_images, options.test_images)
    _, test = data.test_or_validation
    for name, probe in probes.items():
        with within(f"probes.{name}"):
            if data.train.labels is not None and test.labels is not None:
                check_labels(probe, data.train.labels, test.labels, data.classes)
        if probe.truth == "masks":
            for which, source in (("training", data.train), (part, test)):
                if has_one_class(source) and is_main_process():
                    reason = f"have only the values 0 and {IGNORED}, and pixels of {IGNORED} are ignored"
                    remedy = f"data.mask_classes={{background: 0, object: {IGNORED}}} makes them a class"
                    print_lines(f"warning: a sample of {which} masks {reason}; {remedy}")
    return data


def has_one_class(source: Source) -> bool:
    """Return whether a sample of masks has only pixels of class 0 and ignored ones, as if 255 stood for a class."""
    sample = torch.arange(0, len(source), math.ceil(len(source) / _SAMPLED))
    counts = masks(source, lambda mask: mask.flatten().bincount(minlength=256), sample)
    return counts.sum(0).nonzero().flatten().tolist() == [0, IGNORED]


def features_of_probes(
    options: Evaluate, encoders: Sequence[Evaluated], probes: Mapping[str, Probe], device: torch.device
) -> dict[str, Split]:
    """Compute the features for each probe in all processes, or read them from the cache.

    Args:
        options: The options of the evaluation.
        encoders: The encoders, as `encoders_of` returns them.
        probes: The probes, by name.
        device: The device of this process.

    Returns:
        Feature sets by probe. All probes of whole images share one feature set, which comes first. Each probe of
        patches has its own, of the last layer only: patch features of all layers would not fit into memory.
    """
    of_images = [name for name, probe in probes.items() if probe.features != PATCHES]
    paired = options.duplicates and options.report  # near-duplicates are reported once, for the first probe's split
    splits = dict.fromkeys(of_images, _split(encoders, options, device, paired=paired)) if of_images else {}
    for name, probe in probes.items():
        if probe.features == PATCHES:
            limits = [getattr(probe.options, limit, None) for limit in ("train_images", "test_images")]
            masked, first = probe.truth == "masks", paired and not splits
            dtype = torch.float32 if masked else torch.float16  # probes of labels store more images
            of_patches = [
                encoder._replace(
                    function=_of_patches(encoder.function, encoders[0], dtype), data=fewer(encoder.data, *limits)
                )
                for encoder in encoders
            ]
            splits[name] = _split(of_patches, options, device, masked=masked, paired=first)
    return splits


def fewer(data: Data, train_images: int | None, test_images: int | None) -> Data:
    """Reduce the training and the reported images to these numbers, see `reduced`, and drop other splits."""
    part, test = data.test_or_validation
    train, test = reduced(data.train, test, train_images, test_images)
    is_test = part == "test"
    return replace(data, train=train, validation=None if is_test else test, test=test if is_test else None)


def encoders_of(
    options: Evaluate, data: Data, checkpoint: Checkpoint, specs: Sequence[FeatureSpec], others: Sequence[Other]
) -> list[Evaluated]:
    """Return the encoder of the checkpoint, the baselines, and the encoders for comparison.

    Args:
        options: Options of the evaluation.
        data: The images, as `images` returns them.
        checkpoint: The evaluated checkpoint.
        specs: Descriptions of its features.
        others: Encoders for comparison.
    """

    def frozen(encoder: Encoder, specs: Sequence[FeatureSpec], weights: str) -> Frozen:
        return Frozen(encoder, specs, identity=json.dumps([weights, encoder.arguments]))

    def built(options: Options) -> Encoder:
        torch.manual_seed(key(0, "weights"))
        with within("encoder"):
            encoder: Encoder = options.build()
        return encoder

    view, source = options.data.view, options.data

    def weights_of(checkpoint: Checkpoint, loading: LoadEncoder, encoder: Encoder) -> str:
        """Return the weights of an encoder as a text, on which its cached features depend."""
        is_adapted = encoder.channels != checkpoint.encoder["channels"]
        channels = f", channels adapted by {loading.adapt_channels}" if is_adapted else ""
        return f"{checkpoint.checksum}, resized as {loading.resize}{channels}"

    own = built(options.encoder)
    function = frozen(own, specs, weights_of(checkpoint, options.encoder, own))
    encoders = [Evaluated(OWN, "", function, view, source, data, checkpoint.run_folder)]
    if options.baselines:
        weights = f"random weights of torch {torch.__version__}"
        untrained = frozen(built(options.encoder.loaded()), specs, weights)
        encoders.append(Evaluated(RANDOM, RANDOM_PREFIX, untrained, view, source, data))
        encoders.append(Evaluated(PIXELS, PIXELS, Pixels(), view, source, data))
    for other in others:
        encoder = load_encoder(other.loading.changed(announce=True))
        compared = other.loading.checkpoint()
        weights = weights_of(compared, other.loading, encoder)
        function, folder = frozen(encoder, other.specs, weights), compared.run_folder
        sized, images = view.for_size(other.image_size), data
        if other.source != source:
            images = other.source.build().for_development(options.development)
            images = fewer(images, options.train_images, options.test_images)
        encoders.append(Evaluated(other.name, f"{other.name} ", function, sized, other.source, images, folder))
    return encoders


def view_of(encoder: Evaluated) -> dict[str, object]:
    """Return the options of the images of an encoder, on which its cached features depend."""
    pixel_format = {name: getattr(encoder.source, name, None) for name in ("channels", "range", "background")}
    return {"kind": type(encoder.view).__name__, **encoder.view.values(), **pixel_format}


def _of_patches(function: Extractor, evaluated: Evaluated, dtype: torch.dtype) -> Extractor:
    """Return an extractor of patch features: an encoder's last layer, or the pixels of patches.

    Args:
        function: Extractor of whole images.
        evaluated: The evaluated encoder, which determines the size of the patches of pixels.
        dtype: Data type of the features.
    """
    if isinstance(function, Frozen):
        last = max(function.specs, key=lambda spec: spec.layer)
        return Frozen(function.encoder, [replace(last, pooling=PATCHES)], identity=function.weights, dtype=dtype)
    assert isinstance(evaluated.function, Frozen)
    return PatchPixels(evaluated.function.encoder.patch_size, dtype)


def _split(
    encoders: Sequence[Evaluated],
    options: Evaluate,
    device: torch.device,
    *,
    masked: bool = False,
    paired: bool = False,
) -> Split:
    """Compute the features, distributed over processes, or read them from the cache.

    Args:
        encoders: The encoders, the evaluated one first.
        options: The options of the evaluation.
        device: The device of this process.
        masked: Whether to read segmentation masks.
        paired: Whether to detect near-duplicates and images of the pre-training.
    """
    file_options: Loading = {"workers": options.workers, "timeout": options.loader_timeout}
    loading: dict[str, Any] = {**file_options, "batch_size": options.batch_size, "device": device}
    precision = resolved(options.precision, device)
    folder = options.cache_folder

    def extracted(encoder: Evaluated, which: str) -> FeatureSets:
        function = encoder.function
        transform = fingerprints if isinstance(function, Fingerprints) else encoder.view.build()
        source = encoder.data.train if which == "training" else encoder.data.test_or_validation[1]
        if isinstance(function, Frozen):
            function.prepare(device, precision)
        if is_main_process():
            loading["progress"] = progress(f"{encoder.name or 'encoder'}, {which} images", " images")
        if folder is None:
            sets = extract(function, source, transform, **loading)
        else:
            sets = cached(folder, function, source, transform, transform_options=view_of(encoder), **loading)
        return replace(sets, values={encoder.named(name): values for name, values in sets.values.items()})

    part, _ = encoders[0].data.test_or_validation
    encoders, all_masks = _with_masks(encoders) if masked else (encoders, (None, None))
    evaluated, *others = encoders
    feature_sets = []
    for which, masks_of in zip(("training", part), all_masks, strict=True):
        sets = extracted(evaluated, which)
        for encoder in others:
            sets = sets.joined(extracted(encoder, which))
        if masks_of is not None:
            sets = replace(sets, masks=masks_of[sets.indices])
        feature_sets.append(sets)
    train, test = feature_sets
    pairs, overlaps = None, {}
    if paired:
        small = evaluated._replace(name="thumbnails", function=Thumbnails())
        of_train, of_test = (
            of_split.joined(extracted(small, which)).values["thumbnails"]
            for which, of_split in (("training", train), (part, test))
        )

        def grey(which: str, rows: Tensor) -> Tensor:
            sets = train if which == "train" else test
            source = sets.source.take(sets.indices[rows])
            return extract(Grey(), source, evaluated.view.build(), **file_options).values["grey"]

        pairs = duplicates(of_train, of_test, grey)
        for encoder in encoders:
            if encoder.run_folder and (record := read_fingerprints(encoder.run_folder)) is not None:
                printed = encoder._replace(name="fingerprints", prefix="", function=Fingerprints())
                joined = test.joined(extracted(printed, part)), train.joined(extracted(printed, "training"))
                shown, known = (of_split.values["fingerprints"].numpy() for of_split in joined)
                overlaps[encoder.name] = overlap(record, shown, known, pairs)
    return Split(
        feature_sets=tuple(evaluated.function.identities),
        train=train,
        test=test,
        eval_transform=evaluated.view.build(),
        part=part,
        precision=precision,
        others={encoder.name: tuple(map(encoder.named, encoder.function.identities)) for encoder in others},
        duplicates=pairs,
        overlaps=overlaps,
        display=Display.of_data(options.data),
    )


def _with_masks(encoders: Sequence[Evaluated]) -> tuple[Sequence[Evaluated], Sequence[Tensor]]:
    """Return the encoders with the images whose masks can be read, and the masks of training and reported images.

    Raises:
        UserError: Too many masks are unreadable, see `Tally`.
    """
    evaluated, known = encoders[0], list[Tensor]()
    transform = evaluated.view.build().mask
    part, test = evaluated.data.test_or_validation
    for split, source in (("train", evaluated.data.train), (part, test)):
        indices, read, tally = [], [], Tally(len(source))
        for index in range(len(source)):
            failures = []
            try:
                read.append(masks(source, transform, torch.tensor([index])))
                indices.append(index)
            except Unreadable as failure:
                failures.append(failure)
            tally.add(1, failures)
        known.append(torch.cat(read))
        if len(indices) < len(source):
            encoders = [
                each._replace(data=replace(each.data, **{split: getattr(each.data, split).take(torch.tensor(indices))}))
                for each in encoders
            ]
    return encoders, known
