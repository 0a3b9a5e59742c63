"""Implement low-rank adaptation (LoRA, Hu et al. 2021): W + alpha / rank * B A with W frozen and A, B trained.

torch's parametrization computes the sum wherever `weight` is read, so it applies to every path through the model. In a
state dict, W is `<layer>.parametrizations.weight.original`, and A and B are `<layer>.parametrizations.weight.0.a` and
`.b`.

Letters: r rank, i inputs, o outputs.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ssvit.models.block import lecun_normal_
from ssvit.models.encoder import Encoder
from ssvit.models.vit import ViT
from ssvit.models.vit_options import Lora

_PART = ".parametrizations.weight."


class LowRank(nn.Module):
    """Parametrise a weight W (o, i) as W + alpha / rank * B A.

    A (r, i) is initialised randomly and B (o, r) with zeros, so that the initial sum is W. In a packed matrix of
    queries, keys and values (o = 3 i), the queries and the values may have updates of their own: A (2, r, i) and
    B (2, i, r).

    Args:
        weight: The frozen weight W, (o, i).
        options: Rank and scale of the update.
        packed: Whether to update the queries and the values of a packed matrix separately.
    """

    def __init__(self, weight: Tensor, options: Lora, *, packed: bool = False) -> None:
        super().__init__()
        outputs, inputs = weight.shape
        parts = (2,) if packed else ()
        self.scale = options.alpha / options.rank
        self.a = nn.Parameter(weight.new_empty(*parts, options.rank, inputs))
        self.b = nn.Parameter(weight.new_zeros(*parts, outputs // 3 if packed else outputs, options.rank))
        for a in self.a if packed else [self.a]:
            lecun_normal_(a)

    def forward(self, weight: Tensor) -> Tensor:
        """Return the weight plus its low-rank update, (o, i)."""
        return weight + self.scale * _product(self.b, self.a)


def _product(b: Tensor, a: Tensor) -> Tensor:
    """Return B A, (o, i), with zeros for the keys of a packed matrix."""
    if a.ndim == 2:
        return b @ a
    query, value = b @ a
    return torch.cat([query, torch.zeros_like(query), value])


def restrict(encoder: Encoder, trained: str | int, options: Lora | None) -> Encoder:
    """Freeze an encoder except for its last layers, and add low-rank updates to the layers below them.

    Args:
        encoder: The encoder, a `ViT` unless all weights are trained, changed in place.
        trained: Number of last layers whose weights are trained, with the last norm; head: none; all: all weights.
        options: The low-rank updates; None: none.

    Returns:
        The encoder.
    """
    if trained == "all":
        return encoder
    assert isinstance(encoder, ViT)
    count = 0 if trained == "head" else int(trained)
    encoder.train_last(count)
    encoder.lora = options
    if options is not None:
        packed = options.matrices == "query_value"
        for attention in (block.attention for block in encoder.blocks[: encoder.depth - count]):
            for layer in (attention.qkv,) if packed else (attention.qkv, attention.out):
                parametrize.register_parametrization(layer, "weight", LowRank(layer.weight, options, packed=packed))
    return encoder


def merged(weights: Mapping[str, Tensor], options: Lora) -> dict[str, Tensor]:
    """Merge the low-rank updates in a state dict of an adapted encoder into its weights.

    Args:
        weights: State dict of a model whose encoder was changed by `restrict`.
        options: The low-rank updates.

    Returns:
        State dict of an encoder without LoRA that computes the same outputs.
    """
    result = {name: value for name, value in weights.items() if _PART not in name}
    for name in weights:
        layer, _, part = name.partition(_PART)
        if part == "original":
            original, a, b = (weights[f"{layer}{_PART}{part_name}"] for part_name in ("original", "0.a", "0.b"))
            result[f"{layer}.weight"] = original + options.alpha / options.rank * _product(b, a)
    return result
