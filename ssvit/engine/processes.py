"""Identify the processes of a run by the environment variables of its launcher. Standard library only."""

import ctypes
import functools
import os
import re
import signal
import threading
import time
from contextlib import suppress
from typing import NamedTuple

_GRACE = 30  # seconds for a checkpoint, as between torchrun's SIGTERM and SIGKILL


class Place(NamedTuple):
    """Describe this process among the processes that a launcher has started.

    Attributes:
        rank: Number of this process.
        world: Number of processes.
        local_rank: Number of this process on its machine.
        local_world: Number of processes that share the CPU cores of this process.
        host: Host of the main process.
        port: Port of the main process.
    """

    rank: int
    world: int
    local_rank: int
    local_world: int
    host: str
    port: int


def launched() -> Place | None:
    """Return the place of this process among those of torchrun, srun or the same command; None without a launcher."""
    if os.environ.get("RANK") and os.environ.get("WORLD_SIZE"):
        usual = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": os.environ["WORLD_SIZE"], "MASTER_PORT": "29500"}
        local_rank, local_world, port = (int(os.environ.get(name, value)) for name, value in usual.items())
        host = os.environ.get("MASTER_ADDR", "127.0.0.1")
        return Place(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), local_rank, local_world, host, port)
    if int(os.environ.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
        rank, world, local_rank = (int(os.environ[f"SLURM_{name}"]) for name in ("PROCID", "STEP_NUM_TASKS", "LOCALID"))
        host = re.sub(r"\[(\w+)[^]]*\]", r"\1", os.environ["SLURM_STEP_NODELIST"]).split(",")[0]
        return Place(rank, world, local_rank, 1, host, 15000 + int(os.environ["SLURM_JOB_ID"]) % 10000)
    return None


def is_main_process() -> bool:
    """Return whether this process is the first of its run, according to torchrun or SLURM."""
    # Within a SLURM job, torchrun and SLURM order the machines differently.
    return (os.environ.get("RANK") or os.environ.get("SLURM_PROCID", "0")) == "0"


def count(devices: object, num_nodes: int) -> int | None:
    """Return the number of processes of a run from its launcher or the options; None if it depends on the machine.

    Args:
        devices: Number of devices per machine; the result is None for other values, such as auto.
        num_nodes: Number of machines.
    """
    if place := launched():
        return place.world
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
    """End this process when its launcher (torchrun, or the main process of the same command) has ended.

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
