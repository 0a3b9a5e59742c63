"""Linear layers and layer norms on a CPU by faster kernels than torch's, forward and backward, where those fit.

torch multiplies float32 matrices on a CPU by MKL, which uses half of the vector width of some processors; oneDNN uses
all of it there, and is as fast elsewhere. Its product with the bias folded in, `mkldnn::_linear_pointwise`, is what
torch.compile's own CPU code calls. In bfloat16 torch calls oneDNN by itself, and what is left to win is the bias, the
order in which the gradient of the weights is multiplied, and what `ssvit.encoder.kernels` computes between products.
docs/performance.md has the figures.

Letters: r rows, which are the tokens of all images, i inputs, o outputs, d width.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ssvit.encoder import kernels

# A build without oneDNN, as on some ARM machines, has no such kernel.
AVAILABLE = torch._C._has_mkldnn and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def _fits(x: Tensor, dtype: torch.dtype) -> bool:
    # torch.compile cannot take the kernel, and an exported graph is for any machine.
    here = AVAILABLE and x.device.type == "cpu" and not torch.compiler.is_compiling()
    return here and dtype in (torch.float32, torch.bfloat16) and x.numel() > 0


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (r, i), weight (o, i), bias (o,) -> (r, o)."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def product(left: Tensor, right: Tensor) -> Tensor:
    """The product of two matrices, (r, i) and (i, o) -> (r, o), of any strides."""
    return _onednn(left, right.t()) if left.dtype == torch.float32 else left @ right


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, gelu: bool, dtype: torch.dtype) -> Tensor:
        rows, weight = x.reshape(-1, x.shape[-1]).to(dtype), weight.to(dtype)
        out = _onednn(rows, weight, bias.to(dtype))
        ctx.save_for_backward(rows, weight, out if gelu else None)
        return (F.gelu(out) if gelu else out).view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, before_gelu = ctx.saved_tensors
        rows, for_bias = gradient.reshape(-1, len(weight)), None
        to_x, to_weight, to_bias, *_ = ctx.needs_input_grad
        if before_gelu is not None and kernels.fit(before_gelu):
            rows, for_bias = kernels.gelu_backward(before_gelu, rows)
        elif before_gelu is not None:
            rows = torch.ops.aten.gelu_backward(rows, before_gelu)
        if for_bias is None and to_bias:
            for_bias = rows.sum(0)
        # The kernel is fastest when the narrower matrix is the one that it has to turn.
        narrow = len(weight) <= weight.shape[1]
        return (
            product(rows, weight).view(*gradient.shape[:-1], -1) if to_x else None,
            (product(rows.t(), x) if narrow else product(x.t(), rows).t()) if to_weight else None,
            for_bias,
            None,
            None,
        )


def linear(x: Tensor, weight: Tensor, bias: Tensor, *, gelu: bool = False) -> Tensor:
    """x (..., i), weight (o, i), bias (o,) -> (..., o), as torch's `linear` gives it, under autocast too; gelu: and
    its `gelu` of that.
    """
    autocast = x.device.type == "cpu" and torch.is_autocast_enabled("cpu")
    dtype = torch.get_autocast_dtype("cpu") if autocast else x.dtype
    if _fits(x, dtype):
        return _Linear.apply(x, weight, bias, gelu, dtype)
    out = F.linear(x, weight, bias)
    return F.gelu(out) if gelu else out


class Linear(nn.Linear):
    """torch's layer, (..., i) -> (..., o), and with gelu=True its GELU too, by `linear`."""

    def __init__(self, inputs: int, outputs: int, *, gelu: bool = False) -> None:
        super().__init__(inputs, outputs)
        self.gelu = gelu

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias, gelu=self.gelu)


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        out, mean, scale = kernels.layer_norm(rows, weight, bias, epsilon)
        ctx.save_for_backward(rows, weight, mean, scale)
        return out.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, mean, scale = ctx.saved_tensors
        to_x, *rest = kernels.layer_norm_backward(rows, gradient.reshape(rows.shape), weight, mean, scale)
        return to_x.view_as(gradient), *rest, None


class LayerNorm(nn.LayerNorm):
    """torch's layer, (..., d) -> (..., d), in bfloat16 with float32 weights by `kernels`."""

    def forward(self, x: Tensor) -> Tensor:
        if kernels.fit(x) and self.weight.dtype == torch.float32:
            return _LayerNorm.apply(x, self.weight, self.bias, self.eps)
        return super().forward(x)
