"""Define the options of encoders and classifiers that are loaded from a checkpoint."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Len

from ssvit.checkpoints.checkpoint import Checkpoint
from ssvit.checkpoints.manifest import CheckpointError
from ssvit.config.declaration import Count, Expect, Name, Options, Runs, Tree
from ssvit.data.augment.options import CenterCrop
from ssvit.data.sources.base_options import DataSet, ImageFiles
from ssvit.data.sources.decode_options import PixelFormat
from ssvit.errors import OptionError, pair, typed
from ssvit.exchange.options import ForeignEncoder
from ssvit.loading.finding import open_checkpoint
from ssvit.loading.origins import origin
from ssvit.models.encoder_options import ByChannel, Normalized
from ssvit.models.timm_options import options_from, vit
from ssvit.models.vit_options import CHANGEABLE, AdaptChannels, Resize, ViT
from ssvit.objectives.distill_options import TeacherEncoder


class Pretrained(Options):
    """The checkpoint of a pre-training run, or foreign weights."""

    checkpoint: Name = "newest"
    """The folder of a checkpoint or of its run, a file of foreign weights, hf://OWNER/NAME, or timm:NAME; newest: the
    pre-training run that finished last."""
    outputs: Runs = "outputs"
    """Folder of all runs."""


class Finetuned(Options):
    """The checkpoint of a fine-tuned classifier."""

    checkpoint: Name = "newest"
    """The folder of a checkpoint or of its run, or an exported ONNX file; newest: the fine-tuning run that finished
    last."""
    outputs: Runs = "outputs"
    """Folder of all runs."""


_PATCHES, _LARGEST = 7, 224  # fewest patches along a side and largest side of the usual image size of foreign weights
NO_CLASSIFIER = "contains an encoder without a classifier; the command finetune trains one"


class LoadEncoder(ForeignEncoder):
    """Encoder of a checkpoint. Options that do not affect its weights can be changed; None: as in the checkpoint."""

    path: str | Path
    """Folder of the checkpoint, or a file of foreign weights."""
    resize: Resize = "paper"
    """How position embeddings are resized for another image size: paper (as in the authors' code) or timm."""
    announce: bool = False
    """Whether to print what was loaded."""
    image_size: int | Sequence[int] | None = None
    """Side of the image in pixels, or [height, width]. None, here and below: the checkpoint's."""
    pooling: str | None = None
    """Pooling of the features of an image: class_token or patch_mean."""
    dropout: float | None = None
    """Dropout in training; for this and the next three options, see `ssvit.models.vit_options.ViT`."""
    attention_dropout: float | None = None
    """Dropout of the attention weights."""
    stochastic_depth: float | None = None
    """Probability of skipping the last layer in training."""
    activation_checkpointing: bool | None = None
    """Recompute each layer in the backward pass: less memory, more time."""
    channels: int | None = None
    """Number of image channels. It may differ from the checkpoint's in a ViT without a stem."""
    adapt_channels: AdaptChannels = "mean"
    """How the patch projection is converted to another number of channels. mean: every channel gets the mean over the
    channels, scaled such that the embedding of grey images does not change; repeat: the channels are repeated in order,
    scaled by the ratio of the numbers of channels, as in timm."""
    image_mean: ByChannel | None = None
    """Mean of the image channels, used if their number differs from the checkpoint's."""
    image_std: ByChannel | None = None
    """Standard deviation of the image channels, used if their number differs from the checkpoint's."""
    renormalize: Annotated[Sequence[Literal["mean", "std"]], Expect("a list of mean and std")] = ()
    """Which of image_mean and image_std are used for the checkpoint's number of channels too."""

    @property
    def changes(self) -> dict[str, Any]:
        """Return the options of the encoder that are set."""
        return {name: value for name, value in vars(self).items() if name in CHANGEABLE and value is not None}

    def checkpoint(self) -> Checkpoint:
        """Open the checkpoint; raise OptionError, CheckpointError or ForeignError if there is none."""
        return open_checkpoint(self.path, vars(self))

    def origins(self, option: str) -> list[dict[str, str]]:
        """Return rows about the checkpoint, and about the weights of which its training made use."""
        return origin("start" if option == "encoder" else option.rpartition(".")[2], self.checkpoint(), str(self.path))

    def loaded(self) -> Normalized:
        """Return the options of the encoder; raise OptionError or CheckpointError unless they match the checkpoint."""
        trained = self.checkpoint().encoder
        changes, encoder = self.changes, options_from(trained)
        is_converted = self.channels not in (None, encoder.channels)
        if is_converted and (not isinstance(encoder, ViT) or encoder.stem):
            raise OptionError("channels", self.channels, f"must be {encoder.channels}, as in the checkpoint")
        normalized = ("mean", "std") if is_converted else self.renormalize
        changes |= {name: getattr(self, f"image_{name}") for name in normalized}
        if is_converted:
            changes |= {"channels": self.channels}
        try:
            return options_from(trained | changes)
        except OptionError as error:
            if error.name == "patch_size" and self.image_size is not None:
                raise OptionError(
                    "image_size", self.image_size, f"must be divisible by {error.value}, the size of a patch"
                ) from None
            name = f"image_{error.name}" if error.name in normalized else error.name
            raise OptionError(name, error.value, error.expectation) from None


class LoadLayers(Options):
    """First layers of a checkpoint's encoder."""

    checkpoint: str | Path
    """Folder of the checkpoint, or a file of foreign weights."""
    layer: Count | None = None
    """Number of the last of these layers, from 1; None: all layers."""

    def check_consistency(self) -> None:
        """Check that the checkpoint's encoder has the layer."""
        depth = vit(self.opened.encoder).depth
        if self.layer is not None and self.layer > depth:
            raise OptionError("layer", self.layer, f"must be at most {depth}, as in the checkpoint's encoder")

    @cached_property
    def opened(self) -> Checkpoint:
        """Return the checkpoint; raise OptionError, CheckpointError or ForeignError if there is none."""
        try:
            return open_checkpoint(self.checkpoint)
        except OptionError as error:
            raise OptionError("checkpoint", self.checkpoint, error.expectation) from None

    def origins(self, option: str) -> list[dict[str, str]]:
        """Return rows about the checkpoint, and about the weights of which its training made use."""
        return origin(option.rpartition(".")[2], self.opened, str(self.checkpoint))

    def check(self, tree: Tree) -> None:
        """Check that both encoders have the same patch size and number of channels, and images of one range."""
        if not isinstance(tree.encoder, ViT):
            return
        encoders = tree.encoder, vit(self.opened.encoder)
        expected, loaded = ("x".join(map(str, (e.channels, *pair("patch_size", e.patch_size)))) for e in encoders)
        if expected != loaded:
            expected = f"must have patches of {expected}, as the encoder; has {loaded}"
            raise OptionError("checkpoint", self.checkpoint, expected)
        if isinstance(tree.data, DataSet) and self.opened.describes_images:
            images = tree.data.pixels.range if isinstance(tree.data, ImageFiles) else None
            if (trained := pixel_format(self.opened).range) != images:
                expected = f"must be of a run with data.range={typed(images)}; has {typed(trained)}"
                raise OptionError("checkpoint", self.checkpoint, expected)


class Reference(LoadEncoder):
    """A trained model whose outputs are learned."""

    range: Annotated[Sequence[ByChannel], Len(2, 2), Expect("[minimum, maximum], or null")] | None = None
    """Range of the images to which the model is applied, as in `PixelFormat`. The normalisation of a run's model is
    converted to it; weights of other projects take images of any range."""

    def opened(self) -> Checkpoint:
        """Open the checkpoint; raise OptionError with an option of this class if there is none."""
        try:
            return self.checkpoint()
        except OptionError as error:
            name = error.name if error.name in type(self).model_fields else "path"
            raise OptionError(name, getattr(self, name), error.expectation) from None

    def check(self, tree: Tree) -> None:
        """Check that the model accepts the channels of the encoder's images."""
        channels = self.loaded().channels
        if isinstance(tree.encoder, Normalized) and channels != tree.encoder.channels:
            expected = f"must have images of {tree.encoder.channels} channels, as the encoder; has {channels}"
            raise OptionError("path", self.path, expected)


class LoadTeacher(Reference, TeacherEncoder):
    """The frozen encoder of a checkpoint, whose features are predicted."""

    side: int | Sequence[int] | None = None
    """Side of the encoder's images in pixels, or [height, width], which determines the teacher's image_size for weights
    of other projects."""

    def check_consistency(self) -> None:
        """Check that there is a checkpoint, and that the options match it."""
        self.opened()
        self.loaded()

    @property
    def sized(self) -> LoadEncoder:
        """Return the options of the encoder with an image size that suits the images."""
        options = {name: getattr(self, name) for name in LoadEncoder.model_fields}
        if self.image_size is None and self.side is not None:
            options["image_size"] = usual_size(self.checkpoint(), max(pair("side", self.side)))
        return LoadEncoder(**options)


class LoadClassifier(Reference):
    """The classifier of a checkpoint."""

    def check_consistency(self) -> None:
        """Check that the checkpoint has a classifier, and that the options match it."""
        if not self.opened().has_classifier:
            raise OptionError("path", self.path, NO_CLASSIFIER)
        self.loaded()


def check_feature_spec(checkpoint: Checkpoint, spec: object) -> None:
    """Check that the described features are outputs of the checkpoint.

    Args:
        checkpoint: The checkpoint, or an exported graph, which returns one kind of features.
        spec: A `ssvit.evaluation.options.FeatureSpec`.

    Raises:
        OptionError: An exported graph returns other features.
    """
    if checkpoint.graph is None:
        return
    encoder = options_from(checkpoint.encoder)
    for name, expected in (("layer", encoder.depth), ("pooling", encoder.pooling), ("norm", "after")):
        if (value := getattr(spec, name)) != expected:
            raise OptionError(name, value, f"must be {expected}: the exported graph returns no other features")


def eval_transform(checkpoint: Checkpoint) -> CenterCrop:
    """Return the options of a checkpoint's evaluation transform; raise CheckpointError if its manifest is invalid."""
    try:
        return CenterCrop(**(checkpoint.manifest.get("view") or {"size": checkpoint.encoder["image_size"]}))
    except OptionError as error:
        raise CheckpointError(f"{checkpoint.path}: view.{error}") from None


def checked_size(checkpoint: Checkpoint, size: object) -> tuple[int, int]:
    """Return an image size as (height, width); raise OptionError unless the patch size of the encoder divides it."""
    sides, patch_size = pair("image_size", size), checkpoint.encoder.get("patch_size", 1)
    if any(side % patch for side, patch in zip(sides, pair("patch_size", patch_size), strict=True)):
        raise OptionError("image_size", size, f"must be divisible by {typed(patch_size)}, the size of a patch")
    return sides


def usual_size(checkpoint: Checkpoint, side: int = _LARGEST) -> int | tuple[int, int] | None:
    """Return the image size at which foreign weights are used; None for other checkpoints.

    Args:
        checkpoint: The checkpoint.
        side: Median side of the images in pixels. The size is the largest multiple of the patch size up to it, but at
            least 7 patches along a side, and at most 224 pixels and the size that the weights were trained at.
    """
    if checkpoint.describes_images:
        return None
    patch_size, image_size = (pair(name, checkpoint.encoder[name]) for name in ("patch_size", "image_size"))
    height, width = (
        min(max(side, _PATCHES * patch), trained, _LARGEST) // patch * patch
        for patch, trained in zip(patch_size, image_size, strict=True)
    )
    return height if height == width else (height, width)


def pixel_format(checkpoint: Checkpoint) -> PixelFormat:
    """Return the pixel format of a checkpoint's encoder; raise CheckpointError if its manifest is invalid."""
    try:
        images = {name: checkpoint.manifest.get(name) for name in ("range", "background")}
        return PixelFormat(channels=checkpoint.encoder["channels"], **images)
    except OptionError as error:
        raise CheckpointError(f"{checkpoint.path}: {error}") from None
