"""Linear layers, layer norms and whole branches of a Transformer's layer on a CPU by faster kernels than torch's where
those fit, forward and backward.

torch multiplies float32 matrices on a CPU by MKL, which uses half of the vector width of some processors; oneDNN uses
all of it there, and is as fast elsewhere. Its product with the bias folded in, `mkldnn::_linear_pointwise`, is what
torch.compile's own CPU code calls. In bfloat16 with float32 weights, as autocast has it, `ssvit.encoder.kernels`
computes whole layers. docs/performance.md has the figures.

Letters: b images, t tokens, r rows, which are the tokens of all images, i inputs, o outputs, d width.
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


class _OneDNN(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, dtype: torch.dtype) -> Tensor:
        rows, weight = x.reshape(-1, x.shape[-1]).to(dtype), weight.to(dtype)
        ctx.save_for_backward(rows, weight)
        return _onednn(rows, weight, bias.to(dtype)).view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows = gradient.reshape(-1, len(weight))
        to_x, to_weight, to_bias, _ = ctx.needs_input_grad
        # The kernel is fastest when the narrower matrix is the one that it has to turn.
        narrow = len(weight) <= weight.shape[1]
        return (
            product(rows, weight).view(*gradient.shape[:-1], -1) if to_x else None,
            (product(rows.t(), x) if narrow else product(x.t(), rows).t()) if to_weight else None,
            rows.sum(0) if to_bias else None,
            None,
        )


def _rows(x: Tensor) -> Tensor:
    """(..., d) -> (r, d), as our own kernels take it."""
    return x.reshape(-1, x.shape[-1]).to(torch.bfloat16).contiguous()


class _Linear(torch.autograd.Function):
    """A linear layer by our own kernels."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        rows = _rows(x)
        ctx.save_for_backward(rows, weight)
        return kernels.linear(rows, weight, bias).view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows = _rows(gradient)
        to_x, *to_rest = ctx.needs_input_grad
        to_x = kernels.linear_inputs(rows, weight).view(*gradient.shape[:-1], -1) if to_x else None
        return to_x, *(kernels.linear_weights(rows, x) if any(to_rest) else (None, None))


class _Branch(torch.autograd.Function):
    """A branch of a Transformer's layer by our own kernels."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor, *rest: Any) -> Tensor:
        """What `kernels.branch` takes -> the first that it gives."""
        _, _, weight, _, weight2, _, _, ctx.adds, _ = rest
        x = x.contiguous()
        out, *kept = kernels.branch(x, gain, *rest)
        ctx.save_for_backward(x, gain, weight, weight2, *kept)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        given = gradient.contiguous(), *ctx.saved_tensors, ctx.adds
        to_x, to_gain, to_offset, *to_rest = kernels.branch_backward(*given)
        return to_x, to_gain, to_offset, None, *to_rest, None, None, None


def _by_kernels(x: Tensor, dtype: torch.dtype, *parameters: Tensor) -> bool:
    if dtype != torch.bfloat16 or any(p.dtype != torch.float32 or not p.is_contiguous() for p in parameters):
        return False
    return kernels.multiply(x, *(width for parameter in parameters for width in parameter.shape))


def _dtype(x: Tensor) -> torch.dtype:
    """Of products, under autocast too."""
    autocast = x.device.type == "cpu" and torch.is_autocast_enabled("cpu")
    return torch.get_autocast_dtype("cpu") if autocast else x.dtype


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x (..., i), weight (o, i), bias (o,) -> (..., o), as torch's `linear` gives it, under autocast too."""
    dtype = _dtype(x)
    if _by_kernels(x, dtype, weight, bias):
        return _Linear.apply(x, weight, bias)
    if _fits(x, dtype):
        return _OneDNN.apply(x, weight, bias, dtype)
    return F.linear(x, weight, bias)


def branch(
    x: Tensor, norm: nn.LayerNorm, first: nn.Linear, second: nn.Linear, *, heads: int = 0, adds: bool
) -> Tensor | None:
    """A branch of a Transformer's layer, (b, t, d) -> (b, t, d): layer norm, a linear layer, attention by so many heads
    or a GELU where they are 0, a second linear layer; and x itself if it `adds` that. None where our kernels cannot.
    """
    layers = first.weight, first.bias, second.weight, second.bias
    head = (x.shape[-1] // heads,) if heads else ()
    if x.dtype != torch.bfloat16 or not _by_kernels(x, _dtype(x), *layers, norm.weight, norm.bias):
        return None
    if x.ndim != 3 or not kernels.multiply(x, *head):
        return None
    return _Branch.apply(x, norm.weight, norm.bias, norm.eps, *layers, heads, adds, torch.is_grad_enabled())


class Linear(nn.Linear):
    """torch's layer, (..., i) -> (..., o), by `linear`."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        out, moments = kernels.layer_norm(rows, weight, bias, epsilon)
        ctx.save_for_backward(rows, weight, moments)
        return out.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, moments = ctx.saved_tensors
        to_x, *to_rest = kernels.layer_norm_backward(rows, gradient.reshape(rows.shape).contiguous(), weight, moments)
        return to_x.view_as(gradient), *to_rest, None


class LayerNorm(nn.LayerNorm):
    """torch's layer, (..., d) -> (..., d), in bfloat16 with float32 weights by `kernels`."""

    def forward(self, x: Tensor) -> Tensor:
        if kernels.fit(x) and self.weight.dtype == torch.float32:
            return _LayerNorm.apply(x, self.weight, self.bias, self.eps)
        return super().forward(x)
