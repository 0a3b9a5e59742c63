"""Where and in which numbers a run computes: Lightning Fabric, set up from the options."""

import atexit
import ctypes
import gc
import logging
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import torch
from lightning_fabric import Fabric
from lightning_fabric.strategies import FSDPStrategy
from lightning_fabric.utilities.exceptions import MisconfigurationException
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision

from ssvit.encoder import kernels
from ssvit.options import UserError
from ssvit.randomness import key
from ssvit.training.recipe import Recipe

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h


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
    """Whether a run would be faster if `ssvit.encoder.kernels` could be built here."""
    eager_on_cpu = device.type == "cpu" and not compiles(recipe, device)
    return eager_on_cpu and precision(recipe, device) == "bf16-mixed" and kernels.library() is None


def start(recipe: Recipe, **options: Any) -> Fabric:
    """Fabric, launched: options are its own (accelerator, devices, num_nodes, strategy).
    UserError where Fabric refuses.
    """
    if options.get("accelerator", "auto") == "auto":
        # Not Apple's: it has no float64, which random numbers and labels are made in.
        options["accelerator"] = "cuda" if torch.cuda.is_available() else "cpu"
    logging.getLogger("lightning_fabric").setLevel(logging.WARNING)  # it announces what the run says itself
    try:
        device = Fabric(accelerator=options["accelerator"], devices=1).device
        numbers = precision(recipe, device)
        fabric = Fabric(precision=numbers, **_as_launched({**options, "strategy": strategy(options, numbers)}))
        fabric.launch()
    except (ValueError, RuntimeError, TypeError, MisconfigurationException) as error:
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


def _in_touch() -> bool:
    """Whether this process has others to talk to."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def part() -> None:
    """Let go of the other processes: what they share is done, and each goes on alone."""
    if _in_touch():
        torch.distributed.destroy_process_group()


def _end() -> None:
    """End gloo's threads while there is an interpreter: one that then lets go of a tensor aborts the process.

    (torch's issue 190489.) A model that is spread keeps them running and is kept itself by a cycle.
    """
    part()
    gc.collect()


def compiles(recipe: Recipe, device: torch.device) -> bool:
    """Whether to compile: as said, or by `auto` on CUDA alone (on a CPU it gains nothing)."""
    return device.type == "cuda" if recipe.compile == "auto" else recipe.compile


def agree(fabric: Fabric, values: list[float]) -> list[float]:
    """The mean of each value over all processes: the same list in every one, NaN where any process has NaN."""
    if fabric.world_size == 1:
        return values
    return fabric.all_reduce(torch.tensor(values, dtype=torch.float64), reduce_op="mean").tolist()


def gathered(module: torch.nn.Module) -> AbstractContextManager[None]:
    """While the block runs, every process has the whole of a module that a strategy has spread in parts."""
    bare = getattr(module, "_orig_mod", module)  # what torch.compile has wrapped
    if isinstance(bare, FullyShardedDataParallel):
        return FullyShardedDataParallel.summon_full_params(bare, writeback=False)
    return nullcontext()
