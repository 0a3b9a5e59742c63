"""Restrict self-attention to rows and columns of patches (axial) or to windows.

Prefix tokens attend to all tokens, and every patch attends to the prefix tokens and to the patches of its group, so
that groups exchange information through the prefix tokens, too. Groups alternate between layers: rows and columns
(Appendix D.6), or windows and windows that are shifted by half of their side (Liu et al. 2021: Swin), which end at the
border of the image.

Letters: b images, h heads, t tokens, s prefix tokens, n patches, g groups, l patches of the largest group, k width of a
head.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ssvit.errors import OptionError
from ssvit.models.block import Attention, Ids, TokenInfo, attend
from ssvit.models.positions import Grid


class Groups(NamedTuple):
    """Hold the groups of the patches of a grid.

    Attributes:
        members: Indices of the patches of each group, (g, l); smaller groups are padded by patch 0.
        present: Which of them are not padding, (g, l).
        places: Index of each patch in the flattened members, (n,).
    """

    members: Tensor
    present: Tensor
    places: Tensor

    @classmethod
    def of(cls, kind: str, layer: int, grid: Grid, window: int) -> "Groups":
        """Return the groups of a layer.

        Args:
            kind: axial or window.
            layer: Index of the layer, from 0.
            grid: Rows and columns of patches.
            window: Side of a window in patches.
        """
        y, x = torch.cartesian_prod(*map(torch.arange, grid)).view(-1, 2).T
        if kind == "axial":
            names = x if layer % 2 else y
        else:
            shift = window // 2 if layer % 2 else 0
            names = (y + shift) // window * (sum(grid) + window) + (x + shift) // window
        _, group, sizes = names.unique(return_inverse=True, return_counts=True)
        order = group.argsort(stable=True)
        slots = torch.empty_like(order)
        slots[order] = torch.arange(len(order)) - (sizes.cumsum(0) - sizes)[group[order]]
        places = group * int(sizes.max()) + slots
        members = torch.zeros(len(sizes) * int(sizes.max()), dtype=torch.long)
        members[places] = torch.arange(len(places))
        present = torch.zeros(len(members), dtype=torch.bool)
        present[places] = True
        return cls(members.view(len(sizes), -1), present.view(len(sizes), -1), places)


class LocalAttention(Attention):
    """Implement multi-head self-attention within groups of patches.

    Args:
        width: Width of the tokens.
        heads: Number of heads.
        dropout: Dropout rate of the attention weights.
        kind: axial or window.
        layer: Index of the layer, from 0.
        grid: Rows and columns of patches of the encoder's image size.
        window: Side of a window in patches.
    """

    members: Tensor
    present: Tensor
    places: Tensor

    def __init__(
        self, *, width: int, heads: int, dropout: float, kind: str, layer: int, grid: Grid, window: int
    ) -> None:
        super().__init__(width=width, heads=heads, dropout=dropout, relative=None)
        self.kind, self.layer, self.grid, self.window = kind, layer, grid, window
        for name, value in Groups.of(kind, layer, grid, window)._asdict().items():
            self.register_buffer(name, value, persistent=False)

    def groups(self, info: TokenInfo) -> Groups:
        """Return the groups of the grid of the images.

        Raises:
            OptionError: Patches are missing.
        """
        if info.position_ids is not None:
            raise OptionError("attention", self.kind, "requires all patches of an image")
        if info.grid in (None, self.grid):
            return Groups(self.members, self.present, self.places)
        assert info.grid is not None
        groups = Groups.of(self.kind, self.layer, info.grid, self.window)
        return Groups(*(part.to(self.places.device) for part in groups))

    def mix(self, query: Tensor | None, packed: Tensor, output_ids: Ids, info: TokenInfo) -> Tensor:
        """Mix the values of the tokens; see `Attention.mix`."""
        if output_ids is not None:  # few queries, for which all logits are computed and masked by `split`
            return super().mix(query, packed, output_ids, info)
        groups = self.groups(info)
        inputs = super().split(query, packed, output_ids, info)[:3]
        count = packed.shape[1] - len(groups.places)
        prefix, patches = zip(*(part.tensor_split([count], dim=2) for part in inputs), strict=True)
        within = [part[:, :, groups.members] for part in patches]  # (b, h, g, l, k)
        shared = (part[:, :, None].expand(-1, -1, len(groups.members), -1, -1) for part in prefix[1:])
        key, value = (torch.cat(parts, dim=3).flatten(1, 2) for parts in zip(shared, within[1:], strict=True))
        dropout, bias = self.dropout if self.training else 0.0, None
        if groups.members.numel() > len(groups.places):  # there is padding
            bias = _bias(F.pad(groups.present, (count, 0), value=True), key)[:, None].repeat(self.heads, 1, 1)
        mixed = attend(within[0].flatten(1, 2), key, value, bias, dropout)  # (b, h * g, l, k)
        mixed = mixed.unflatten(1, (self.heads, -1)).flatten(2, 3)[:, :, groups.places]
        if count:
            mixed = torch.cat([attend(prefix[0], *inputs[1:], dropout=dropout), mixed], dim=2)
        return mixed.transpose(1, 2).flatten(2)

    def split(
        self, query: Tensor | None, packed: Tensor, output_ids: Ids, info: TokenInfo
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Split the projections into heads, with a bias that is minus infinity outside of a patch's group."""
        query, key, value, _ = super().split(query, packed, output_ids, info)
        groups = self.groups(info)
        group = groups.places // groups.members.shape[1]
        group = F.pad(group, (packed.shape[1] - len(group), 0), value=-1)  # of each token; -1 for prefix tokens
        queries = (group if output_ids is None else group[output_ids][:, None])[..., None]
        return query, key, value, _bias((queries == group) | (queries < 0) | (group < 0), key)


def _bias(allowed: Tensor, like: Tensor) -> Tensor:
    """Return 0 where attention is allowed and minus infinity elsewhere, in the type of a tensor."""
    return torch.zeros(allowed.shape, dtype=like.dtype, device=like.device).masked_fill(~allowed, -torch.inf)
