"""What can be measured of a training step: asked by the tool before torch is loaded. Standard library only."""

from dataclasses import dataclass
from typing import Any

from ssvit.options import flag, one_of, whole

PARTS = ("step", "data", "probe", "knn")
PRECISIONS = ("bf16-mixed", "32-true")
DEVICES = ("cpu", "cuda")


@dataclass(frozen=True)
class Size:
    """An encoder by its numbers, and how many images a step of it takes on a CPU and on a GPU."""

    image_size: int
    patch_size: int
    width: int
    depth: int
    heads: int
    batch: dict[str, int]


SIZES = {
    "ti": Size(224, 16, 192, 12, 3, {"cpu": 32, "cuda": 1024}),
    "s": Size(224, 16, 384, 12, 6, {"cpu": 16, "cuda": 1024}),
    "b": Size(224, 16, 768, 12, 12, {"cpu": 4, "cuda": 512}),
    "l": Size(224, 16, 1024, 24, 16, {"cpu": 2, "cuda": 256}),
    "small": Size(32, 4, 192, 6, 3, {"cpu": 64, "cuda": 4096}),
}


def step(
    *, model: Any, precision: Any, threads: Any, compile: Any, device: Any, batch: Any, peers: Any, memory: Any
) -> None:
    """OptionError unless these can be the options of `ssvit.benchmark.step.run`."""
    one_of("model", model, SIZES)
    one_of("precision", precision, PRECISIONS)
    whole("threads", threads)
    one_of("device", device, DEVICES)
    if batch is not None:
        whole("batch", batch)
    for name, value in (("compile", compile), ("peers", peers), ("memory", memory)):
        flag(name, value)
