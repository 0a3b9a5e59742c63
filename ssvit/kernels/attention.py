"""Compute scaled dot-product attention on packed projections, by the fastest implementation for a type and device.

Letters: b images, h heads, q queries, t keys and values, k width of a head, d = h * k.
"""

from collections.abc import Callable

import torch
from einops import rearrange
from torch import Tensor
from torch.autograd.function import once_differentiable

from ssvit.kernels import operators
from ssvit.kernels.fused import Context
from ssvit.models.block import attend


def attend_packed(
    query: Tensor | None,
    packed: Tensor,
    heads: int,
    *,
    turn: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None,
    bias: Callable[[Tensor], Tensor] | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Compute attention on the outputs of projections.

    Args:
        query: Queries, (b, q, d); None: `packed` contains them.
        packed: Queries, keys and values of all tokens, (b, t, 3 * d), or with `query` keys and values, (b, t, 2 * d).
        heads: Number of heads.
        turn: Function that rotates queries (b, h, q, k) and keys (b, h, t, k) for rotary positions, or None.
        bias: Function of the queries that returns values added to the logits, (b, h, q, k) -> (b, h, q, t), or None.
        dropout: Dropout rate of the attention weights.

    Returns:
        Outputs, (b, q, d).
    """
    parts = 3 if query is None else 2
    k = packed.shape[-1] // parts // heads
    if (
        turn is None
        and bias is None
        and dropout == 0
        and packed.dtype == torch.bfloat16
        and operators.supports_matmul(packed, k)
    ):
        return _Kernels.apply(query, packed, heads)
    *queries, key, value = rearrange(packed, "b t (parts h k) -> parts b h t k", parts=parts, h=heads).unbind()
    split = queries[0] if query is None else rearrange(query, "b q (h k) -> b h q k", h=heads)
    split, key = (split, key) if turn is None else turn(split, key)
    mixed = attend(split, key, value, bias=None if bias is None else bias(split), dropout=dropout)
    return rearrange(mixed, "b h q k -> b q (h k)")


class _Kernels(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, query: Tensor | None, packed: Tensor, heads: int) -> Tensor:
        query, packed = None if query is None else query.contiguous(), packed.contiguous()
        out, norms = operators.attention(query, packed, heads)
        ctx.save_for_backward(query, packed, norms)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, packed, norms = ctx.saved_tensors
        to_query, to_packed = operators.attention_backward(query, packed, gradient.contiguous(), norms)
        return None if query is None else to_query, to_packed, None
