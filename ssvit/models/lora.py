"""Low-rank adaptation (LoRA, Hu et al. 2021): a frozen matrix W acts as W + alpha / rank * B A; A and B are trained.

torch's parametrization computes the sum wherever `weight` is read, so each path through the model sees it. In a state
dict, W is `<layer>.parametrizations.weight.original`, and A and B are `<layer>.parametrizations.weight.0.a` and `.b`.

Letters: r rank, i inputs, o outputs.
"""

from collections.abc import Mapping

from torch import Tensor, nn
from torch.nn.utils import parametrize

from ssvit.models.block import lecun_normal_
from ssvit.models.vit import ViT

_PART = ".parametrizations.weight."


class LowRank(nn.Module):
    """W (o, i) -> W + alpha / rank * B A. A (r, i) starts random and B (o, r) at zero, so that the first sum is W."""

    def __init__(self, weight: Tensor, *, rank: int, alpha: float) -> None:
        super().__init__()
        outputs, inputs = weight.shape
        self.scale = alpha / rank
        self.a = nn.Parameter(weight.new_empty(rank, inputs))
        self.b = nn.Parameter(weight.new_zeros(outputs, rank))
        lecun_normal_(self.a)

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.scale * (self.b @ self.a)


def adapt(encoder: ViT, *, rank: int, alpha: float) -> None:
    """Freeze an encoder, and give attention's matrices low-rank changes to train: `qkv`, as one matrix, and `out`."""
    encoder.requires_grad_(False)
    for block in encoder.blocks:
        for layer in (block.attention.qkv, block.attention.out):
            parametrize.register_parametrization(layer, "weight", LowRank(layer.weight, rank=rank, alpha=alpha))


def merged(weights: Mapping[str, Tensor], *, rank: int, alpha: float) -> dict[str, Tensor]:
    """A state dict of an adapted encoder as one without LoRA, which computes the same."""
    found = {name: value for name, value in weights.items() if _PART not in name}
    for name in weights:
        layer, _, part = name.partition(_PART)
        if part == "original":
            original, a, b = (weights[f"{layer}{_PART}{one}"] for one in ("original", "0.a", "0.b"))
            found[f"{layer}.weight"] = original + alpha / rank * (b @ a)
    return found
