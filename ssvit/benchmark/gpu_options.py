"""The options of the benchmarks of a GPU."""

from collections.abc import Sequence
from typing import Annotated

from ssvit.benchmark.step_options import SIZES
from ssvit.config.declaration import OneOf, Options

PARTS = ("resume", "waits", "step", "profile", "changes", "data", "checkpoint")
CHANGES = ("fa3", "fa4", "cuda_graphs", "max_autotune", "tf32")


class Gpu(Options):
    """The options of part=gpu, in addition to those of `Step`."""

    parts: Sequence[Annotated[str, OneOf(PARTS)]] = PARTS
    """The parts to measure: resume, waits, step, profile, changes, data and checkpoint, in this order."""
    models: Sequence[Annotated[str, OneOf(SIZES)]] | None = None
    """Sizes of the step's model; None: s, b, l and h on cuda, small on a CPU."""
    changes: Sequence[Annotated[str, OneOf(CHANGES)]] = ()
    """Changes that are set while the step is measured: fa3, fa4, cuda_graphs, max_autotune, tf32."""
    folder: str = "outputs/gpu"
    """The folder for tables.txt, tables.json and pictures."""
