"""The options of what is loaded from a checkpoint."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import model_validator

from ssvit.checkpoints.checkpoint import Checkpoint
from ssvit.checkpoints.manifest import CheckpointError
from ssvit.config.declaration import Count, Options, Run
from ssvit.data.augment.crop_options import CenterCrop
from ssvit.data.decode_options import PixelFormat
from ssvit.exchange.reading_options import ForeignEncoder
from ssvit.loading.finding import open_checkpoint
from ssvit.models.encoder_options import Normalized
from ssvit.models.timm_options import of, vit
from ssvit.models.vit_options import CHANGEABLE, Resize, ViT
from ssvit.options import OptionError, pair


class LoadEncoder(ForeignEncoder):
    """The encoder of a checkpoint; options that do not change its weights may have other values. None: its own."""

    is_function: ClassVar[bool] = True

    path: str | Path
    """The folder of the checkpoint, or a file of foreign weights."""
    resize: Resize = "paper"
    """How its positions are resized for another image size: paper, as the authors' code does, or timm."""
    announce: bool = False
    """Whether to print what was loaded."""
    image_size: int | Sequence[int] | None = None
    """Pixels of an image's side, or [height, width]. None, here and below: the checkpoint's."""
    pooling: str | None = None
    """What an image's vector is: class_token or patch_mean."""
    dropout: float | None = None
    """Dropout in training: see `ssvit.models.vit_options.ViT`, as for the next three."""
    attention_dropout: float | None = None
    """Dropout of the attention weights."""
    stochastic_depth: float | None = None
    """Rate at which the last layer is left out in training."""
    activation_checkpointing: bool | None = None
    """In training compute each layer once more for its gradients: less memory, more time."""
    model: str | None = None
    """The name in timm of the model of which a foreign file is. None: a ViT, known by its tensors."""
    arguments: Mapping[str, object] | None = None
    """Keyword arguments of timm's model."""
    patch_size: int | Sequence[int] | None = None
    """Must be the checkpoint's, as the next two: it is here for the options that refer to it."""
    width: int | None = None
    """Must be the checkpoint's."""
    channels: int | None = None
    """Must be the checkpoint's."""

    @property
    def changes(self) -> dict[str, Any]:
        """The options of the encoder that are given."""
        return {name: value for name, value in vars(self).items() if name in CHANGEABLE and value is not None}

    def checkpoint(self) -> Checkpoint:
        """The checkpoint. OptionError, CheckpointError or ForeignError if there is none."""
        return open_checkpoint(self.path, vars(self))

    def loaded(self) -> Normalized:
        """Return the options of the encoder. OptionError or CheckpointError unless they fit the checkpoint."""
        trained = self.checkpoint().encoder
        for name in ("patch_size", "width", "channels"):
            if (value := getattr(self, name)) not in (None, trained.get(name, value)):
                raise OptionError(name, value, f"must be {trained[name]}, as in the checkpoint")
        return of(trained | self.changes)


class LoadLayers(Options):
    """The first layers of a checkpoint's encoder."""

    is_function: ClassVar[bool] = True

    path: str | Path | None
    """As of `LoadEncoder`; None for no encoder."""
    layer: Count | None = None
    """The last of them, 1 for the first."""

    @model_validator(mode="after")
    def _check_layer(self) -> Self:
        if self.layer is not None and self.checkpoint is not None:
            depth = vit(self.checkpoint.encoder).depth
            if self.layer > depth:
                right = f"must be at most {depth}, the layers of the checkpoint's encoder"
                raise OptionError("layer", self.layer, right)
        return self

    @cached_property
    def checkpoint(self) -> Checkpoint | None:
        """The checkpoint, if there is to be one."""
        try:
            return None if self.path is None else open_checkpoint(self.path)
        except OptionError as error:
            raise OptionError("path", self.path, error.right) from None

    def check(self, run: Run) -> None:
        """Check that the encoder has patches of the same size."""
        if self.checkpoint is None or not isinstance(run.encoder, ViT):
            return
        vits = run.encoder, vit(self.checkpoint.encoder)
        patch, theirs = ("x".join(map(str, (one.channels, *pair("patch_size", one.patch_size)))) for one in vits)
        if patch != theirs:
            raise OptionError("path", self.path, f"has patches of {theirs}, and the encoder has patches of {patch}")


class LoadClassifier(LoadEncoder):
    """The classifier of a checkpoint."""

    @model_validator(mode="after")
    def _check_head(self) -> Self:
        try:
            checkpoint = self.checkpoint()
        except OptionError as error:
            name = error.name if error.name in type(self).model_fields else "path"
            raise OptionError(name, getattr(self, name), error.right) from None
        if not checkpoint.has_classifier:
            right = "holds no classifier, only an encoder: the command finetune trains one"
            raise OptionError("path", self.path, right)
        self.loaded()
        return self

    def check(self, run: Run) -> None:
        """Check that it takes the images of the encoder, as a teacher must."""
        if not isinstance(run.encoder, Normalized):
            return
        vits = run.encoder, of(self.checkpoint().encoder)
        size, teachers = ("x".join(map(str, (one.channels, *pair("image_size", one.image_size)))) for one in vits)
        if size != teachers:
            raise OptionError("path", self.path, f"takes images of {teachers}, and the encoder takes {size}")


def eval_transform(checkpoint: Checkpoint) -> CenterCrop:
    """The options of a checkpoint's evaluation transform. CheckpointError if its manifest has others."""
    try:
        return CenterCrop(**(checkpoint.facts.get("view") or {"size": checkpoint.encoder["image_size"]}))
    except OptionError as error:
        raise CheckpointError(f"{checkpoint.path}: view.{error}") from None


def pixel_format(checkpoint: Checkpoint) -> PixelFormat:
    """What a checkpoint's encoder takes of image files. CheckpointError if its manifest has what cannot be."""
    try:
        return PixelFormat(channels=checkpoint.encoder["channels"], range=checkpoint.facts.get("range"))
    except OptionError as error:
        raise CheckpointError(f"{checkpoint.path}: {error}") from None
