"""On which devices and in which precision a run computes: Lightning Fabric, set up from the options."""

import atexit
import gc
import inspect
import logging
import math
import os
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
from lightning_fabric import Fabric
from lightning_fabric.plugins.precision import DoublePrecision
from lightning_fabric.strategies.ddp import DDPStrategy
from lightning_fabric.strategies.strategy import Strategy
from lightning_fabric.utilities.exceptions import MisconfigurationException
from torch.distributed import (  # type: ignore[attr-defined]  # the two stores are documented, but not exported
    DistStoreError,
    PrefixStore,
    Store,
    TCPStore,
)
from torch.nn.parallel import DistributedDataParallel

from ssvit import devices, private
from ssvit.kernels import operators
from ssvit.options import UserError
from ssvit.randomness import key
from ssvit.training import sharding
from ssvit.training.recipe import Recipe

TIMEOUT = 600.0  # seconds that a process waits for another

_CONNECTION_LOST = re.compile(
    r"connection (closed|reset|refused)|broken pipe|time(d )?out|timing out|remote process|aborted", re.IGNORECASE
)
T = TypeVar("T")
Precision = Literal["bf16-mixed", "32-true", "64-true"]


def precision(recipe: Recipe, device: torch.device) -> Precision:
    """Fabric's precision. auto: bf16-mixed where the device itself multiplies matrices in bfloat16, else 32-true."""
    if recipe.precision != "auto":
        return recipe.precision
    if device.type == "cpu":
        native = private.multiplies_bfloat16()
    else:
        native = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return "bf16-mixed" if native else "32-true"


def backend(recipe: Recipe, device: torch.device) -> str:
    """What computes the layers. auto: compile on CUDA, kernels on a CPU."""
    if recipe.backend != "auto":
        return recipe.backend
    return "compile" if device.type == "cuda" else "kernels"


def lacks_kernels(recipe: Recipe, device: torch.device) -> bool:
    """Whether a run would be faster if `ssvit.kernels.operators` could be built here."""
    kernels_on_cpu = device.type == "cpu" and backend(recipe, device) == "kernels"
    return kernels_on_cpu and precision(recipe, device) == "bf16-mixed" and operators.library() is None


def start(recipe: Recipe, *, timeout: float = TIMEOUT, **options: Any) -> Fabric:
    """Fabric, launched. options: its own (accelerator, devices, num_nodes, strategy).

    UserError where Fabric refuses, or if another process does not come within `timeout` seconds.
    """
    if options.get("accelerator", "auto") == "auto":
        # Not Apple's: it has no float64, which random numbers and labels are made in.
        options["accelerator"] = "cuda" if torch.cuda.is_available() else "cpu"
    logging.getLogger("lightning_fabric").setLevel(logging.WARNING)  # the run reports its devices itself
    try:
        options = _as_launched(options)
        device = Fabric(accelerator=options["accelerator"], devices=1).device
        options["strategy"] = strategy(options, recipe, device)
        numbers: dict[str, Any] = {"precision": precision(recipe, device)}
        if recipe.precision == "64-true":  # which Fabric denies to a sharded model
            numbers = {"plugins": [DoublePrecision()]}
        fabric = Fabric(**numbers, **options)
        private.set_timeout(fabric.strategy, timedelta(seconds=timeout))
        with _own_store(timeout):
            fabric.launch()
    except (ValueError, RuntimeError, TypeError, OSError, MisconfigurationException) as error:
        given = ", ".join(f"fabric.{name}={value}" for name, value in options.items())
        raise UserError(f"{given}: {' '.join(str(error).split())}") from None
    if torch.distributed.is_initialized():
        atexit.register(_end)
    torch.manual_seed(key(recipe.seed, "weights"))
    return fabric


def in_all_processes(recipe: Recipe, options: devices.Fabric, function: Callable[[Fabric], T]) -> T | None:
    """Call a function in all processes, of which the main one then continues alone.

    Returns:
        The result in the main process; None in the others, also where all of them have failed alike.
    """
    threads = torch.get_num_threads()
    fabric = start(recipe, **options.values())
    try:
        with together():
            result = function(fabric)
    except PeerGone:
        raise
    except UserError:
        if fabric.is_global_zero:
            raise
        return None
    part()
    torch.set_num_threads(threads)
    return result if fabric.is_global_zero else None


def strategy(options: Mapping[str, Any], recipe: Recipe, device: torch.device) -> str | Strategy:
    """Fabric's strategy for its options; ddp and fsdp with what suits a run here."""
    given = options.get("strategy", "auto")
    if given == "fsdp":
        return sharding.strategy(half=precision(recipe, device) == "bf16-mixed")
    if given not in ("auto", "ddp") or not isinstance(Fabric(**options).strategy, DDPStrategy):
        return given
    renamed = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    buffers: dict[str, Any] = {"forward_sync_buffers" if renamed else "broadcast_buffers": False}
    return DDPStrategy(gradient_as_bucket_view=True, **buffers)  # all processes change buffers alike


