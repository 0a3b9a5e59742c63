"""Identify the processes of a run by the environment variables of its launcher. Standard library only."""

import ctypes
import functools
import os
import signal
import threading
import time
from contextlib import suppress

_GRACE = 30  # seconds for a checkpoint, as between torchrun's SIGTERM and SIGKILL


def is_main_process() -> bool:
    """Return whether this process is the first of its run, according to torchrun, SLURM or Fabric's launcher."""
    # Within a SLURM job, torchrun and SLURM order the machines differently.
    names = ("RANK",) if "RANK" in os.environ else ("LOCAL_RANK", "NODE_RANK", "SLURM_PROCID")
    return all(os.environ.get(name, "0") == "0" for name in names)


def count(devices: object, num_nodes: int) -> int | None:
    """Return the number of processes of a run from torchrun, SLURM or the options; None if it depends on the machine.

    Args:
        devices: Number of devices per machine; the result is None for other values, such as auto.
        num_nodes: Number of machines.
    """
    for name, mark in (("WORLD_SIZE", "RANK"), ("SLURM_NTASKS", "SLURM_PROCID")):
        if mark in os.environ and name in os.environ:
            return int(os.environ[name])
    return devices * num_nodes if isinstance(devices, int) and devices > 0 else None


def keep_memory() -> None:
    """Configure glibc to keep freed memory for later allocations, in the process of a command.

    By default, it returns large blocks to the kernel, which then has to clear each page for the next tensor.
    """
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD of malloc.h
        libc.mallopt(-1, (1 << 31) - 1)  # M_TRIM_THRESHOLD


@functools.cache
def end_with_launcher() -> None:
    """End this process when its launcher (torchrun, or the main process of Fabric) has ended.

    torchrun stops its processes unless it is killed.
    """
    launcher = os.getppid()

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(1)
        os.kill(os.getpid(), signal.SIGTERM)  # a training run saves a checkpoint and stops
        time.sleep(_GRACE)
        os._exit(128 + signal.SIGTERM)

    if "LOCAL_RANK" in os.environ:
        threading.Thread(target=watch, daemon=True, name="launcher").start()
