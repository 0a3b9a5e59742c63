"""The options that all benchmarks share."""

from typing import Literal

from ssvit.config.declaration import Count, Options


class Benchmark(Options):
    """Which part is measured, and how often."""

    part: Literal["step", "data", "shards", "probe", "knn", "gpu"]
    """The part of ssvit that is measured; a module of this package."""
    rounds: Count
    """Number of rounds; each contender runs once in each round."""
