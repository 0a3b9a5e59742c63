"""Define the options of the analyses of encoders. No torch."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge
from pydantic import Field

from ssvit.config.command_line import CommandLine
from ssvit.config.declaration import Count, Expect, Name, Options, Part, Parts, Whole
from ssvit.data.sources.base_options import DataSet
from ssvit.devices import Workers
from ssvit.errors import OptionError, folder_to_write
from ssvit.loading.options import Pretrained
from ssvit.models.encoder_options import Encoder, grid
from ssvit.models.timm_options import timm_models
from ssvit.models.vit_options import ViT


class Analysis(Pretrained, Workers):
    """The encoder and the images of an analysis."""

    encoder: Part[Encoder]
    """The model. None: the checkpoint's."""
    data: Part[DataSet | None] = None
    """The data set. None: the data set of the checkpoint's run."""
    batch_size: Count = 64
    """Batch size of the encoder."""
    device: Literal["auto", "cpu"] = "auto"
    """auto: CUDA if available; or cpu."""

    @property
    def reading(self) -> dict[str, Any]:
        """Return the options with which images are read."""
        return {"batch_size": self.batch_size, "workers": self.workers, "timeout": self.loader_timeout}


class Visualize(Analysis):
    """Plot attention, filters and position embeddings of an encoder."""

    images: Sequence[Name] = ()
    """Image files or folders; without them, held-out images of the data set."""
    count: Count = 128
    """Maximum number of images in the statistics."""
    shown: Count = 8
    """Number of images whose attention is plotted."""
    layer: Annotated[Literal["last"] | Count, Expect("a whole number, 1 or more, or last")] = "last"
    """Layer whose heads are plotted: its number, counted from 1, or last."""
    pooling: Literal["class_token", "patch_mean"] | None = None
    """Attention that is plotted: class_token, or patch_mean for the mean over patches. None: class_token if there is
    one."""
    output: Name | None = None
    """Folder of the plots. None: visualize/ in the run's folder."""

    def check_consistency(self) -> None:
        """Check the checkpoint and the folder to write."""
        if self.checkpoint == "scratch":
            raise OptionError("checkpoint", "scratch", "must be a checkpoint")
        if self.output is not None:
            folder_to_write("output", self.output)


class Inspect(Analysis):
    """Compare encoders by their consistency under changes of the images, receptive fields, and layers."""

    against: Parts[Options] = Field(default_factory=dict)
    """Further encoders, as against=[NAME,…]: choices of encoder= and models of timm, with random weights, and
    checkpoints, as in checkpoint=. Their options are against.NAME.OPTION."""
    patch_size: Count = 4
    """Side in pixels of the patches that are shuffled, and maximum of the translations."""
    count: Annotated[int, Ge(4)] = 256
    """Maximum number of held-out images."""
    train_images: Count = 2_000
    """Maximum number of training images for the means of the classes."""
    batch_size: Annotated[int, Ge(8)] = 64
    """Maximum number of images of a batch. The similarity of layers is computed within batches."""
    seed: Whole = 0
    """Seed of random weights and of the order of shuffled patches."""
    output: Name | None = None
    """Folder of the results; None: inspect/ in the folder of all runs."""

    @property
    def folder(self) -> Path:
        """Return the folder of the results."""
        return Path(self.outputs, "inspect") if self.output is None else Path(self.output)

    def check_consistency(self) -> None:
        """Check the folder to write, and that the patches divide the images."""
        folder_to_write("output", self.folder)
        if self.data is not None and 1 in grid(self.data.image_size, self.patch_size):
            raise OptionError("patch_size", self.patch_size, "must be smaller than the images")


def add_encoders(line: CommandLine) -> None:
    """Replace against=[NAME,…] on a command line by the options of these encoders.

    Raises:
        OptionError: An entry is no encoder, or two have the same name.
    """
    entries = line.typed.pop("against")
    entries = entries if isinstance(entries, list) else [entries]
    paths = {str(entry): Path(str(entry)) for entry in entries}
    for depth in range(1, max((len(path.parts) for path in paths.values()), default=1) + 1):
        names = {re.sub(r"\W+", "_", "/".join(path.parts[-depth:])): entry for entry, path in paths.items()}
        if len(names) == len(entries):  # folders of steps have equal names in different runs
            break
    else:
        raise OptionError("against", entries, "must be encoders with different names")
    for name, entry in names.items():
        if ":" in entry or Path(entry).exists():
            line.implied[f"against.{name}"] = {"_part_": "encoder/checkpoint", "path": entry}
            line.prefixes[f"against.{name}"] = "++"
            continue
        if entry in line.names("encoder"):
            choice = entry
        elif entry in timm_models():
            choice, line.implied[f"against.{name}.model"] = "timm", entry
        else:
            raise OptionError("against", entry, "must be a choice of encoder=, a model of timm, or a checkpoint")
        line.implied[f"encoder@against.{name}"] = choice
        line.prefixes[f"encoder@against.{name}"] = "+"


def plotted(encoder: ViT, *, layer: int | Literal["last"], pooling: str | None) -> tuple[int, str]:
    """Return the layer whose heads are plotted, counted from 1, and the pooling.

    Args:
        encoder: The encoder.
        layer: Layer number, or last.
        pooling: Pooling; None for class_token if the encoder has one.

    Raises:
        OptionError: If the encoder does not have the layer or the class token.
    """
    number = encoder.depth if layer == "last" else layer
    if number > encoder.depth:
        raise OptionError("layer", layer, f"must be at most {encoder.depth}, the encoder's layers, or last")
    if pooling is None:
        pooling = "class_token" if encoder.class_token else "patch_mean"
    if pooling == "class_token" and not encoder.class_token:
        raise OptionError("pooling", pooling, "must be patch_mean: the encoder has no class token")
    return number, pooling
