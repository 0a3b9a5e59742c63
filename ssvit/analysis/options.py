"""The options of the plots of an encoder, which check themselves. Standard library only."""

from collections.abc import Sequence
from typing import Annotated, Literal, Self

from annotated_types import Ge
from pydantic import model_validator

from ssvit.config.declaration import Count, Name, NotNegative, Part, Whole
from ssvit.loading.finding_options import Pretrained
from ssvit.models.vit_options import ViT
from ssvit.options import OptionError, folder_to_write, one_of, whole


class Visualize(Pretrained):
    """What is plotted of an encoder, and how."""

    encoder: Part = None
    """The model: the checkpoint's."""
    data: Part = None
    """The images: those of the checkpoint's run, unless another data set is named."""
    other: Name | None = None
    """A second checkpoint, for comparison; newest: the fine-tuning run that finished last; scratch: random weights."""
    images: Sequence[Name] = ()
    """Pictures, or folders of them; without them held-out images of the data set are plotted."""
    count: Count = 128
    """The most images that are measured."""
    shown: Count = 8
    """Number of images that are plotted with their attention."""
    layer: int | str = "last"
    """The layer whose heads are plotted: its number, 1 for the first, or last."""
    pooling: Name | None = None
    """Whose attention is plotted: class_token, or patch_mean for all patches; null: class_token if there is one."""
    batch_size: Annotated[int, Ge(8)] = 64
    """Images encoded at a time, and images of each estimate of similarity (Nguyen et al. 2021)."""
    workers: Whole = 0
    """Processes that decode image files of the data set."""
    loader_timeout: NotNegative = 300
    """Seconds to wait for a batch from these processes; 0: no limit."""
    device: Literal["auto", "cpu"] = "auto"
    """auto: CUDA where there is a GPU; or cpu."""
    output: Name | None = None
    """The folder for the plots; null: visualize/ in the run's folder."""

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
