"""Scaled dot-product attention, and the one place that chooses how it is computed.

Letters: b images, h heads, q tokens that ask, t tokens that answer, k width of a head, d = h * k.
"""

from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor
from torch.autograd.function import once_differentiable

from ssvit.kernels import operators


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
    width = packed.shape[-1] // (3 if query is None else 2)
    if packed.dtype == torch.bfloat16 and dropout == 0 and operators.multiply(packed, width // heads):
        return _Kernels.apply(query, packed, heads)
    return merge(attend(*split(query, packed, heads), dropout=dropout))


class _Kernels(torch.autograd.Function):
    """Attention by our own kernels."""

    @staticmethod
    def forward(ctx: Any, query: Tensor | None, packed: Tensor, heads: int) -> Tensor:
        query, packed = None if query is None else query.contiguous(), packed.contiguous()
        out, norms = operators.attention(query, packed, heads)
        ctx.save_for_backward(query, packed, norms)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, packed, norms = ctx.saved_tensors
        to_query, to_packed = operators.attention_backward(query, packed, gradient.contiguous(), norms)
        return None if query is None else to_query, to_packed, None
