"""Measure the time of a computation."""

import resource
import time
from typing import Any


def cpu_time() -> float:
    """Return the CPU time of this process and of its finished children in seconds."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def clock(device: Any) -> float:
    """Return the CPU time in seconds, or the time by the clock if a torch.device is not the CPU."""
    return cpu_time() if device.type == "cpu" else time.perf_counter()
