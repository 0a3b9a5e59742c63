"""The options of the benchmarks, which check themselves. Standard library only."""

from dataclasses import dataclass

from ssvit.options import flag, one_of, whole


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

OBJECTIVES = ("masked_patch", "masked_patch_decoder", "simmim", "mae", "latent", "dino", "ibot", "simclr")


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """Which part is measured, and how often."""

    part: str
    """The part of ssvit that is measured; a module of this package."""
    rounds: int
    """Number of rounds; each contender runs once in each round."""

    def __post_init__(self) -> None:
        one_of("part", self.part, ("step", "data", "shards", "probe", "knn", "gpu"))
        whole("rounds", self.rounds)


@dataclass(frozen=True, kw_only=True)
class Step:
    """Which training step is measured."""

    objective: str = "masked_patch"
    """The objective of the step."""
    model: str = "ti"
    """The model's size; small is for images of 32 px."""
    precision: str = "bf16-mixed"
    """bf16-mixed or 32-true."""
    threads: int = 1
    """Threads of the CPU; more than one are measured in addition to one."""
    compile: bool = False
    """Whether every contender is compiled by torch.compile."""
    device: str = "cpu"
    """cpu or cuda, which is timed by its events."""
    batch: int | None = None
    """Images of a step; None: the number in `SIZES`."""
    peers: bool | tuple[str, ...] = True
    """Whether the other libraries are measured, if they are installed; or a list of their names."""
    memory: bool = True
    """Whether the highest memory of two steps is measured, in a separate process for each contender."""

    def __post_init__(self) -> None:
        one_of("objective", self.objective, OBJECTIVES)
        one_of("model", self.model, SIZES)
        one_of("precision", self.precision, ("bf16-mixed", "32-true"))
        whole("threads", self.threads)
        one_of("device", self.device, ("cpu", "cuda"))
        if self.batch is not None:
            whole("batch", self.batch)
        for name in ("compile", "memory"):
            flag(name, getattr(self, name))
        if not isinstance(self.peers, tuple):
            flag("peers", self.peers)


PARTS = ("resume", "waits", "step", "profile", "changes", "data", "checkpoint")
CHANGES = ("fa3", "fa4", "cuda_graphs", "max_autotune", "tf32")


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """The options of part=gpu, in addition to those of `Step`."""

    parts: tuple[str, ...] = PARTS
    """The parts to measure: resume, waits, step, profile, changes, data and checkpoint, in this order."""
    models: tuple[str, ...] | None = None
    """Sizes of the step's model; None: s, b, l and h on cuda, small on a CPU."""
    changes: tuple[str, ...] = ()
    """Changes that are set while the step is measured: fa3, fa4, cuda_graphs, max_autotune, tf32."""
    folder: str = "outputs/gpu"
    """The folder for tables.txt, tables.json and pictures."""

    def __post_init__(self) -> None:
        for name, known in (("parts", PARTS), ("models", SIZES), ("changes", CHANGES)):
            for value in getattr(self, name) or ():
                one_of(name, value, known)
