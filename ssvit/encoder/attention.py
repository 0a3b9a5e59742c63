"""Scaled dot-product attention, and the one place that chooses how it is computed.

Letters: b images, h heads, q tokens that ask, t tokens that answer, k width of a head, d = h * k.
"""

from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor
from torch.autograd.function import once_differentiable


def by_products(query: Tensor) -> bool:
    """Whether plain products are faster than torch's fused kernel: in bfloat16 on a CPU, where that kernel does its
    arithmetic in float32, they are 3 to 6 times faster, forward and backward. Everywhere else the kernel wins.
    """
    return query.device.type == "cpu" and query.dtype == torch.bfloat16


def attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None, dropout: float = 0.0) -> Tensor:
    """query (b, h, q, k), key and value (b, h, t, k), bias (b, h, q, t) or None -> (b, h, q, k)."""
    if by_products(query):
        logits = (query * query.shape[-1] ** -0.5) @ key.mT
        weights = (logits if bias is None else logits + bias).softmax(-1)
        return F.dropout(weights, dropout) @ value
    return F.scaled_dot_product_attention(query, key, value, attn_mask=bias, dropout_p=dropout)


def split(query: Tensor | None, packed: Tensor, heads: int) -> tuple[Tensor, ...]:
    """Outputs of projections, as `attend_packed` takes them, -> query (b, h, q, k), key and value (b, h, t, k)."""
    if query is not None:
        packed = rearrange(packed, "b t (parts h k) -> parts b h t k", parts=2, h=heads)
        return rearrange(query, "b q (h k) -> b h q k", h=heads), *packed.unbind()
    return rearrange(packed, "b t (parts h k) -> parts b h t k", parts=3, h=heads).unbind()


def merge(heads: Tensor) -> Tensor:
    """(b, h, q, k) -> (b, q, d)."""
    return rearrange(heads, "b h q k -> b q (h k)")


def attend_packed(query: Tensor | None, packed: Tensor, heads: int, dropout: float = 0.0) -> Tensor:
    """`attend` on the outputs of projections, without bias: -> (b, q, d).

    packed: queries, keys and values of all tokens, (b, t, 3 * d); or with query (b, q, d), keys and values alone,
    (b, t, 2 * d).
    """
    if by_products(packed) and dropout == 0:
        return _Products.apply(query, packed, heads)
    return merge(attend(*split(query, packed, heads), dropout=dropout))


class _Products(torch.autograd.Function):
    """Attention as matrix products of contiguous heads: one copy brings them there and one brings the result back,
    where autograd's own backward also turns keys around and stacks the gradients of the parts.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor | None, packed: Tensor, heads: int) -> Tensor:
        ctx.heads, ctx.packs_query = heads, query is None
        if query is None:
            query, key, value = _gathered(packed, heads, 3)
        else:
            (query,), (key, value) = _gathered(query, heads, 1), _gathered(packed, heads, 2)
        # The product is scaled, not the query, which the backward needs as it is.
        weights = torch.baddbmm(query.new_empty(()), query, key.mT, beta=0, alpha=query.shape[-1] ** -0.5)
        weights = weights.softmax(-1)
        ctx.save_for_backward(query, key, value, weights)
        return _scattered((weights @ value,), heads)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, weights = ctx.saved_tensors
        (gradient,) = _gathered(gradient, ctx.heads, 1)
        to_value = weights.mT @ gradient
        to_logits = torch._softmax_backward_data(gradient @ value.mT, weights, -1, weights.dtype)
        to_logits *= query.shape[-1] ** -0.5
        to_query, to_key = to_logits @ key, to_logits.mT @ query
        if ctx.packs_query:
            return None, _scattered((to_query, to_key, to_value), ctx.heads), None
        return _scattered((to_query,), ctx.heads), _scattered((to_key, to_value), ctx.heads), None


def _gathered(packed: Tensor, heads: int, parts: int) -> tuple[Tensor, ...]:
    """(b, t, parts * d) -> parts of (b * h, t, k), each contiguous."""
    apart = rearrange(packed, "b t (parts h k) -> parts b h t k", parts=parts, h=heads)
    return apart.contiguous().flatten(1, 2).unbind()


def _scattered(parts: tuple[Tensor, ...], heads: int) -> Tensor:
    """Parts of (b * h, t, k) -> (b, t, parts * d)."""
    images, tokens, width = len(parts[0]) // heads, *parts[0].shape[1:]
    packed = parts[0].new_empty(images, tokens, len(parts), heads, width)
    for place, part in enumerate(parts):
        packed[:, :, place] = part.view(images, heads, tokens, width).transpose(1, 2)
    return packed.flatten(2)
