"""Define the options of the analysis of an encoder. This module uses the standard library only."""

from collections.abc import Sequence
from typing import Literal

from ssvit.config.declaration import Count, Name, NotNegative, Part, Whole
from ssvit.loading.finding_options import Pretrained
from ssvit.models.vit_options import ViT
from ssvit.options import OptionError, folder_to_write, one_of, whole


class Visualize(Pretrained):
    """Plot attention, filters and position embeddings of an encoder."""

    encoder: Part = None
    """The model. None: the checkpoint's."""
    data: Part = None
    """The data set. None: the data set of the checkpoint's run."""
    images: Sequence[Name] = ()
    """Image files or folders; without them, held-out images of the data set."""
    count: Count = 128
    """Maximum number of images in the statistics."""
    shown: Count = 8
    """Number of images whose attention is plotted."""
    layer: int | str = "last"
    """Layer whose heads are plotted: its number, counted from 1, or last."""
    pooling: Name | None = None
    """Attention that is plotted: class_token, or patch_mean for the mean over patches. None: class_token if there is
    one."""
    batch_size: Count = 64
    """Batch size of the encoder."""
    workers: Whole = 0
    """Loader processes for images of the data set."""
    loader_timeout: NotNegative = 300
    """Seconds to wait for a batch from the loader processes; 0: no limit."""
    device: Literal["auto", "cpu"] = "auto"
    """auto: CUDA if available; or cpu."""
    output: Name | None = None
    """Folder of the plots. None: visualize/ in the run's folder."""

    def check_consistency(self) -> None:
        """Check the checkpoint and the folder to write."""
        if self.checkpoint == "scratch":
            raise OptionError("checkpoint", "scratch", "must be a checkpoint")
        if self.output is not None:
            folder_to_write("output", self.output)


def plotted(encoder: ViT, *, layer: int | str, pooling: str | None) -> tuple[int, str]:
    """Return the layer whose heads are plotted, counted from 1, and the pooling.

    Args:
        encoder: The encoder.
        layer: Layer number, or last.
        pooling: Pooling; None for class_token if the encoder has one.

    Raises:
        OptionError: If the encoder does not have the layer or the class token.
    """
    number = encoder.depth if layer == "last" else layer
    whole("layer", number)
    number = int(number)
    if number > encoder.depth:
        raise OptionError("layer", layer, f"must be at most {encoder.depth}, the encoder's layers, or last")
    if pooling is None:
        pooling = "class_token" if encoder.class_token else "patch_mean"
    one_of("pooling", pooling, ("class_token", "patch_mean"))
    if pooling == "class_token" and not encoder.class_token:
        raise OptionError("pooling", pooling, "must be patch_mean: the encoder has no class token")
    return number, pooling
