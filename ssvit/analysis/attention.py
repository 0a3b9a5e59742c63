"""The attention weights of an encoder, computed in addition to its forward pass, which does not change.

Letters: b images, h heads, q queries, t tokens, n patches, s prefix tokens, d width, k width of a head.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from ssvit.models.block import ALL, Attention, Ids, TokenInfo, gather
from ssvit.models.positions import rotate
from ssvit.models.vit import ViT


@torch.no_grad()
def weights_of(attention: Attention, x: Tensor, output_ids: Ids = None, info: TokenInfo = ALL) -> Tensor:
    """The softmax of an attention for its inputs, (b, t, d) -> (b, h, q, t) float32: rows sum to 1."""
    with torch.autocast(x.device.type, enabled=False):
        x = x.float()
        query_weight, key_weight, _ = attention.qkv.weight.float().chunk(3)
        query_bias, key_bias, _ = attention.qkv.bias.float().chunk(3)
        query = F.linear(x if output_ids is None else gather(x, output_ids), query_weight, query_bias)
        key = F.linear(x, key_weight, key_bias)
        query, key = (rearrange(tokens, "b t (h k) -> b h t k", h=attention.heads) for tokens in (query, key))
        if info.rotation is not None:
            query, key = rotate(query, info.rotation, output_ids), rotate(key, info.rotation)
        logits = (query * query.shape[-1] ** -0.5) @ key.mT
        if attention.relative is not None:
            logits = logits + attention.relative(query, x.shape[1], info.position_ids, output_ids)
        return logits.softmax(-1)


@contextmanager
def watched(encoder: ViT, see: Callable[[int, Tensor], None]) -> Iterator[None]:
    """While the block runs, call see(layer, weights (b, h, q, t)) as each layer of the encoder, from 0, is computed.

    A layer's weights are let go of before the next one's are made. No hook is left afterwards, whatever is raised.
    """

    def look(layer: int, attention: Attention, inputs: tuple[Any, ...]) -> None:
        see(layer, weights_of(attention, *inputs))

    with ExitStack() as hooks:
        for layer, block in enumerate(encoder.blocks):
            hooks.enter_context(block.attention.register_forward_pre_hook(partial(look, layer)))
        yield


def between_patches(encoder: ViT) -> Tensor:
    """Distances between the centres of patches, in pixels of the encoder's images: (n, n) float32."""
    rows, columns = (torch.arange(side) * pixels for side, pixels in zip(encoder.grid, encoder.patch_size, strict=True))
    centres = torch.cartesian_prod(rows, columns).float().view(-1, 2)
    return (centres[:, None] - centres).square().sum(-1).sqrt()


def mean_distance(weights: Tensor, between: Tensor) -> Tensor:
    """How far each head looks, in pixels: (b, h, s + n, s + n) and (n, n) -> (b, h).

    The mean over all patches of the distance to the patches attended to, weighted by attention (paper, section 4.5 and
    Figure 7). Prefix tokens, which have no place, are left out, and the other weights are made to sum to 1 again.
    """
    prefix = weights.shape[-1] - len(between)
    patches = weights[:, :, prefix:, prefix:]
    apart = (patches * between.to(patches)).sum(-1) / patches.sum(-1).clamp(min=torch.finfo(patches.dtype).tiny)
    return apart.mean(-1)


def rolled(rollout: Tensor | None, weights: Tensor) -> Tensor:
    """Attention rollout one layer further: (b, t, t) up to the layer before, None at first, -> (b, t, t).

    Row i tells how much of each input token has come into token i: the weights are averaged over heads, the identity
    is added for the residual branch, rows are made to sum to 1, and layers are multiplied (Abnar and Zuidema 2020;
    paper, Appendix D.8). Rows sum to 1.
    """
    mixing = (weights.mean(1) + torch.eye(weights.shape[-1], device=weights.device)) / 2
    return mixing if rollout is None else mixing @ rollout


def over_patches(attention: Tensor, num_prefix_tokens: int, pooling: str) -> Tensor:
    """Attention to patches, (…, s + n, s + n) -> (…, n): the class token's or, by patch_mean, the patches' mean."""
    rows = attention[..., 0, :] if pooling == "class_token" else attention[..., num_prefix_tokens:, :].mean(-2)
    return rows[..., num_prefix_tokens:]
