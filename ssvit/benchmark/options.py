"""The options of all benchmarks."""

from importlib.util import find_spec
from typing import Literal, Self

from pydantic import model_validator

from ssvit.benchmark.gpu_options import Gpu
from ssvit.benchmark.step_options import Step
from ssvit.config.declaration import Count, Name, Options
from ssvit.options import OptionError


class Benchmark(Options):
    """The part of ssvit whose speed is compared with other libraries."""

    part: Literal["step", "data", "shards", "probe", "gpu"] = "data"
    """The part that is measured; a module in ssvit/benchmark."""
    rounds: Count = 7
    """Number of rounds; each contender runs once in each round."""
    output: Name | None = None
    """A file for the rates as JSON."""
    plot: Name | None = None
    """A file for the rates as a picture."""
    step: Step = Step()
    """Options of part=step."""
    gpu: Gpu = Gpu()
    """Options of part=gpu, in addition to those of step."""

    @model_validator(mode="after")
    def _check_peer(self) -> Self:
        if self.part == "probe" and find_spec("sklearn") is None:
            raise OptionError("part", self.part, "needs scikit-learn: pip install 'ssvit[bench]'")
        return self
