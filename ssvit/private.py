"""Private interfaces of other libraries, used where no public one does the same.

Tested with torch 2.15 and lightning_fabric 2.6.
"""

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn

# A build without oneDNN, as on some ARM machines, has no such kernel.
HAS_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
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


def has_matrix_units() -> bool:
    """Return whether the CPU has AMX, matrix units for bfloat16."""
    return torch.cpu._is_amx_tile_supported()


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
    batches._shutdown_workers()  # type: ignore[attr-defined]


def set_timeout(strategy: Any, timeout: timedelta) -> None:
    """Set how long the processes of any Fabric strategy wait for each other."""
    if hasattr(strategy, "_timeout"):  # only strategies with several processes
        strategy._timeout = timeout


def set_static_graph(strategy: Any, static: bool) -> None:
    """Set whether Fabric's DDPStrategy assumes a static graph, after its construction."""
    strategy._ddp_kwargs["static_graph"] = static
