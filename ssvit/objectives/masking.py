"""Corrupt patches: BERT's recipe on patch embeddings (section 4.6, Appendix B.1.2).

Every image has the same number of corrupted patches, so shapes are static. Each corrupted patch is replaced by the
[mask] embedding, replaced by another patch of the same image, or unchanged; all of them are predicted.

Letters: b images, n patches, m corrupted patches per image, d width, r rectangles.
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
    """Hold the corrupted patches of images, each field (b, m) int64.

    Attributes:
        ids: Indices of the corrupted patches.
        kind: Corruption type, MASKED, REPLACED or UNCHANGED.
        replacement: Replacement indices, defined for every corrupted patch, though only REPLACED ones use it.
    """

    ids: Tensor
    kind: Tensor
    replacement: Tensor


class Masks(NamedTuple):
    """Hold the indices of the patches that the encoder encodes and of the masked patches, both int64.

    Attributes:
        visible_ids: Visible patches, (b, n - m).
        masked_ids: Masked patches, (b, m).
    """

    visible_ids: Tensor
    masked_ids: Tensor


class Masking(masking_options.Masking):
    """Sample corruptions, with the options of `masking_options.Masking`."""

    def sample(self, slots: Tensor, *, seed: int, grid: tuple[int, int]) -> Corruption:
        """Sample the corruption of images, a function of (seed, slot, grid) alone.

        Args:
            slots: Slots of the images, (b,).
            seed: Seed of the run.
            grid: Rows and columns of patches.

        Returns:
            Corrupted patches, corruption types and replacement indices.
        """
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
        # Sample one of the n - 1 different patches: indices from that of the patch onwards are increased by one.
        replacement = (uniform(seed, "replacement", slots, self.count(n)) * (n - 1)).long()
        return Corruption(ids, kind, replacement + (replacement >= ids))


def rectangle_order(slots: Tensor, *, seed: int, grid: tuple[int, int], rectangles: int = 16, view: int = 0) -> Tensor:
    """Return sort keys by which patches are masked: the index of the first rectangle that covers each patch.

    A rectangle covers 8 to 25 % of the image at an aspect ratio of 0.3 to 3.3.

    Args:
        slots: Slots of the images, (b,).
        seed: Seed of the run.
        grid: Rows and columns of patches.
        rectangles: Number of rectangles per image.
        view: Index of the view, which changes the sample.

    Returns:
        Index of the first covering rectangle, or `rectangles` without one, (b, n).
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
    """Return the patches of each image that are not corrupted, in raster order.

    Args:
        ids: Indices of the corrupted patches, (b, m).
        patches: Number of patches per image.

    Returns:
        Indices, (b, patches - m).
    """
    corrupted = torch.zeros(len(ids), patches, device=ids.device).scatter(1, ids, 1.0)
    return corrupted.argsort(dim=1, stable=True)[:, : patches - ids.shape[1]]


def visible_blocks(
    slots: Tensor, *, seed: int, grid: tuple[int, int], visible: int, length: int, adjust: float = 0.0, view: int = 0
) -> Tensor:
    """Return an order of the patches whose first `visible` ones lie in blocks: inverse block masking.

    Blocks of length x length are centred on random patches and cropped at the image border; their number would cover
    visible / n + adjust of the image without overlap. Random patches are added or removed until the number is exact
    (data2vec 2.0, Baevski et al. 2022; fairseq: compute_block_mask_2d). A function of (seed, slot, view, grid) alone.

    Args:
        slots: Slots of the images, (b,).
        seed: Seed of the run.
        grid: Rows and columns of patches.
        visible: Number of visible patches.
        length: Side of a block, in patches.
        adjust: Fraction of the image added when blocks are counted, since blocks overlap.
        view: Index of the mask of an image.

    Returns:
        Patch indices, (b, n).
    """
    height, width = grid
    n = height * width
    count = max(1, int(n * (visible / n + adjust) / length**2))
    center = (uniform(seed, "block centres", slots, count, view) * n).long()
    place = torch.arange(n, device=slots.device)
    # Offsets start at -(length // 2); for an even length, the block is not symmetric, as in the authors' code.
    rows = place // width - (center // width)[..., None] + length // 2
    columns = place % width - (center % width)[..., None] + length // 2
    inside = (rows >= 0) & (rows < length) & (columns >= 0) & (columns < length)  # (b, blocks, n)
    return (uniform(seed, "block order", slots, n, view) + ~inside.any(1)).argsort(dim=1)


def corrupt(tokens: Tensor, mask_token: Tensor, corruption: Corruption) -> Tensor:
    """Apply a corruption to patch embeddings.

    Args:
        tokens: Patch embeddings, (b, n, d).
        mask_token: [mask] embedding, (d,).
        corruption: The corruption.

    Returns:
        Corrupted patch embeddings, (b, n, d).
    """
    own = torch.arange(tokens.shape[1], device=tokens.device).expand(len(tokens), -1)
    replaced = corruption.kind == REPLACED
    source = own.scatter(1, corruption.ids, torch.where(replaced, corruption.replacement, corruption.ids))
    masked = torch.zeros_like(own, dtype=torch.bool).scatter(1, corruption.ids, corruption.kind == MASKED)
    return torch.where(masked[:, :, None], mask_token.to(tokens.dtype), gather(tokens, source))
