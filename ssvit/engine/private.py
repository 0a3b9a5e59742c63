"""Private interfaces of other libraries, used where no public one does the same.

Tested with torch 2.15.
"""

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

_GRACE = 5.0  # seconds in which a process that lives has released a lock
P = ParamSpec("P")
T = TypeVar("T")
# A build without oneDNN, as on some ARM machines, has no such kernel.
HAS_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
_CAPABILITIES: Mapping[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()  # not in torch 2.10
_IS_INTEL = _CAPABILITIES.get("cpu_name", "").startswith("Intel")
# MKL uses half of the vector width of AMD's processors with AVX-512; elsewhere, it is as fast as oneDNN or faster.
ONEDNN_LEADS_IN_FLOAT32 = HAS_ONEDNN and torch.cpu._is_avx512_supported() and not _IS_INTEL
# oneDNN multiplies bfloat16 matrices on some processors only.
ONEDNN_HAS_BFLOAT16 = HAS_ONEDNN and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute a linear layer with oneDNN; torch multiplies float32 matrices with MKL.

    Args:
        x: (r, i).
        weight: (o, i).
        bias: (o,), or None.

    Returns:
        (r, o).
    """
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def multiplies_bfloat16(device: torch.device = torch.device("cpu")) -> bool:  # noqa: B008  # a constant
    """Return whether a device has instructions for products of bfloat16 matrices."""
    if device.type != "cpu":
        return device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def prefers_bfloat16(device: torch.device) -> bool:
    """Return whether a device multiplies bfloat16 matrices faster than float32 ones.

    Intel's processors with AVX-512-FP16 do so only by AMX, which some virtual machines do not provide.
    """
    slow = device.type == "cpu" and _IS_INTEL and _CAPABILITIES.get("avx512_fp16") and not has_matrix_units()
    return multiplies_bfloat16(device) and not slow


def has_matrix_units() -> bool:
    """Return whether the CPU has AMX, matrix units for bfloat16."""
    return torch.cpu._is_amx_tile_supported()


def constant_in_graphs(function: Callable[P, T]) -> Callable[P, T]:
    """Return torch.compiler.assume_constant_result(function), which would import torch._dynamo (3 s)."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def excluded_from_graphs(function: Callable[P, T]) -> Callable[P, T]:
    """Return torch.compiler.disable(function), but import torch._dynamo (3 s) only when the function is called."""
    return torch._disable_dynamo(function)  # type: ignore[attr-defined]


def without_dynamo() -> None:
    """Let optimisers and FlopCounterMode work without torch._dynamo (3 s), which excludes them from compilation."""
    if "torch._dynamo" not in sys.modules:
        from torch.utils.flop_counter import _FlopCounterMode

        optimizer = torch.optim.Optimizer
        for function in (optimizer.add_param_group, optimizer.zero_grad, _FlopCounterMode.__torch_dispatch__):
            method = inspect.unwrap(function)
            setattr(method, "__dynamo_disable", method)  # the name would be mangled in a class


def step(optimizer: torch.optim.Optimizer) -> None:
    """Call an optimiser's step with its hooks, under torch.no_grad, without its import of torch._dynamo (3 s)."""
    torch.optim.Optimizer.profile_hook_step(inspect.unwrap(type(optimizer).step))(optimizer)


def load_operators(package: str, pattern: str) -> bool:
    """Load a library of torch operators in a package's folder without the package, and return whether there is one."""
    spec = find_spec(package)
    folders = (spec.submodule_search_locations or ()) if spec else ()
    libraries = [str(library) for folder in folders for library in sorted(Path(folder).glob(pattern))]
    for library in libraries:
        torch.ops.load_library(library)
    return bool(libraries)


def has_hooks(module: nn.Module) -> bool:
    """Return whether a module has hooks, so that it must be called instead of its `forward`."""
    hooks = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    return any(hooks)


def tracing_errors() -> tuple[type[Exception], ...]:
    """Return the errors of torch.export for a model that it cannot trace."""
    from torch._dynamo.exc import UserError
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    return UserError, GuardOnDataDependentSymNode


def end_workers(batches: Iterator[Any]) -> None:
    """End the processes of an iterator over a DataLoader now, and not when it is collected as garbage."""
    lock = batches._workers_done_event._cond  # type: ignore[attr-defined]
    if lock.acquire(timeout=_GRACE):
        lock.release()
    else:  # A process that was killed held the lock of this event, and will never release it.
        batches._workers_done_event = torch.multiprocessing.Event()  # type: ignore[attr-defined]
    batches._shutdown_workers()  # type: ignore[attr-defined]
