"""Build encoders and classifiers from a checkpoint, or from a file of foreign weights."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ssvit.checkpoints import storage
from ssvit.checkpoints.checkpoint import Checkpoint
from ssvit.checkpoints.manifest import CheckpointError
from ssvit.config.declaration import Options
from ssvit.engine.processes import is_main_process
from ssvit.errors import OptionError, UserError, print_lines
from ssvit.loading.options import NO_CLASSIFIER, LoadEncoder, LoadLayers, LoadTeacher, Reference, pixel_format
from ssvit.models import lora
from ssvit.models.encoder import Encoder
from ssvit.models.graph import Graph
from ssvit.models.timm_options import options_from, vit
from ssvit.models.vit import ViT
from ssvit.models.vit_options import Lora
from ssvit.objectives.classify import Classify
from ssvit.objectives.classify_options import Classify as ClassifyOptions
from ssvit.objectives.segment import Segment
from ssvit.objectives.segment_options import Segment as SegmentOptions


def load_encoder(options: LoadEncoder) -> Encoder:
    """Load the encoder of a checkpoint in eval mode, with averaged weights if the checkpoint contains them.

    Raises:
        CheckpointError: The checkpoint is damaged, or its tensors do not match the encoder's exactly.
    """
    checkpoint = options.checkpoint()
    states = storage.load(checkpoint, without="optimizer")
    with _building(checkpoint, "encoder"):
        weights = _averaged_or_last(checkpoint, states)
        prefix = f"{checkpoint.backbone}."
        loaded = {name.removeprefix(prefix): weights[name] for name in weights if name.startswith(prefix)}
        trained = options_from(checkpoint.encoder).build()
        trained.load_state_dict(loaded)
        encoder = _changed(trained, options)
    if options.announce and is_main_process():
        averaged = ", averaged weights" if "ema" in states else ""
        notes = [f"{checkpoint.path}: loaded {len(loaded)} of {len(loaded)} tensors of the encoder{averaged}"]
        if isinstance(trained, ViT) and isinstance(encoder, ViT) and trained.rotary is None:
            before, after = ("x".join(map(str, vit.grid)) for vit in (trained, encoder))
            if before != after:
                notes.append(f"positions resized from {before} to {after} patches ({options.resize})")
        if trained.channels != encoder.channels:
            change = f"from {trained.channels} to {encoder.channels} channels ({options.adapt_channels})"
            notes.append(f"patch projection converted {change}")
        if trained.channels != encoder.channels or options.renormalize:
            notes.append(f"images normalised by mean {encoder.options.mean}, std {encoder.options.std}")
        outside = (name.removeprefix(checkpoint.backbone.removesuffix("encoder")) for name in weights)
        if unused := sorted({name.split(".")[0] for name in outside} - {"encoder"}):
            notes.append(f"not loaded: {', '.join(unused)}")
        print_lines("; ".join([*notes, *checkpoint.manifest.get("notes", ())]))
    encoder.origin = checkpoint.checksum
    return encoder.eval()


def load_layers(options: LoadLayers) -> ViT:
    """Load the encoder of a checkpoint up to a layer, with its final norm.

    Raises:
        CheckpointError: The checkpoint is damaged, or its tensors do not match the encoder's exactly.
    """
    encoder = load_encoder(LoadEncoder(path=options.checkpoint, announce=True))
    assert isinstance(encoder, ViT)  # checked by `LoadLayers`
    encoder.blocks = encoder.blocks[: options.layer]
    return encoder


def load_teacher(options: LoadTeacher) -> Encoder:
    """Load the encoder of a checkpoint with an image size that suits the images to which it is applied."""
    return _for_range(load_encoder(options.sized), options)


def load_classifier(options: LoadEncoder) -> Classify:
    """Load the classifier of a fine-tuning or supervised checkpoint in eval mode.

    It maps images (b, c, h, w) to logits (b, k).

    Raises:
        CheckpointError: The checkpoint is damaged or contains no classifier.
    """
    checkpoint = options.checkpoint()
    if not checkpoint.has_classifier:
        raise CheckpointError(f"{checkpoint.path}: {NO_CLASSIFIER}")
    return _with_head(checkpoint, options, "classifier", ClassifyOptions)


def load_segmenter(options: LoadEncoder) -> Segment:
    """Load the segmentation model of a checkpoint in eval mode.

    It maps images (b, c, h, w) to logits (b, k, h, w).

    Raises:
        CheckpointError: The checkpoint is damaged or contains no segmentation model.
    """
    checkpoint = options.checkpoint()
    if not checkpoint.has_segmenter:
        reason = "contains no segmentation model; ssvit finetune objective=segmentation trains one"
        raise CheckpointError(f"{checkpoint.path}: {reason}")
    return _with_head(checkpoint, options, "segmenter", SegmentOptions)


def _with_head(checkpoint: Checkpoint, options: LoadEncoder, entry: str, kind: type[Options]) -> Any:
    """Return the model that an entry of the manifest describes by options of a class, in eval mode."""
    states = storage.load(checkpoint, without="optimizer")
    with _building(checkpoint, entry):
        model = kind(**checkpoint.manifest[entry]).build(encoder=options_from(checkpoint.encoder).build())
        model.load_state_dict(_averaged_or_last(checkpoint, states))
        model.encoder = _changed(model.encoder, options)
        model.encoder.origin = checkpoint.checksum
        if isinstance(options, Reference):
            _for_range(model.encoder, options)
    return model.eval()


def load_model(checkpoint: Checkpoint, load: Callable[[LoadEncoder], Any], **options: Any) -> Any:
    """Load an encoder or a classifier that is only applied to images.

    Args:
        checkpoint: The checkpoint or the exported graph.
        load: `load_encoder` or `load_classifier`, which is called for a checkpoint.
        options: Options of `LoadEncoder`, which must not be set for an exported graph.

    Returns:
        The module in eval mode.

    Raises:
        CheckpointError: The checkpoint is damaged, or contains no such model.
        OptionError: An option of an exported graph is set.
    """
    if checkpoint.graph is None:
        return load(LoadEncoder(path=checkpoint.path, **options))
    for name, value in options.items():
        if value is not None:
            raise OptionError(name, value, "must not be set: an exported graph cannot be changed")
    graph = Graph(vit(checkpoint.encoder), checkpoint.graph)
    if not checkpoint.has_classifier:
        return graph.eval()
    with _building(checkpoint, "classifier"):
        classifier = Classify(ClassifyOptions(**checkpoint.manifest["classifier"]), encoder=graph)
    classifier.head = nn.Identity()  # the graph returns logits
    return classifier.eval()


@contextmanager
def _building(checkpoint: Checkpoint, part: str) -> Iterator[None]:
    """Convert errors of wrong options and wrong tensors to CheckpointError."""
    try:
        yield
    except (KeyError, TypeError, UserError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{checkpoint.path}: the {part} cannot be built: {reason}") from None


def _averaged_or_last(checkpoint: Checkpoint, states: Mapping[str, Mapping[str, Tensor]]) -> Mapping[str, Tensor]:
    """Return the averaged weights if available, otherwise the weights; LoRA matrices are merged into them."""
    weights = states.get("ema", states["model"])
    adapted = checkpoint.manifest.get("lora")
    return weights if adapted is None else lora.merged(weights, Lora(**adapted))


def _for_range(encoder: Encoder, options: Reference) -> Encoder:
    """Convert the normalisation of a run's encoder to the range of other images; values are not clipped to its own."""
    checkpoint = options.checkpoint()
    if checkpoint.describes_images:
        trained = pixel_format(checkpoint)
        formats = trained, trained.changed(range=options.range, background=None)
        limits = (pixels.range or [[0] * encoder.channels, [255] * encoder.channels] for pixels in formats)
        (low, high), (new_low, new_high) = (torch.tensor(ends).to(encoder.mean) for ends in limits)
        encoder.mean.copy_((encoder.mean * (high - low) + low - new_low) / (new_high - new_low))
        encoder.std.mul_((high - low) / (new_high - new_low))
    return encoder


def _changed(trained: Encoder, options: LoadEncoder) -> Encoder:
    """Return an encoder with the same weights and other options; the encoder itself if no option differs."""
    changed = options.loaded()
    if changed == trained.options:
        return trained
    encoder = changed.build()
    mean, std = encoder.mean.clone(), encoder.std.clone()
    adapt = {} if changed.channels == trained.channels else {"adapt": options.adapt_channels}
    encoder.load_weights_from(trained, how=options.resize, **adapt)
    if options.renormalize:
        encoder.options = changed
        encoder.mean.copy_(mean)
        encoder.std.copy_(std)
    return encoder