def spread(fabric: Fabric, model: torch.nn.Module, recipe: Recipe) -> Any:
    """The model as the strategy spreads it over the processes."""
    if isinstance(fabric.strategy, DDPStrategy):
        # Each step uses the same weights. A graph that is taken for static fails where gradients are accumulated
        # (torch's issue 143580), and torch.compile changes it.
        static = recipe.accumulate == 1 and backend(recipe, fabric.device) != "compile"
        private.set_static_graph(fabric.strategy, static)
    return fabric.setup_module(model)


def _as_launched(options: dict[str, object]) -> dict[str, Any]:
    """Under torchrun, automatic devices are as many as torchrun has started; Fabric takes one on a CPU."""
    if "TORCHELASTIC_RUN_ID" in os.environ and options.get("devices", "auto") == "auto":
        here, all_nodes = (int(os.environ[name]) for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"))
        return {**options, "devices": here, "num_nodes": all_nodes // here}
    return options


@contextmanager
def _own_store(timeout: float) -> Iterator[None]:
    """While the block runs, processes that torchrun has started meet in a store of their own.

    torchrun's store outlives a restart and keeps the addresses of dead processes: gloo then fails, NCCL waits.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        yield
        return
    rank, world, port = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    host, limit = os.environ["MASTER_ADDR"], timedelta(seconds=timeout)
    agent = TCPStore(host, port, is_master=False, timeout=limit)
    own = None
    if rank == 0:
        own = TCPStore(host, 0, is_master=True, multi_tenant=True, wait_for_workers=False)
    own_port = _common(PrefixStore("ssvit", agent), rank, world, str(own.port) if own else "", timeout)
    os.environ.update(MASTER_PORT=own_port, TORCHELASTIC_USE_AGENT_STORE="False")
    yield  # `own` lives until torch has its server


def _common(store: Store, rank: int, world: int, value: str, timeout: float) -> str:
    """The main process's value in all of them, by a store that also holds what earlier processes left there.

    Each process asks under a random name, and the main one answers until the process has confirmed.
    """
    own = secrets.token_hex(8)
    if rank:
        store.set(f"asks {rank}", own)
        try:
            name, value = store.get(f"answer {own}").decode().split()
        except DistStoreError:
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


class PeerGone(UserError):
    """Another process of the run has ended or does not answer."""


@contextmanager
def together() -> Iterator[None]:
    """Raise PeerGone in place of the backend's error if another process ends or does not answer during the block.

    gloo raises as soon as a connection is closed, NCCL after `fabric.timeout`. torchrun and Fabric end the processes
    that wait for something else.
    """
    try:
        yield
    except RuntimeError as error:
        of_backend = isinstance(error, torch.distributed.DistError) or "gloo" in str(error).lower()
        if not (of_backend and _CONNECTION_LOST.search(str(error))):
            raise
        raise PeerGone("another process of the run has ended or does not answer within fabric.timeout") from None


def part() -> None:
    """Leave the process group: each process goes on alone."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _end() -> None:
    """End gloo's threads while there is an interpreter: one that frees a tensor later aborts (torch's issue 190489).

    A sharded model keeps them running, and a reference cycle keeps the model.
    """
    part()
    gc.collect()


def agree(fabric: Fabric, values: list[float]) -> list[float]:
    """The mean of each value over all processes: the same list in every one, NaN where any process has NaN."""
    return mean(fabric, torch.tensor(values, dtype=torch.float64, device=fabric.device)).tolist()


def mean(fabric: Fabric, value: torch.Tensor) -> torch.Tensor:
    """The mean of a tensor over all processes, the same in every one, which may be written over it."""
    if fabric.world_size == 1:
        return value
    torch.distributed.all_reduce(value)  # Fabric's waits for a barrier first
    return value.div_(fabric.world_size)


def share(fabric: Fabric, tensors: Iterable[torch.Tensor]) -> None:
    """Give every process the main process's values."""
    if fabric.world_size > 1:
        for tensor in tensors:
            torch.distributed.broadcast(tensor, 0)


def clip(fabric: Fabric, model: Any, optimizer: Any, largest: float) -> torch.Tensor:
    """Clip the gradients to a global norm, 0 for no limit; returns the norm before, (), the same in every process."""
    norm = fabric.clip_gradients(model, optimizer, max_norm=largest or math.inf, error_if_nonfinite=False)
    assert norm is not None
    return sharding.whole(norm)
