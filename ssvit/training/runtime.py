"""Where and in which numbers a run computes: Lightning Fabric, set up from the options."""

import atexit
import ctypes
import gc
import logging
import os
import secrets
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from typing import Any

import torch
from lightning_fabric import Fabric
from lightning_fabric.strategies import FSDPStrategy
from lightning_fabric.utilities.exceptions import MisconfigurationException
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision

from ssvit.kernels import operators
from ssvit.options import UserError
from ssvit.randomness import key
from ssvit.training.peers import Peers
from ssvit.training.recipe import Recipe

TIMEOUT = 600.0  # seconds that a process waits for another
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h

_peers: Peers | None = None


def native_bfloat16(device: torch.device) -> bool:
    """Whether a device multiplies matrices in bfloat16 by its own instructions, not by emulation."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return device.type == "cpu" and (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def precision(recipe: Recipe, device: torch.device) -> str:
    """The numbers to compute in: as the recipe says, or by `auto` bf16-mixed where it is native, else 32-true."""
    if recipe.precision != "auto":
        return recipe.precision
    return "bf16-mixed" if native_bfloat16(device) else "32-true"


def lacks_kernels(recipe: Recipe, device: torch.device) -> bool:
    """Whether a run would be faster if `ssvit.kernels.operators` could be built here."""
    kernels_on_cpu = device.type == "cpu" and backend(recipe, device) == "kernels"
    return kernels_on_cpu and precision(recipe, device) == "bf16-mixed" and operators.library() is None


def start(recipe: Recipe, *, timeout: float = TIMEOUT, **options: Any) -> Fabric:
    """Fabric, launched: options are its own (accelerator, devices, num_nodes, strategy).
    UserError where Fabric refuses, or if another process does not come within `timeout` seconds.
    """
    global _peers
    if options.get("accelerator", "auto") == "auto":
        # Not Apple's: it has no float64, which random numbers and labels are made in.
        options["accelerator"] = "cuda" if torch.cuda.is_available() else "cpu"
    logging.getLogger("lightning_fabric").setLevel(logging.WARNING)  # it announces what the run says itself
    try:
        device = Fabric(accelerator=options["accelerator"], devices=1).device
        numbers = precision(recipe, device)
        fabric = Fabric(precision=numbers, **_as_launched({**options, "strategy": strategy(options, numbers)}))
        if hasattr(fabric.strategy, "_timeout"):  # one of several processes
            fabric.strategy._timeout = timedelta(seconds=timeout)
        with _own_store(timeout):
            fabric.launch()
        if fabric.world_size > 1 and _peers is None:
            _peers = Peers(fabric, timeout)
    except (ValueError, RuntimeError, TypeError, OSError, MisconfigurationException) as error:
        asked = ", ".join(f"fabric.{name}={value}" for name, value in options.items())
        raise UserError(f"{asked}: {' '.join(str(error).split())}") from None
    if _in_touch():
        atexit.register(_end)
    if fabric.device.type == "cpu":
        keep_memory()
    torch.manual_seed(key(recipe.seed, "weights"))
    return fabric


def keep_memory() -> None:
    """Have the process keep the memory that a step frees for the next step, where its C library is glibc.

    glibc gives large blocks back to the kernel at once, which clears each page anew when a tensor next touches it.
    """
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(_M_MMAP_THRESHOLD, 1 << 30)
        libc.mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)


def strategy(options: Mapping[str, Any], numbers: str) -> Any:
    """Fabric's option, but that fsdp rounds no buffers: the images' mean, and where a patch stands, stay float32."""
    asked = options.get("strategy", "auto")
    if asked != "fsdp" or numbers != "bf16-mixed":
        return asked
    half, single = torch.bfloat16, torch.float32
    return FSDPStrategy(mixed_precision=MixedPrecision(param_dtype=half, reduce_dtype=half, buffer_dtype=single))


def _as_launched(options: dict[str, Any]) -> dict[str, Any]:
    """Under torchrun, automatic devices are as many as torchrun has started; Fabric takes one on a CPU."""
    if "TORCHELASTIC_RUN_ID" in os.environ and options.get("devices", "auto") == "auto":
        here, all_nodes = (int(os.environ[name]) for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"))
        return {**options, "devices": here, "num_nodes": all_nodes // here}
    return options


@contextmanager
def _own_store(timeout: float) -> Iterator[None]:
    """While the block runs, processes that torchrun has started meet in a store of their own.

    torchrun's outlives a restart, with the addresses of the dead: gloo then meets "Connection refused", NCCL waits.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        yield
        return
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    host, limit = os.environ["MASTER_ADDR"], timedelta(seconds=timeout)
    agent = torch.distributed.TCPStore(host, int(os.environ["MASTER_PORT"]), is_master=False, timeout=limit)
    own = None
    if rank == 0:
        own = torch.distributed.TCPStore(host, 0, is_master=True, multi_tenant=True, wait_for_workers=False)
    port = _common(torch.distributed.PrefixStore("ssvit", agent), rank, world, str(own.port) if own else "", timeout)
    os.environ.update(MASTER_PORT=port, TORCHELASTIC_USE_AGENT_STORE="False")
    yield  # `own` lives until torch has its server


