"""The frozen features that a command evaluates: of the encoder and its baselines, computed in all processes.

Loading this module loads torch.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from hydra.utils import instantiate
from lightning_fabric import Fabric
from omegaconf import DictConfig

from ssvit.checkpoints.checkpoint import Checkpoint
from ssvit.cli.launch import Plain, progress
from ssvit.cli.pretrained import from_scratch
from ssvit.data.batch import EvalTransform
from ssvit.data.source import Data, masks, subset
from ssvit.evaluation.base import Probe
from ssvit.evaluation.features import Cache, Extractor, FeatureSets, Frozen, PatchPixels, Pixels, extract
from ssvit.evaluation.options import PATCHES, Reading
from ssvit.evaluation.scores import Split
from ssvit.kernels.accelerate import accelerate
from ssvit.options import UserError, within
from ssvit.randomness import key
from ssvit.training import runtime
from ssvit.training.peers import PeerGone
from ssvit.training.recipe import Recipe


def read(
    config: DictConfig,
    plain: Plain,
    checkpoint: Checkpoint,
    readings: Sequence[Reading],
    probes: Mapping[str, Probe],
) -> dict[str, Split] | None:
    """The feature sets for each probe: those of whole images first, the same for all their probes.

    Features of patches are of the last of the readings alone. None in all processes but the main one, which goes on
    alone. UserError if the images do not suffice for the probes, before a feature is read where the labels show it.
    """
    of_images = [name for name, probe in probes.items() if probe.features != PATCHES]
    data = instantiate(config.data.source, _convert_="all")
    part, test = data.reported
    if of_images and (data.train.labels is None or test.labels is None):
        raise UserError("the images have no labels: give each class a folder of its own, or another data set (data=…)")
    if test.classes != data.train.classes:
        raise UserError(f"the {part} images are of other classes than the training images")
    data = _fewer(data, plain["train_images"], plain["test_images"])
    eval_transform = instantiate(config.data.view, _convert_="all")
    _, test = data.reported
    for name, probe in probes.items():
        with within(f"probes.{name}"):
            if data.train.labels is not None and test.labels is not None:
                probe.check(data.train.labels, test.labels, data.classes)
        if probe.features == PATCHES:
            for source in (data.train, test):
                masks(source, eval_transform, torch.tensor([0]))
    functions = {}
    if of_images:
        functions["images"] = _functions(config, plain, checkpoint, readings)
    if len(of_images) < len(probes):
        last = max(readings, key=lambda reading: reading.layer)
        functions[PATCHES] = _functions(config, plain, checkpoint, [replace(last, pooling=PATCHES)])
    threads = torch.get_num_threads()
    fabric = runtime.start(Recipe(precision=plain["precision"]), **plain["fabric"])
    try:
        with runtime.together():
            shared = (plain, eval_transform, fabric)
            splits = dict.fromkeys(of_images, _split(data, functions["images"], *shared)) if of_images else {}
            for name, probe in probes.items():
                if probe.features == PATCHES:
                    fewer = _fewer(data, probe.train_images, probe.test_images)
                    splits[name] = _split(fewer, functions[PATCHES], *shared)
    except PeerGone:
        raise
    except UserError:
        if fabric.is_global_zero:
            raise
        return None  # all have failed alike, or the main one reports that this one has
    runtime.part()
    if not fabric.is_global_zero:
        return None
    torch.set_num_threads(threads)
    return splits


def _fewer(data: Data, train_images: int | None, test_images: int | None) -> Data:
    """At most so many training images, and of those reported on, which alone are kept to measure on; None: all."""
    part, test = data.reported
    train, test = (
        source if images is None else subset(source, images=min(images, len(source)))
        for images, source in ((train_images, data.train), (test_images, test))
    )
    is_test = part == "test"
    return replace(data, train=train, validation=None if is_test else test, test=test if is_test else None)


def _functions(
    config: DictConfig, plain: Plain, checkpoint: Checkpoint, readings: Sequence[Reading]
) -> dict[str, Extractor]:
    """The encoder of the checkpoint and the baselines, by the prefix of their features' names."""

    def frozen(node: DictConfig, weights: str) -> Frozen:
        torch.manual_seed(key(0, "weights"))
        encoder = instantiate(node, _convert_="all")
        accelerate(encoder)
        return Frozen(encoder, readings, identity=json.dumps([weights, encoder.arguments]))

    weights = f"{checkpoint.checksum}, resized as {plain['encoder']['resize']}"
    own = frozen(config.encoder, weights)
    functions: dict[str, Extractor] = {"": own}
    if plain["baselines"]:
        functions["random_"] = frozen(from_scratch(config).encoder, f"random weights of torch {torch.__version__}")
        of_patches = readings[0].pooling == PATCHES
        functions["pixels"] = PatchPixels(own.encoder.patch_size) if of_patches else Pixels()
    return functions


def _split(
    data: Data,
    functions: Mapping[str, Extractor],
    plain: Plain,
    eval_transform: EvalTransform,
    fabric: Fabric,
) -> Split:
    """Compute the features, each process its part, or take them from the cache; with masks for those of patches."""
    options = {name: plain[name] for name in ("batch_size", "workers")}
    options |= {"timeout": plain["loader_timeout"], "device": fabric.device}
    parts = []
    for which, source in (("training", data.train), data.reported):
        found: FeatureSets | None = None
        for prefix, function in functions.items():
            if isinstance(function, Frozen):
                function.encoder.to(fabric.device)
            if fabric.is_global_zero:
                options["progress"] = progress(f"{prefix.strip('_') or 'encoder'}, {which} images", " images")
            with fabric.autocast():
                if plain["cache"] is None:
                    sets = extract(function, source, eval_transform, **options)
                else:
                    cache, made_by = Cache(Path(plain["cache"])), plain["data"]["view"]
                    sets = cache.extract(function, source, eval_transform, transform_options=made_by, **options)
            named = {name if name == prefix else f"{prefix}{name}": value for name, value in sets.values.items()}
            sets = replace(sets, values=named)
            found = found.beside(sets) if found else sets
        assert found is not None
        if any(values.ndim == 4 for values in found.values.values()):
            found = replace(found, masks=masks(source, eval_transform, found.places))
        parts.append(found)
    train, test = parts
    return Split(tuple(functions[""].identities), train, test, eval_transform, data.reported[0])
