"""Measure the time of a computation."""

import contextlib
import multiprocessing
import resource
import time
from collections.abc import Callable, Iterator
from typing import Any

_REPORTED = [0.0]  # CPU seconds reported by worker processes, minus those counted as finished children


def cpu_time() -> float:
    """Return the CPU time of this process, of its finished children and of `reporting_workers` in seconds."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime + _REPORTED[0]


@contextlib.contextmanager
def reporting_workers() -> Iterator[Callable[[float], None]]:
    """Yield a function that adds CPU seconds of worker processes, which must end within the block, to `cpu_time`."""
    total = 0.0

    def add(seconds: float) -> None:
        nonlocal total
        total += seconds
        _REPORTED[0] += seconds

    try:
        yield add
    finally:
        # The system counts workers that have ended as children of this process, or of the server if there is one.
        if total and multiprocessing.get_start_method() != "forkserver":
            _REPORTED[0] -= total


def clock(device: Any) -> float:
    """Return the CPU time in seconds, or the time by the clock if a torch.device is not the CPU."""
    return cpu_time() if device.type == "cpu" else time.perf_counter()
