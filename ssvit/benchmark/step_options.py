"""The options of the benchmark of a training step."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, Self

from pydantic import model_validator

from ssvit.config.declaration import Count, OneOf, Options
from ssvit.options import one_of


@dataclass(frozen=True)
class Size:
    """An encoder by its numbers, and how many images a step of it takes on a CPU and on a GPU.

    decoder: depth, width and heads of masked autoencoders' decoders. local: side and number of the smaller views.
    stem: the units of the stages of a hybrid's ResNet.
    """

    image_size: int
    patch_size: int
    width: int
    depth: int
    heads: int
    batch: dict[str, int]
    decoder: tuple[int, int, int]
    local: tuple[int, int]
    stem: tuple[int, ...] | None = None


# What configs/objective/mae.yaml has, and the authors' decoder.
_LIGHT, _AUTHORS = (2, 128, 4), (8, 512, 16)
SIZES = {
    "ti": Size(224, 16, 192, 12, 3, {"cpu": 32, "cuda": 1024}, _LIGHT, (96, 8)),
    "s": Size(224, 16, 384, 12, 6, {"cpu": 16, "cuda": 1024}, _AUTHORS, (96, 8)),
    "b": Size(224, 16, 768, 12, 12, {"cpu": 4, "cuda": 512}, _AUTHORS, (96, 8)),
    "l": Size(224, 16, 1024, 24, 16, {"cpu": 2, "cuda": 256}, _AUTHORS, (96, 8)),
    "h": Size(224, 14, 1280, 32, 16, {"cpu": 1, "cuda": 128}, _AUTHORS, (98, 8)),
    "small": Size(32, 4, 192, 6, 3, {"cpu": 64, "cuda": 4096}, _LIGHT, (16, 4)),
}

LIBRARIES = ("vit-pytorch", "transformers", "timm", "torchvision", "lightly")
OBJECTIVES = ("masked_patch", "masked_patch_decoder", "simmim", "mae", "latent", "dino", "ibot", "simclr")


class Step(Options):
    """Which training step is measured."""

    objective: Annotated[str, OneOf(OBJECTIVES)] = "masked_patch"
    """The objective of the step."""
    model: Annotated[str, OneOf(SIZES)] = "ti"
    """The model's size; small is for images of 32 px."""
    precision: Literal["bf16-mixed", "32-true"] = "bf16-mixed"
    """The precision of the step."""
    threads: Count = 1
    """Threads of the CPU; more than one are measured in addition to one."""
    compile: bool = False
    """Whether every contender is compiled by torch.compile."""
    device: Literal["cpu", "cuda"] = "cpu"
    """The device; cuda is timed by its events."""
    batch: Count | None = None
    """Images of a step; None: the number in `SIZES`."""
    peers: bool | Sequence[str] = True
    """Whether the other libraries are measured, if they are installed; or a list of libraries or of contenders."""
    memory: bool = True
    """Whether the highest memory of two steps is measured, in a separate process for each contender."""

    @model_validator(mode="after")
    def _check_peers(self) -> Self:
        for name in () if isinstance(self.peers, bool) else self.peers:
            one_of("peers", name.split()[0], LIBRARIES)
        return self
