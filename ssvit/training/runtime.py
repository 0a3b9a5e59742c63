"""Describe one process of a run: its device, its precision and its communication with the other processes."""

import inspect
import math
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, Literal, TypeVar, cast

import torch
from torch import Tensor, distributed, nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from ssvit.engine import private
from ssvit.errors import UserError
from ssvit.kernels import fused, operators
from ssvit.models.encoder import Encoder
from ssvit.models.vit import ViT
from ssvit.objectives.base import Objective
from ssvit.objectives.teacher import whole
from ssvit.training import sharding
from ssvit.training.recipe import Recipe

# Floating-point operations of a process that repay its compilation on a CPU, which took 140 seconds without a cache.
_REPAID = 300e12
_MAIN_TIMEOUT = timedelta(days=1)  # of work that the main process does alone

_CONNECTION_LOST = re.compile(
    r"connection (closed|reset|refused)|broken pipe|time(d )?out|timing out|remote process|aborted", re.IGNORECASE
)
T = TypeVar("T")
Precision = Literal["bf16-mixed", "32-true", "64-true"]


def precision(recipe: Recipe, device: torch.device) -> Precision:
    """Return the precision of a run. auto: bf16-mixed if the device is faster in bfloat16, else 32-true."""
    if recipe.precision != "auto":
        return recipe.precision
    return "bf16-mixed" if private.prefers_bfloat16(device) else "32-true"


def backend(
    device: torch.device, world: int, recipe: Recipe, encoder: Encoder
) -> tuple[Literal["eager", "compile", "kernels"], str]:
    """Return the implementation of the layers; auto is the fastest one in docs/performance.md.

    The choice of auto depends on the options, the machine, its compiler and whether the kernels are built, but not on
    measured times, so a run that is resumed on the same machine has the same bits as an uninterrupted run.

    Args:
        device: The device of this process.
        world: Number of processes.
        recipe: The hyperparameters.
        encoder: The encoder.

    Returns:
        The implementation, and the reason in words.

    Raises:
        UserError: The recipe requires kernels that are not built.
    """
    half = precision(recipe, device) == "bf16-mixed"
    if recipe.backend != "auto":
        if recipe.backend == "kernels" and half and operators.version() and operators.library() is None:
            raise UserError("recipe.backend=kernels: the kernels are not built; ssvit build-kernels compiles them")
        return recipe.backend, "chosen"
    if device.type == "cuda":
        return "compile", "the device is a GPU"
    if device.type != "cpu":
        return "eager", "the device is neither a CPU nor a GPU"
    if not half and torch.float32 in fused.TYPES:
        return "kernels", "the device is a CPU with AVX-512; products in float32 by oneDNN"
    if half and operators.library() is not None:
        return "kernels", f"the device is a CPU; version for {operators.version()}"
    hint = "; ssvit build-kernels compiles faster layers" if half and operators.version() else ""
    if not isinstance(encoder, ViT):
        return "eager", f"the encoder is {encoder.options.label}, not a ViT{hint}"
    # Forward and backward pass take 6 operations for each weight and token. Masking and views are not considered.
    tokens = recipe.steps * recipe.batch_size // world * encoder.patches
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


class PeerGone(UserError):
    """Another process of the run has ended or does not respond."""


@contextmanager
def detect_lost_peers() -> Iterator[None]:
    """Replace the backend's error by PeerGone if another process ends or does not respond during the block.

    gloo raises an error as soon as a connection is closed, NCCL after `launch.timeout`. torchrun ends processes that
    wait in other calls.
    """
    try:
        yield
    except RuntimeError as error:
        from_backend = isinstance(error, torch.distributed.DistError) or "gloo" in str(error).lower()
        if not (from_backend and _CONNECTION_LOST.search(str(error))):
            raise
        raise PeerGone("another process of the run has ended or did not respond within launch.timeout") from None


