"""Where an encoder looks: the weights of its attention, computed beside one forward pass that stays as it is.

Only while `watched` is on is there any such computation; the encoder's own, by whatever kernel, has no part in it.

Letters: b images, h heads, q tokens that ask, t tokens that answer, n patches, s prefix tokens, d width, k width of a
head.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from ssvit.models.vit import Attention, ViT, gather


@torch.no_grad()
def weights_of(attention: Attention, x: Tensor, position_ids: Tensor | None, output_ids: Tensor | None) -> Tensor:
    """The softmax of an attention for its own inputs, (b, t, d) -> (b, h, q, t) float32: rows sum to 1."""
    with torch.autocast(x.device.type, enabled=False):
        ask, answer, _ = attention.qkv.weight.float().chunk(3)
        ask_bias, answer_bias, _ = attention.qkv.bias.float().chunk(3)
        x = x.float()
        query = F.linear(x if output_ids is None else gather(x, output_ids), ask, ask_bias)
        key = F.linear(x, answer, answer_bias)
        query, key = (rearrange(tokens, "b t (h k) -> b h t k", h=attention.heads) for tokens in (query, key))
        logits = (query * query.shape[-1] ** -0.5) @ key.mT
        if attention.relative is not None:
            logits = logits + attention.relative(query, x.shape[1], position_ids, output_ids)
        return logits.softmax(-1)


@contextmanager
def watched(encoder: ViT, see: Callable[[int, Tensor], None]) -> Iterator[None]:
    """While the block runs, call see(layer, weights (b, h, q, t)) as each layer of the encoder, from 0, is computed.

    A layer's weights are let go of before the next one's are made. No hook is left afterwards, whatever is raised.
    """

    def hook(layer: int) -> Callable[..., None]:
        def look(attention: Attention, inputs: tuple[Any, ...]) -> None:
            see(layer, weights_of(attention, *inputs))

        return look

    handles = []
    try:
        for layer, block in enumerate(encoder.blocks):
            handles.append(block.attention.register_forward_pre_hook(hook(layer)))
        yield
    finally:
        for handle in handles:
            handle.remove()


def between_patches(encoder: ViT) -> Tensor:
    """How far the centre of each patch is from each other's, in pixels of the encoder's images: (n, n) float32."""
    rows, columns = (torch.arange(side) * pixels for side, pixels in zip(encoder.grid, encoder.patch_size, strict=True))
    centres = torch.cartesian_prod(rows, columns).float().view(-1, 2)
    return (centres[:, None] - centres).square().sum(-1).sqrt()


def mean_distance(weights: Tensor, between: Tensor) -> Tensor:
    """How far each head looks, in pixels: (b, h, s + n, s + n) and (n, n) -> (b, h).

    The mean distance from a patch to the patches that it attends to, by its weights, over all patches that ask (paper,
    section 4.5 and Figure 7). Prefix tokens have no place in the image: they neither ask nor answer, and the weights
    of the others are made to sum to 1 again.
    """
    special = weights.shape[-1] - len(between)
    patches = weights[:, :, special:, special:]
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
    """What is attended to in the image: (…, s + n, s + n) -> (…, n), as an image's vector is pooled from the tokens.

    pooling: class_token for what the class token asks, patch_mean for what the patches ask, in the mean.
    """
    asked = attention[..., 0, :] if pooling == "class_token" else attention[..., num_prefix_tokens:, :].mean(-2)
    return asked[..., num_prefix_tokens:]
