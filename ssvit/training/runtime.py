"""Set up devices, precision and processes of a run with Lightning Fabric."""

import atexit
import gc
import inspect
import logging
import math
import os
import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping
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
    PrefixStore,
    Store,
    TCPStore,
)
from torch.nn.parallel import DistributedDataParallel

from ssvit import devices, private
from ssvit.kernels import operators
from ssvit.models.encoder import Encoder
from ssvit.models.vit import ViT
from ssvit.options import UserError
from ssvit.randomness import key
from ssvit.training import sharding
from ssvit.training.recipe import Recipe

TIMEOUT = 600.0  # seconds that a process waits for another process
# Floating-point operations of a process that repay its compilation on a CPU, which took 140 seconds without a cache.
_REPAID = 300e12

_CONNECTION_LOST = re.compile(
    r"connection (closed|reset|refused)|broken pipe|time(d )?out|timing out|remote process|aborted", re.IGNORECASE
)
T = TypeVar("T")
Precision = Literal["bf16-mixed", "32-true", "64-true"]


def precision(recipe: Recipe, device: torch.device) -> Precision:
    """Return Fabric's precision. auto: bf16-mixed if the device multiplies bfloat16 matrices natively, else 32-true."""
    if recipe.precision != "auto":
        return recipe.precision
    return "bf16-mixed" if private.multiplies_bfloat16(device) else "32-true"


def backend(fabric: Fabric, recipe: Recipe, encoder: Encoder) -> tuple[Literal["eager", "compile", "kernels"], str]:
    """Return the implementation of the layers; auto is the fastest one in docs/performance.md.

    The choice of auto depends on the options, the machine, its compiler and whether the kernels are built, but not on
    measured times, so a run that is resumed on the same machine has the same bits as an uninterrupted run.

    Args:
        fabric: The processes and devices.
        recipe: The hyperparameters.
        encoder: The encoder.

    Returns:
        The implementation, and the reason in words.

    Raises:
        UserError: The recipe requires kernels that are not built.
    """
    device = fabric.device
    half = precision(recipe, device) == "bf16-mixed"
    if recipe.backend != "auto":
        if recipe.backend == "kernels" and half and operators.version() and operators.library() is None:
            raise UserError("recipe.backend=kernels: the kernels are not built; ssvit build-kernels compiles them")
        return recipe.backend, "chosen"
    if device.type == "cuda":
        return "compile", "the device is a GPU"
    if device.type != "cpu":
        return "eager", "the device is neither a CPU nor a GPU"
    if not half:
        return "kernels", "the device is a CPU; products in float32 by oneDNN"
    if operators.library() is not None:
        return "kernels", f"the device is a CPU; version for {operators.version()}"
    hint = "; ssvit build-kernels compiles faster layers" if operators.version() else ""
    if not isinstance(encoder, ViT):
        return "eager", f"the encoder is {encoder.options.label}, not a ViT{hint}"
    # Forward and backward pass take 6 operations for each weight and token. Masking and views are not considered.
    tokens = recipe.steps * recipe.batch_size // fabric.world_size * encoder.patches
    work = 6 * tokens * sum(weight.numel() for weight in encoder.parameters())
    if work < _REPAID:
        reason = f"about {work / 1e12:.3g} TFLOP per process; compiling pays off from {_REPAID / 1e12:.0f} on"
        return "eager", reason + hint
    if not _compiles():
        return "eager", "torch.compile fails on this machine; it requires a C++ compiler (g++, or the value of CXX)"
    return "compile", f"about {work / 1e12:,.0f} TFLOP per process{hint}"


def _compiles() -> bool:
    """Return whether torch.compile works for the CPU: it needs a C++ compiler and the headers of Python."""
    try:
        torch.compile(lambda x: x + 1)(torch.zeros(1))
    except RuntimeError:
        return False
    return True


def start(recipe: Recipe, *, timeout: float = TIMEOUT, **options: Any) -> Fabric:
    """Launch the processes of a run and return its Fabric.

    Args:
        recipe: The hyperparameters, with the precision.
        timeout: Seconds to wait for other processes.
        options: Arguments of Fabric: accelerator, devices, num_nodes, strategy.

    Raises:
        UserError: Fabric rejects the options, or another process does not start within `timeout` seconds.
    """
    if options.get("accelerator", "auto") == "auto":
        # Apple's MPS is excluded: it lacks float64, which random numbers and labels require.
        options["accelerator"] = "cuda" if torch.cuda.is_available() else "cpu"
    logging.getLogger("lightning_fabric").setLevel(logging.WARNING)  # the run reports its devices itself
    try:
        options = _as_launched(options)
        device = Fabric(accelerator=options["accelerator"], devices=1).device
        options["strategy"] = strategy(options, recipe, device)
        numbers: dict[str, Any] = {"precision": precision(recipe, device)}
        if recipe.precision == "64-true":  # Fabric rejects precision="64-true" for a sharded model
            numbers = {"plugins": [DoublePrecision()]}
        fabric = Fabric(**numbers, **options)
        private.set_timeout(fabric.strategy, timedelta(seconds=timeout))
        with _new_store(timeout):
            fabric.launch()
    except (ValueError, RuntimeError, TypeError, OSError, MisconfigurationException) as error:
        values = ", ".join(f"fabric.{name}={value}" for name, value in options.items())
        raise UserError(f"{values}: {' '.join(str(error).split())}") from None
    if torch.distributed.is_initialized():
        atexit.register(_end)
    torch.manual_seed(key(recipe.seed, "weights"))
    return fabric


