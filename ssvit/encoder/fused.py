"""Linear layers on a CPU by oneDNN's own kernels, forward and backward, and the one place that chooses them.

torch multiplies float32 matrices on a CPU by MKL, which uses half of the vector width of some processors; oneDNN uses
all of it there, and is as fast elsewhere. Its product with the bias folded in, `mkldnn::_linear_pointwise`, is what
torch.compile's own CPU code calls. In bfloat16 torch calls oneDNN by itself, and what is left to win is the bias, and
the order in which the gradient of the weights is multiplied. docs/performance.md has the figures.

Letters: r rows, which are the tokens of all images, i inputs, o outputs.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

# A build without oneDNN, as on some ARM machines, has no such kernel.
AVAILABLE = torch._C._has_mkldnn and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def _fits(x: Tensor) -> bool:
    # torch.compile cannot take the kernel, and an exported graph is for any machine.
    here = AVAILABLE and x.device.type == "cpu" and not torch.compiler.is_compiling()
    return here and x.dtype in (torch.float32, torch.bfloat16) and x.numel() > 0


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (r, i), weight (o, i), bias (o,) -> (r, o)."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def product(left: Tensor, right: Tensor) -> Tensor:
    """The product of two matrices, (r, i) and (i, o) -> (r, o), of any strides."""
    return _onednn(left, right.t()) if left.dtype == torch.float32 else left @ right


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        ctx.save_for_backward(rows, weight)
        return _onednn(rows, weight, bias).view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows = gradient.reshape(-1, len(weight))
        to_x, to_weight, to_bias = ctx.needs_input_grad
        # The kernel is fastest when the narrower matrix is the one that it has to turn.
        narrow = len(weight) <= weight.shape[1]
        return (
            product(rows, weight).view(*gradient.shape[:-1], -1) if to_x else None,
            (product(rows.t(), x) if narrow else product(x.t(), rows).t()) if to_weight else None,
            rows.sum(0) if to_bias else None,
        )


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x (..., i), weight (o, i), bias (o,) -> (..., o), as torch's `linear` gives it, under autocast too."""
    if x.device.type == "cpu" and torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        x, weight, bias = x.to(dtype), weight.to(dtype), bias.to(dtype)
    return _Linear.apply(x, weight, bias) if _fits(x) else F.linear(x, weight, bias)


class Linear(nn.Linear):
    """torch's layer, (..., i) -> (..., o), multiplied by `linear`."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)