def _common(store: torch.distributed.Store, rank: int, world: int, value: str, timeout: float) -> str:
    """The main process's value in all of them, by a store that also holds what earlier processes left there.

    Each asks in words of its own, and is answered until it has heard.
    """
    own = secrets.token_hex(8)
    if rank:
        store.set(f"asks {rank}", own)
        try:
            name, value = store.get(f"answer {own}").decode().split()
        except torch.distributed.DistStoreError:
            raise UserError(f"fabric.timeout={timeout:g}: rank 0 of {world} has not started in that time") from None
        store.set(f"heard {name} {rank}", "")
        return value
    waiting, until = set(range(1, world)), time.monotonic() + timeout
    while waiting:
        for other in sorted(waiting):
            if store.check([f"heard {own} {other}"]):
                waiting.discard(other)
            elif store.check([f"asks {other}"]):
                store.set(f"answer {store.get(f'asks {other}').decode()}", f"{own} {value}")
        if time.monotonic() > until:
            raise UserError(f"fabric.timeout={timeout:g}: rank {min(waiting)} of {world} has not started in that time")
        time.sleep(0.01)
    return value


@contextmanager
def together() -> Iterator[None]:
    """While the block runs, this process needs all others: PeerGone if one of them ends. See `Peers.together`."""
    with nullcontext() if _peers is None else _peers.together():
        yield


def _forget_peers() -> None:
    global _peers
    if _peers is not None:
        _peers.forget()
        _peers = None


# A data worker that outlives its process for a moment must not seem to be it.
os.register_at_fork(after_in_child=_forget_peers)


def _in_touch() -> bool:
    """Whether this process has others to talk to."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def part() -> None:
    """Let go of the other processes: what they share is done, and each goes on alone."""
    global _peers
    if _in_touch():
        torch.distributed.destroy_process_group()
    if _peers is not None:
        _peers.close()
        _peers = None


def _end() -> None:
    """End gloo's threads while there is an interpreter: one that then lets go of a tensor aborts the process.

    (torch's issue 190489.) A model that is spread keeps them running and is kept itself by a cycle.
    """
    if _peers is not None and _peers.lost:
        # NCCL may wait for the one that is gone, and to tidy up takes seconds in which torchrun cannot start anew.
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(1)
    part()
    gc.collect()


def backend(recipe: Recipe, device: torch.device) -> str:
    """What computes the layers: as the recipe says, or by `auto` compile on CUDA and kernels on a CPU."""
    if recipe.backend != "auto":
        return recipe.backend
    return "compile" if device.type == "cuda" else "kernels"


def agree(fabric: Fabric, values: list[float]) -> list[float]:
    """The mean of each value over all processes: the same list in every one, NaN where any process has NaN."""
    if fabric.world_size == 1:
        return values
    return fabric.all_reduce(torch.tensor(values, dtype=torch.float64), reduce_op="mean").tolist()


def gathered(module: torch.nn.Module, *, writeback: bool = False) -> AbstractContextManager[None]:
    """While the block runs, every process has the whole of a module that a strategy has spread in parts.

    writeback: what the block changes in it stays changed.
    """
    bare = getattr(module, "_orig_mod", module)  # what torch.compile has wrapped
    if isinstance(bare, FullyShardedDataParallel):
        return FullyShardedDataParallel.summon_full_params(bare, writeback=writeback)
    return nullcontext()
