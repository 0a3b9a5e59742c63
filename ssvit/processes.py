"""Which of a run's processes this is, as its launcher tells in the environment. Standard library only."""

import ctypes
import functools
import os
import signal
import threading
import time
from contextlib import suppress

_GRACE = 30  # seconds for a checkpoint, as many as torchrun gives between SIGTERM and SIGKILL


def is_main_process() -> bool:
    """Whether this process is the first of the run, as torchrun, SLURM and Fabric's own launcher tell it."""
    # Within a job of SLURM, torchrun numbers the machines in an order of its own.
    names = ("RANK",) if "RANK" in os.environ else ("LOCAL_RANK", "NODE_RANK", "SLURM_PROCID")
    return all(os.environ.get(name, "0") == "0" for name in names)


def count(devices: object, num_nodes: int) -> int | None:
    """The number of processes of a run, as torchrun, SLURM or the options tell; None if the machine decides.

    Args:
        devices: Of a machine, as a number; anything else is left to the machine.
        num_nodes: The number of machines.
    """
    for name, mark in (("WORLD_SIZE", "RANK"), ("SLURM_NTASKS", "SLURM_PROCID")):
        if mark in os.environ and name in os.environ:
            return int(os.environ[name])
    return devices * num_nodes if isinstance(devices, int) and devices > 0 else None


def keep_memory() -> None:
    """Let glibc keep freed memory for the next allocation, in the process of a command.

    By default it returns large blocks to the kernel, which clears each page again when a tensor next uses it.
    """
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD of malloc.h
        libc.mallopt(-1, (1 << 31) - 1)  # M_TRIM_THRESHOLD


@functools.cache
def end_with_launcher() -> None:
    """End this process once its launcher has ended: torchrun, or the main process of Fabric.

    torchrun stops its processes itself, unless it is killed.
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
