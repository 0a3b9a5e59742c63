"""The options of the plots of an encoder, which check themselves. Standard library only."""

from typing import Annotated, Literal, Self

from annotated_types import Ge
from pydantic import model_validator

from ssvit.config.declaration import Count, Name, NotNegative, Options, Whole
from ssvit.models.vit_options import ViT
from ssvit.options import OptionError, folder_to_write, one_of, whole


class Visualize(Options):
    """What is plotted, and how."""

    checkpoint: Name
    """newest, a folder, or a file of another project's weights."""
    count: Count
    """The most images that are measured."""
    shown: Count
    """Number of images that are plotted with their attention."""
    layer: int | str
    """The layer whose heads are plotted, from 1, or last."""
    pooling: Name | None
    """Whose attention is plotted: class_token, or patch_mean for all patches; None: class_token if there is one."""
    batch_size: Annotated[int, Ge(8)]
    """Images of a batch, from which similarity is estimated (Nguyen et al. 2021)."""
    workers: Whole
    """Processes that decode image files."""
    loader_timeout: NotNegative
    """Seconds to wait for a batch from these processes; 0: no limit."""
    device: Literal["auto", "cpu"]
    """auto: CUDA where there is a GPU; or cpu."""
    output: Name | None
    """The folder for the plots; None: visualize/ in the run's folder."""

    @model_validator(mode="after")
    def _check_files(self) -> Self:
        if self.checkpoint == "scratch":
            raise OptionError("checkpoint", "scratch", "looked at beside a checkpoint by other=scratch; give that")
        if self.output is not None:
            folder_to_write("output", self.output)
        return self


def plotted(encoder: ViT, *, layer: int | str, pooling: str | None) -> tuple[int, str]:
    """The layer whose heads are plotted, from 1, and the pooling. OptionError if an encoder does not have them."""
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
