"""The options of the plots of an encoder, which check themselves. Standard library only."""

from dataclasses import dataclass

from ssvit.models.options import ViT
from ssvit.options import OptionError, folder_to_write, number, one_of, whole


@dataclass(frozen=True, kw_only=True)
class Visualize:
    """What is plotted, and how."""

    checkpoint: str
    """newest, a folder, or a file of another project's weights."""
    count: int
    """The most images that are measured."""
    shown: int
    """Number of images that are plotted with their attention."""
    layer: int | str
    """The layer whose heads are plotted, from 1, or last."""
    pooling: str | None
    """Whose attention is plotted: class_token, or patch_mean for all patches; None: class_token if there is one."""
    batch_size: int
    """Images of a batch, from which similarity is estimated (Nguyen et al. 2021)."""
    workers: int
    """Processes that decode image files."""
    loader_timeout: float
    """Seconds to wait for a batch from these processes; 0: no limit."""
    device: str
    """auto: CUDA where there is a GPU; or cpu."""
    output: str | None
    """The folder for the plots; None: visualize/ in the run's folder."""

    def __post_init__(self) -> None:
        if self.checkpoint == "scratch":
            raise OptionError("checkpoint", "scratch", "looked at beside a checkpoint by other=scratch; give that")
        whole("count", self.count)
        whole("shown", self.shown)
        whole("batch_size", self.batch_size, at_least=8)
        whole("workers", self.workers, at_least=0)
        number("loader_timeout", self.loader_timeout, 0)
        one_of("device", self.device, ("auto", "cpu"))
        if self.output is not None:
            folder_to_write("output", self.output)


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