def in_all_processes(recipe: Recipe, options: devices.Fabric, function: Callable[[Fabric], T]) -> T | None:
    """Call a function in all processes; afterwards only the main process continues.

    Args:
        recipe: The hyperparameters, with the precision.
        options: Options of devices and processes.
        function: The function, called with the Fabric.

    Returns:
        The result in the main process; None in all other processes, also after a UserError.
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
    """Return Fabric's strategy for its options; ddp and fsdp are configured for this project.

    Args:
        options: Arguments of Fabric.
        recipe: The hyperparameters, with the precision.
        device: The device of this process.
    """
    name = options.get("strategy", "auto")
    if name == "fsdp":
        return sharding.strategy(half=precision(recipe, device) == "bf16-mixed")
    if name not in ("auto", "ddp") or not isinstance(Fabric(**options).strategy, DDPStrategy):
        return name
    # Newer versions of torch renamed the argument broadcast_buffers to forward_sync_buffers.
    is_renamed = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    buffers: dict[str, Any] = {"forward_sync_buffers" if is_renamed else "broadcast_buffers": False}
    return DDPStrategy(gradient_as_bucket_view=True, **buffers)  # buffers are updated identically in all processes


def spread(fabric: Fabric, model: torch.nn.Module, recipe: Recipe) -> Any:
    """Wrap the model with the strategy (DDP or FSDP) and return it."""
    if isinstance(fabric.strategy, DDPStrategy):
        # Each step uses the same weights. DDP's static graph fails when gradients are accumulated
        # (torch issue 143580), and torch.compile changes the graph.
        static = recipe.accumulate == 1 and recipe.backend != "compile"
        private.set_static_graph(fabric.strategy, static)
    return fabric.setup_module(model)


def _as_launched(options: dict[str, object]) -> dict[str, Any]:
    """Replace devices=auto by torchrun's number of processes; Fabric would use one process on a CPU."""
    if "TORCHELASTIC_RUN_ID" in os.environ and options.get("devices", "auto") == "auto":
        here, all_nodes = (int(os.environ[name]) for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"))
        return {**options, "devices": here, "num_nodes": all_nodes // here}
    return options


@contextmanager
def _new_store(timeout: float) -> Iterator[None]:
    """Let processes started by torchrun rendezvous in a new store within the block.

    torchrun's store survives a restart and keeps the addresses of dead processes: gloo then fails, and NCCL waits. It
    is used only to publish the port of the new store, which the main process serves.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        yield
        return
    host, port, limit = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timedelta(seconds=timeout)
    agent = PrefixStore("ssvit", TCPStore(host, port, is_master=False, timeout=limit))
    server = None
    if os.environ["RANK"] == "0":
        server = TCPStore(host, 0, is_master=True, multi_tenant=True, wait_for_workers=False)
        agent.set("port", str(server.port))
    os.environ.update(MASTER_PORT=_served_port(agent, host, timeout), TORCHELASTIC_USE_AGENT_STORE="False")
    yield  # `server` must not be collected before torch has started its server


def _served_port(store: Store, host: str, timeout: float) -> str:
    """Return the published port as soon as it accepts connections; the port of an earlier attempt is closed.

    Args:
        store: The store with the port of the main process.
        host: Host of the main process.
        timeout: Maximum number of seconds to wait.

    Raises:
        OSError: The main process has not started in that time.
    """
    until = time.monotonic() + timeout
    while True:
        port = store.get("port").decode()
        try:
            socket.create_connection((host, int(port)), timeout).close()
            return port
        except ConnectionRefusedError:
            if time.monotonic() > until:
                raise
        time.sleep(0.1)


class PeerGone(UserError):
    """Another process of the run has ended or does not respond."""


@contextmanager
def together() -> Iterator[None]:
    """Replace the backend's error by PeerGone if another process ends or does not respond during the block.

    gloo raises an error as soon as a connection is closed, NCCL after `fabric.timeout`. torchrun and Fabric end
    processes that wait in other calls.
    """
    try:
        yield
    except RuntimeError as error:
        from_backend = isinstance(error, torch.distributed.DistError) or "gloo" in str(error).lower()
        if not (from_backend and _CONNECTION_LOST.search(str(error))):
            raise
        raise PeerGone("another process of the run has ended or did not respond within fabric.timeout") from None


def part() -> None:
    """Destroy the process group; each process continues independently."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _end() -> None:
    """End gloo's threads before the interpreter exits: one that frees a tensor later aborts (torch issue 190489).

    A sharded model keeps the threads running, and a reference cycle keeps the model alive.
    """
    part()
    gc.collect()


def any_process(fabric: Fabric, condition: bool) -> bool:
    """Return whether a condition holds in any process."""
    return bool(mean(fabric, torch.tensor(float(condition), device=fabric.device)))


def mean(fabric: Fabric, value: torch.Tensor) -> torch.Tensor:
    """Return the mean of a tensor over all processes, identical in all of them; the tensor may be overwritten."""
    if fabric.world_size == 1:
        return value
    torch.distributed.all_reduce(value)  # Fabric's all_reduce waits for a barrier first
    return value.div_(fabric.world_size)


def clip(fabric: Fabric, model: Any, optimizer: Any, largest: float) -> torch.Tensor:
    """Clip the gradients to a maximum global norm.

    Args:
        fabric: The processes.
        model: The model, as returned by `spread`.
        optimizer: Its optimiser.
        largest: Maximum norm; 0 for no clipping.

    Returns:
        () norm before clipping, identical in all processes.
    """
    norm = fabric.clip_gradients(model, optimizer, max_norm=largest or math.inf, error_if_nonfinite=False)
    assert norm is not None
    return sharding.whole(norm)