class Processes:
    """Hold the device, precision and rank of one process of a run, and communicate with the other processes.

    Args:
        device: The device of this process.
        precision: Precision of the model.
        rank: Number of this process.
        world: Number of processes.
        is_sharded: Whether the model is sharded over the processes (FSDP2); otherwise each has a copy (DDP).
    """

    def __init__(
        self, device: torch.device, precision: Precision, *, rank: int = 0, world: int = 1, is_sharded: bool = False
    ) -> None:
        self.device, self.precision = device, precision
        self.rank, self.world, self.is_sharded = rank, world, is_sharded

    @property
    def is_main(self) -> bool:
        """Return whether this is the main process, which prints and writes files."""
        return self.rank == 0

    def computing(self) -> AbstractContextManager[object]:
        """Return the context of forward passes: autocast to bfloat16, or float64 as the type of new tensors."""
        if self.precision == "bf16-mixed":
            return torch.autocast(self.device.type, dtype=torch.bfloat16)
        return _float64() if self.precision == "64-true" else nullcontext()

    def prepare_model(self, objective: Objective, recipe: Recipe) -> nn.Module:
        """Move an objective to the device, copy or shard it, compile it if the recipe requires it, and return it."""
        if self.precision == "64-true":
            objective.double()
        if self.is_sharded:
            half, compiles = self.precision == "bf16-mixed", recipe.backend == "compile"
            return sharding.shard(objective, self.device, self.world, half=half, compiles=compiles)
        model: nn.Module = objective.to(self.device)
        if self.world > 1:
            # Each step uses the same weights. DDP's static graph fails when gradients are accumulated
            # (torch issue 143580), and torch.compile changes the graph.
            static = recipe.accumulate == 1 and recipe.backend != "compile"
            # Newer versions of torch renamed the argument broadcast_buffers to forward_sync_buffers.
            is_renamed = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
            # Buffers are updated identically in all processes.
            buffers: dict[str, Any] = {"forward_sync_buffers" if is_renamed else "broadcast_buffers": False}
            model = DistributedDataParallel(model, gradient_as_bucket_view=True, static_graph=static, **buffers)
        return torch.compile(model) if recipe.backend == "compile" else model  # type: ignore[return-value]

    def accumulating(self, model: Any, more: bool) -> AbstractContextManager[object]:
        """Return the context of a backward pass; gradients are exchanged unless more micro-batches follow.

        Args:
            model: The model, as `prepare_model` returns it.
            more: Whether this is not the last micro-batch of an update.
        """
        if self.is_sharded:
            model.set_requires_gradient_sync(not more)
        return model.no_sync() if more and self.world > 1 and not self.is_sharded else nullcontext()

    def broadcast(self, value: T) -> T:
        """Return the main process's value, which is pickled, in all processes."""
        values = [value]
        if self.world > 1:
            distributed.broadcast_object_list(values, 0)
        return values[0]

    def barrier(self) -> None:
        """Wait for all processes."""
        if self.world > 1:
            distributed.barrier()

    @contextmanager
    def waiting_for_main(self) -> Iterator[None]:
        """Wait at the end of the block until the main process has left it, for at most a day.

        `launch.timeout` does not limit this wait. It also ends when the main process raises an error, after which the
        next collective of the other processes fails.
        """
        if self.world == 1:
            yield
            return
        self.barrier()  # within launch.timeout; `new_group` would wait for a lost process for the limit of the group
        # gloo raises an error in the waiting processes as soon as the main process has ended; NCCL does not.
        group = cast(ProcessGroup, distributed.new_group(backend="gloo", timeout=_MAIN_TIMEOUT))
        try:
            yield
        finally:
            distributed.broadcast(torch.zeros(1), 0, group)

    def any_process(self, condition: bool) -> bool:
        """Return whether a condition holds in any process."""
        return bool(self.mean(torch.tensor(float(condition), device=self.device)))

    def mean(self, value: Tensor) -> Tensor:
        """Return the mean of a tensor over all processes, identical in all of them; the tensor may be overwritten."""
        if self.world == 1:
            return value
        distributed.all_reduce(value)
        return value.div_(self.world)


@contextmanager
def _float64() -> Iterator[None]:
    former = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(former)


def clip(optimizer: torch.optim.Optimizer, largest: float) -> Tensor:
    """Clip the gradients to a maximum global norm.

    Args:
        optimizer: The optimiser with all weights.
        largest: Maximum norm; 0 for no clipping.

    Returns:
        () norm before clipping, identical in all processes.
    """
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    return whole(nn.utils.clip_grad_norm_(weights, largest or math.inf))
