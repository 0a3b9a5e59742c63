"""Compute linear layers, layer norms and branches of a Transformer faster than torch does on a CPU.

torch multiplies float32 matrices on a CPU by MKL, which uses half of the vector width of AMD's processors with AVX-512;
oneDNN's kernel, which torch.compile's CPU code calls, uses the full width. In bfloat16 with float32 weights, as under
autocast, `ssvit.kernels.operators` computes complete layers. docs/performance.md has the figures.

Letters: b images, t tokens, q queries, r rows (the tokens of all images), i inputs, o outputs, d width.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ssvit.engine.private import ONEDNN_HAS_BFLOAT16, ONEDNN_LEADS_IN_FLOAT32, onednn_linear
from ssvit.kernels import operators
from ssvit.models.positions import angles_of

_BY_TYPE = {torch.float32: ONEDNN_LEADS_IN_FLOAT32, torch.bfloat16: ONEDNN_HAS_BFLOAT16}
TYPES = {dtype for dtype, is_used in _BY_TYPE.items() if is_used}  # types of linear layers that oneDNN computes


def product(left: Tensor, right: Tensor) -> Tensor:
    """Multiply two matrices of any strides: (r, i) and (i, o) -> (r, o)."""
    return onednn_linear(left, right.t()) if left.dtype == torch.float32 else left @ right


class _OneDNN(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, dtype: torch.dtype) -> Tensor:
        rows, weight = x.reshape(-1, x.shape[-1]).to(dtype), weight.to(dtype)
        ctx.save_for_backward(rows, weight)
        return onednn_linear(rows, weight, bias.to(dtype)).view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows = gradient.reshape(-1, len(weight))
        to_x, to_weight, to_bias, _ = ctx.needs_input_grad
        # The kernel is fastest if the narrower matrix is transposed.
        narrow = len(weight) <= weight.shape[1]
        return (
            product(rows, weight).view(*gradient.shape[:-1], -1) if to_x else None,
            (product(rows.t(), x) if narrow else product(x.t(), rows).t()) if to_weight else None,
            rows.sum(0) if to_bias else None,
            None,
        )


def _rows(x: Tensor) -> Tensor:
    """Return (..., d) as contiguous bfloat16 rows (r, d), the input of the operators."""
    return x.reshape(-1, x.shape[-1]).to(torch.bfloat16).contiguous()


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, packed: Tensor | None) -> Tensor:
        rows = _rows(x)
        ctx.save_for_backward(rows, weight)
        return operators.library().linear(rows, weight if packed is None else packed, bias).view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows = _rows(gradient)
        needs_x, *needs_rest = ctx.needs_input_grad[:3]
        by = operators.library()
        to_x = by.linear_inputs(rows, weight).view(*gradient.shape[:-1], -1) if needs_x else None
        return to_x, *(by.linear_weights(rows, x) if any(needs_rest) else (None, None)), None


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor | None, packed: Tensor, heads: int) -> Tensor:
        query, packed = None if query is None else query.contiguous(), packed.contiguous()
        out, norms = operators.library().attention(query, packed, heads)
        ctx.save_for_backward(query, packed, norms)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, packed, norms = ctx.saved_tensors
        to_packed, *to_query = operators.library().attention_backward(query, packed, gradient.contiguous(), norms)
        return (to_query[0] if to_query else None), to_packed, None


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, angles: Tensor, rotated: int) -> Tensor:
        ctx.save_for_backward(angles)
        ctx.rotated = rotated
        return operators.library().rotate(x.contiguous(), angles, rotated, False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (angles,) = ctx.saved_tensors
        return operators.library().rotate(gradient.contiguous(), angles, ctx.rotated, True), None, None


class _Branches(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, heads: list[int], epsilon: float, adds: bool, learns: bool, *weights: Tensor
    ) -> Tensor:
        x, ctx.heads, ctx.adds = x.contiguous(), heads, adds
        kept = operators.library().branches(x, weights, heads, epsilon, adds, learns)
        ctx.save_for_backward(x, *weights, *kept)
        return kept[-6:][0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, *saved = ctx.saved_tensors
        weights, kept = saved[: len(saved) // 2], saved[len(saved) // 2 :]
        to_x, *to_weights = operators.library().branches_backward(
            gradient.contiguous(), x, weights, kept, ctx.heads, ctx.adds
        )
        return to_x, None, None, None, None, *to_weights


def _by_kernels(x: Tensor, dtype: torch.dtype, *parameters: Tensor) -> bool:
    """Return whether the operators support a product of these tensors in this type."""
    if dtype != torch.bfloat16 or any(p.dtype != torch.float32 or not p.is_contiguous() for p in parameters):
        return False
    return operators.supports(x, *(width for parameter in parameters for width in parameter.shape))


def _dtype(x: Tensor) -> torch.dtype:
    """Return the type of products, with autocast taken into account."""
    autocast = x.device.type == "cpu" and torch.is_autocast_enabled("cpu")
    return torch.get_autocast_dtype("cpu") if autocast else x.dtype


def version(weight: Tensor) -> int | None:
    """Return the number of changes of a weight; None for one that was created in inference mode, which has no count."""
    return None if weight.is_inference() else weight._version


def packed_weight(layer: nn.Linear | nn.LayerNorm) -> Tensor | None:
    """Return the weight of a layer that `accelerate.pack` has converted, or None if there is none or it has changed."""
    packed: tuple[Tensor, int | None] | None = getattr(layer, "packed", None)
    return packed[0] if packed is not None and packed[1] == version(layer.weight) else None


def linear(x: Tensor, weight: Tensor, bias: Tensor, packed: Tensor | None = None) -> Tensor:
    """Apply a linear layer, with the result of torch's `linear`, under autocast too.

    Args:
        x: Inputs, (..., i).
        weight: Weight, (o, i).
        bias: Bias, (o,).
        packed: Result of `packed_weight`.

    Returns:
        Outputs, (..., o).
    """
    dtype = _dtype(x)
    if _by_kernels(x, dtype, weight, bias):
        return _Linear.apply(x, weight, bias, packed)
    # torch.compile does not support oneDNN's kernel, and an exported graph must run on any machine.
    here = x.device.type == "cpu" and not torch.compiler.is_compiling()
    if here and dtype in TYPES and x.numel() > 0:
        return _OneDNN.apply(x, weight, bias, dtype)
    return F.linear(x, weight, bias)


def attention(
    query: Tensor | None, packed: Tensor, heads: int, rotation: Tensor | None = None, ids: Tensor | None = None
) -> Tensor | None:
    """Compute attention on the outputs of projections.

    Args:
        query: Queries, (b, q, d); None: `packed` contains them.
        packed: Queries, keys and values of all tokens, (b, t, 3 * d), or with `query` keys and values, (b, t, 2 * d).
        heads: Number of heads.
        rotation: Result of `ssvit.models.positions.Rotary`.
        ids: Indices in the rotation of the tokens of `query`, (b, q); None: all tokens in order.

    Returns:
        Outputs, (b, q, d), or None if the operators do not support the tensors.
    """
    width = packed.shape[-1] // (3 if query is None else 2)
    if packed.dtype != torch.bfloat16 or not operators.supports(packed, width // heads):
        return None
    if rotation is not None:
        if rotation.dtype != torch.float32:
            return None
        if query is not None:
            query = _Rotation.apply(query, angles_of(rotation, ids)[:, :, 0].contiguous(), width)
        packed = _Rotation.apply(packed, rotation[:, :, 0].contiguous(), packed.shape[-1] - width)
    return _Attention.apply(query, packed, heads)


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        out, moments = operators.library().layer_norm(rows, weight, bias, epsilon)
        ctx.save_for_backward(rows, weight, moments)
        return out.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, moments = ctx.saved_tensors
        to_x, *to_rest = operators.library().layer_norm_backward(
            rows, gradient.reshape(rows.shape).contiguous(), weight, moments
        )
        return to_x.view_as(gradient), *to_rest, None


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
    """Apply layer norm over the last dimension, with the result of torch's `layer_norm`.

    Args:
        x: Inputs, (..., d).
        weight: Scale, (d,).
        bias: Bias, (d,).
        epsilon: Value added to the variance.

    Returns:
        Outputs, (..., d).
    """
    if x.dtype == torch.bfloat16 and x.is_contiguous() and weight.dtype == torch.float32 and operators.supports(x):
        return _LayerNorm.apply(x, weight, bias, epsilon)
    return F.layer_norm(x, weight.shape, weight, bias, epsilon)


class Branch(NamedTuple):
    """Hold the modules of a branch: layer norm, linear layer, attention or GELU, linear layer.

    Attributes:
        norm: The layer norm.
        first: The first linear layer.
        second: The second linear layer.
        heads: Number of attention heads; 0: GELU.
    """

    norm: nn.LayerNorm
    first: nn.Linear
    second: nn.Linear
    heads: int = 0


def branches(x: Tensor, *parts: Branch, adds: bool = True) -> Tensor | None:
    """Apply branches in sequence.

    Args:
        x: Tokens, (b, t, d).
        parts: The branches.
        adds: Whether the input of each branch is added to its output; required for several branches.

    Returns:
        Tokens, (b, t, d), or None if the operators do not support the branches.
    """
    if x.ndim != 3 or x.dtype != torch.bfloat16:
        return None
    heads, epsilon = [part.heads for part in parts], parts[0].norm.eps
    if any(part.norm.eps != epsilon for part in parts):
        return None
    layers = [layer for part in parts for layer in (part.norm, part.first, part.second)]
    weights = [weight for layer in layers for weight in (layer.weight, layer.bias)]
    if len(parts) > 1 and len({weight.requires_grad for weight in weights}) > 1:
        return None  # computed separately, branches need no gradients of frozen weights
    head_widths = [x.shape[-1] // h for h in heads if h]
    if not (_by_kernels(x, _dtype(x), *weights) and operators.supports(x, *head_widths)):
        return None
    learns = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (x, *weights))
    if not learns:
        packed = [part for layer in layers for part in (packed_weight(layer), None)]
        weights = [weight if pack is None else pack for weight, pack in zip(weights, packed, strict=True)]
    return _Branches.apply(x, heads, epsilon, adds, learns, *weights)
