"""The corruption of patches: BERT's recipe on patch embeddings (section 4.6, Appendix B.1.2).

Every image has the same number of corrupted patches, so shapes are static. Each corrupted patch becomes the [mask]
embedding, another patch of the same image (never itself), or stays as it is; all are predicted.

Letters: b images, n patches, m corrupted patches an image, d width, r rectangles.
"""

from typing import NamedTuple

import torch
from einops import rearrange
from torch import Tensor

from ssvit.models.block import gather
from ssvit.objectives import masking_options
from ssvit.randomness import uniform

MASKED, REPLACED, UNCHANGED = range(3)
KINDS = ("masked", "replaced", "unchanged")


class Corruption(NamedTuple):
    """The corrupted patches, their kinds (MASKED, REPLACED or UNCHANGED) and their replacements, each (b, m) int64.

    Every patch has a replacement, though few are replaced.
    """

    ids: Tensor
    kind: Tensor
    replacement: Tensor


class Masks(NamedTuple):
    """The patches that the encoder sees, (b, n - m), and those that it does not, (b, m), both int64."""

    visible_ids: Tensor
    masked_ids: Tensor


class Masking(masking_options.Masking):
    """Samples corruptions by the options of `masking_options.Masking`."""

    def sample(self, slots: Tensor, *, seed: int, grid: tuple[int, int]) -> Corruption:
        """Choose for the images of slots (b,): a function of (seed, slot, grid) alone."""
        n, units = grid[0] * grid[1], self.divide(grid)
        order = uniform(seed, "corrupted patches", slots, units[0] * units[1])
        if self.shape == "block":
            order = order + rectangle_order(slots, seed=seed, grid=units)
        ids = order.argsort(dim=1)[:, : self.count(n) // self.unit**2]
        if self.unit > 1:
            patch = torch.arange(n, device=slots.device).view(grid)
            patches = rearrange(patch, "(y v) (x w) -> (y x) (v w)", v=self.unit, w=self.unit)
            ids = patches[ids].flatten(1)
        chance = uniform(seed, "corruption", slots, self.count(n))
        kind = torch.where(chance < self.mask + self.replace, REPLACED, UNCHANGED)
        kind = torch.where(chance < self.mask, MASKED, kind)
        # One of the n - 1 other patches: indices from the patch's own on are moved up by one.
        replacement = (uniform(seed, "replacement", slots, self.count(n)) * (n - 1)).long()
        return Corruption(ids, kind, replacement + (replacement >= ids))


def rectangle_order(slots: Tensor, *, seed: int, grid: tuple[int, int], rectangles: int = 16, view: int = 0) -> Tensor:
    """In what order patches are taken: the number of the first rectangle that covers each, or `rectangles`: (b, n).

    A rectangle covers 8 to 25 % of the image at an aspect ratio of 0.3 to 3.3.
    """
    height, width = grid
    size, aspect, y, x = uniform(seed, "rectangles", slots, 4 * rectangles, view).chunk(4, dim=1)
    area = (0.08 + 0.17 * size) * height * width
    root_aspect = (0.3 ** (2 * aspect - 1)).sqrt()
    rows = (area.sqrt() * root_aspect).round().clamp(1, height)
    columns = (area.sqrt() / root_aspect).round().clamp(1, width)
    top, left = (y * (height - rows + 1)).floor(), (x * (width - columns + 1)).floor()

    def spans(first: Tensor, length: Tensor, count: int) -> Tensor:
        place = torch.arange(count, device=slots.device)
        return (place >= first[..., None]) & (place < (first + length)[..., None])

    covered = spans(top, rows, height)[..., :, None] & spans(left, columns, width)[..., None, :]  # (b, r, y, x)
    number = torch.arange(rectangles, device=slots.device)[:, None, None]
    return torch.where(covered, number, rectangles).amin(1).flatten(1)


def uncorrupted(ids: Tensor, patches: int) -> Tensor:
    """The other patches of each image, in raster order: ids (b, m), of so many patches -> (b, patches - m)."""
    corrupted = torch.zeros(len(ids), patches, device=ids.device).scatter(1, ids, 1.0)
    return corrupted.argsort(dim=1, stable=True)[:, : patches - ids.shape[1]]


def visible_blocks(
    slots: Tensor, *, seed: int, grid: tuple[int, int], visible: int, length: int, adjust: float = 0.0, view: int = 0
) -> Tensor:
    """An order of the patches in which the first `visible` ones lie in blocks, (b, n): inverse block masking.

    Blocks of length x length are centred on random patches and cut off at the image's border; there are as many as
    would cover visible / n + adjust of the image without overlap. Random patches are added or taken away until the
    number is exact (data2vec 2.0, Baevski et al. 2022; fairseq: compute_block_mask_2d). view: which of an image's
    masks. A function of (seed, slot, view, grid) alone.
    """
    height, width = grid
    n = height * width
    count = max(1, int(n * (visible / n + adjust) / length**2))
    center = (uniform(seed, "block centres", slots, count, view) * n).long()
    place = torch.arange(n, device=slots.device)
    # From -(length // 2) to the other side: for an even length one patch less there, as the authors have it.
    rows = place // width - (center // width)[..., None] + length // 2
    columns = place % width - (center % width)[..., None] + length // 2
    inside = (rows >= 0) & (rows < length) & (columns >= 0) & (columns < length)  # (b, blocks, n)
    return (uniform(seed, "block order", slots, n, view) + ~inside.any(1)).argsort(dim=1)


def corrupt(tokens: Tensor, mask_token: Tensor, corruption: Corruption) -> Tensor:
    """Corrupt the patches as chosen: tokens (b, n, d), mask_token (d,) -> (b, n, d)."""
    own = torch.arange(tokens.shape[1], device=tokens.device).expand(len(tokens), -1)
    replaced = corruption.kind == REPLACED
    source = own.scatter(1, corruption.ids, torch.where(replaced, corruption.replacement, corruption.ids))
    masked = torch.zeros_like(own, dtype=torch.bool).scatter(1, corruption.ids, corruption.kind == MASKED)
    return torch.where(masked[:, :, None], mask_token.to(tokens.dtype), gather(tokens, source))
