"""Scaled dot-product attention, and the one place that chooses how it is computed.

Letters: b images, h heads, q tokens that ask, t tokens that answer, k width of a head, d = h * k.
"""

from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor
from torch.autograd.function import once_differentiable

from ssvit.encoder import kernels


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
    if kernels.fit(packed) and dropout == 0:
        return _Kernels.apply(query, packed, heads)
    return merge(attend(*split(query, packed, heads), dropout=dropout))


class _Kernels(torch.autograd.Function):
    """Attention by our own kernels around plain products."""

    @staticmethod
    def forward(ctx: Any, query: Tensor | None, packed: Tensor, heads: int) -> Tensor:
        ctx.heads, ctx.packs_query = heads, query is None
        if query is None:
            query, key, value = kernels.gather_heads(packed, heads, 3)
        else:
            (query,), (key, value) = kernels.gather_heads(query, heads, 1), kernels.gather_heads(packed, heads, 2)
        weights = query @ key.mT
        kernels.softmax_(weights, query.shape[-1] ** -0.5)
        ctx.save_for_backward(query, key, value, weights)
        return kernels.scatter_heads((weights @ value)[None], heads)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, weights = ctx.saved_tensors
        (gradient,) = kernels.gather_heads(gradient, ctx.heads, 1)
        to_logits = gradient @ value.mT
        kernels.softmax_backward_(weights, to_logits, query.shape[-1] ** -0.5)
        to_query = query.new_empty(3 if ctx.packs_query else 1, *query.shape)
        to_rest = to_query[1:] if ctx.packs_query else key.new_empty(2, *key.shape)
        torch.bmm(to_logits, key, out=to_query[0])
        torch.bmm(to_logits.mT, query, out=to_rest[0])
        torch.bmm(weights.mT, gradient, out=to_rest[1])
        if ctx.packs_query:
            return None, kernels.scatter_heads(to_query, ctx.heads), None
        return kernels.scatter_heads(to_query, ctx.heads), kernels.scatter_heads(to_rest, ctx.heads), None
