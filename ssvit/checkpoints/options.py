"""The options of what is loaded from a checkpoint, which check themselves. No torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ssvit.checkpoints.checkpoint import Checkpoint
from ssvit.checkpoints.manifest import CheckpointError
from ssvit.data.augment.options import CenterCrop
from ssvit.exchange.reading import TOLD
from ssvit.models.options import CHANGEABLE, RESIZE, ViT
from ssvit.options import OptionError, flag, make, one_of, pair


@dataclass(frozen=True, kw_only=True)
class LoadEncoder:
    """The encoder of a checkpoint, with other values of options that do not change its weights; None: its own."""

    path: str | Path
    """The folder of the checkpoint, or a file of foreign weights."""
    resize: str = "paper"
    """How its positions are resized for another image size: paper, as the authors' code does, or timm."""
    announce: bool = False
    """Whether to print what was loaded."""
    image_size: int | Sequence[int] | None = None
    """As the next five, see `ssvit.models.options.ViT`."""
    pooling: str | None = None
    dropout: float | None = None
    attention_dropout: float | None = None
    stochastic_depth: float | None = None
    activation_checkpointing: bool | None = None
    heads: int | None = None
    """As the next three, of a foreign file, what its weights do not tell; None: what is usual."""
    mean: float | Sequence[float] | None = None
    std: float | Sequence[float] | None = None
    trained_size: int | Sequence[int] | None = None
    """Pixels, or [height, width], of the images that it was trained on."""

    def __post_init__(self) -> None:
        one_of("resize", self.resize, RESIZE)
        flag("announce", self.announce)

    @property
    def changes(self) -> dict[str, Any]:
        """The options of the encoder that are not left as they were."""
        return self._given(CHANGEABLE)

    @property
    def told(self) -> dict[str, Any]:
        """What the user tells of a foreign file."""
        return self._given(TOLD)

    def checkpoint(self) -> Checkpoint:
        """What lies there. OptionError, CheckpointError or ForeignError if it is no checkpoint."""
        return Checkpoint.open(self.path, self.told)

    def encoder(self) -> ViT:
        """The options of the encoder that it gives. OptionError or CheckpointError unless there can be one."""
        return make(ViT, self.checkpoint().encoder | self.changes)

    def _given(self, names: Sequence[str]) -> dict[str, Any]:
        values: Mapping[str, Any] = vars(self)
        return {name: values[name] for name in names if values[name] is not None}


@dataclass(frozen=True, kw_only=True)
class LoadClassifier:
    """The classifier of a checkpoint."""

    path: str | Path
    """The folder of the checkpoint, or of its run for the newest in it."""

    def __post_init__(self) -> None:
        if not self.checkpoint.has_classifier:
            right = "holds no classifier, only an encoder: tools/finetune.py makes one of it"
            raise OptionError("path", self.path, right)

    @cached_property
    def checkpoint(self) -> Checkpoint:
        """What lies there."""
        try:
            return Checkpoint.open(self.path)
        except OptionError as error:
            raise OptionError("path", self.path, error.right) from None

    def fits(self, encoder: ViT) -> None:
        """OptionError unless it takes the images of this encoder, as a teacher must."""
        vits = encoder, make(ViT, self.checkpoint.encoder)
        own, theirs = ((vit.channels, *pair("image_size", vit.image_size)) for vit in vits)
        if own != theirs:
            own, theirs = ("x".join(map(str, shape)) for shape in (own, theirs))
            raise OptionError("path", self.path, f"takes images of {theirs}, and the encoder takes {own}")


def eval_transform(checkpoint: Checkpoint) -> CenterCrop:
    """The options of the transform that a checkpoint is evaluated with.

    CheckpointError unless the manifest tells options that there are.
    """
    try:
        return make(CenterCrop, checkpoint.facts.get("view") or {"size": checkpoint.encoder["image_size"]})
    except OptionError as error:
        raise CheckpointError(f"{checkpoint.path}: view.{error}") from None
