"""Implement low-rank adaptation (LoRA, Hu et al. 2021): W + alpha / rank * B A with W frozen and A, B trained.

torch's parametrization computes the sum wherever `weight` is read, so it applies to every path through the model. In a
state dict, W is `<layer>.parametrizations.weight.original`, and A and B are `<layer>.parametrizations.weight.0.a` and
`.b`.

Letters: r rank, i inputs, o outputs.
"""

from collections.abc import Mapping

from torch import Tensor, nn
from torch.nn.utils import parametrize

from ssvit.models.block import lecun_normal_
from ssvit.models.vit import ViT

_PART = ".parametrizations.weight."


class LowRank(nn.Module):
    """Parametrise a weight W (o, i) as W + alpha / rank * B A.

    A (r, i) is initialised randomly and B (o, r) with zeros, so that the initial sum is W.

    Args:
        weight: The frozen weight W, (o, i).
        rank: Rank r of the update.
        alpha: Scale of the update, which is multiplied by alpha / rank.
    """

    def __init__(self, weight: Tensor, *, rank: int, alpha: float) -> None:
        super().__init__()
        outputs, inputs = weight.shape
        self.scale = alpha / rank
        self.a = nn.Parameter(weight.new_empty(rank, inputs))
        self.b = nn.Parameter(weight.new_zeros(outputs, rank))
        lecun_normal_(self.a)

    def forward(self, weight: Tensor) -> Tensor:
        """Return the weight plus its low-rank update, (o, i)."""
        return weight + self.scale * (self.b @ self.a)


def adapt(encoder: ViT, *, rank: int, alpha: float) -> None:
    """Freeze an encoder and add low-rank updates to the attention matrices `qkv`, as one matrix, and `out`.

    Args:
        encoder: The encoder, changed in place.
        rank: Rank of the updates.
        alpha: Scale of the updates.
    """
    encoder.requires_grad_(False)
    for block in encoder.blocks:
        for layer in (block.attention.qkv, block.attention.out):
            parametrize.register_parametrization(layer, "weight", LowRank(layer.weight, rank=rank, alpha=alpha))


def merged(weights: Mapping[str, Tensor], *, rank: int, alpha: float) -> dict[str, Tensor]:
    """Merge the low-rank updates in a state dict of an adapted encoder into its weights.

    Args:
        weights: State dict of an encoder after `adapt`.
        rank: Rank of the updates.
        alpha: Scale of the updates.

    Returns:
        State dict of an encoder without LoRA that computes the same outputs.
    """
    result = {name: value for name, value in weights.items() if _PART not in name}
    for name in weights:
        layer, _, part = name.partition(_PART)
        if part == "original":
            original, a, b = (weights[f"{layer}{_PART}{part_name}"] for part_name in ("original", "0.a", "0.b"))
            result[f"{layer}.weight"] = original + alpha / rank * (b @ a)
    return result
