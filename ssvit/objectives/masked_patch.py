"""Implement masked patch prediction: corrupt half of the patch embeddings and predict their colours (Appendix B.1.2).

The corruption is BERT's recipe on patch embeddings (section 4.6): a corrupted patch is replaced by the [mask]
embedding, replaced by another patch of the same image, or unchanged; all of them are predicted. Every image has the
same number of corrupted patches, so shapes are static.

With a decoder, only the uncorrupted patches are encoded, as in a masked autoencoder (He et al. 2022), so a step costs
less. The target is the same.

Letters: b images, n patches, m corrupted patches per image, d width, r rectangles.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from einops import rearrange
from torch import Tensor, nn

from ssvit.data.batch import Batch
from ssvit.engine.randomness import uniform
from ssvit.models.block import gather_tokens
from ssvit.models.decoder import Decoder
from ssvit.models.vit import ViT
from ssvit.objectives import masked_patch_options
from ssvit.objectives.base import EMPTY, Objective
from ssvit.objectives.masked_patch_options import Masking
from ssvit.objectives.targets import Target

MASKED, REPLACED, UNCHANGED = range(3)
CORRUPTION_TYPES = ("masked", "replaced", "unchanged")


class Corruption(NamedTuple):
    """Hold the corrupted patches of images, each field (b, m) int64.

    Attributes:
        ids: Indices of the corrupted patches.
        types: Corruption types, MASKED, REPLACED or UNCHANGED.
        replacement: Replacement indices, defined for every corrupted patch, though only REPLACED ones use it.
    """

    ids: Tensor
    types: Tensor
    replacement: Tensor


def sample_corruption(masking: Masking, slots: Tensor, *, seed: int, grid: tuple[int, int]) -> Corruption:
    """Sample the corruption of images, a function of (seed, slot, grid) alone.

    Args:
        masking: Options of the corruption.
        slots: Slots of the images, (b,).
        seed: Seed of the run.
        grid: Rows and columns of patches.

    Returns:
        Corrupted patches, corruption types and replacement indices.
    """
    n, units = grid[0] * grid[1], masking.grid_of_units(grid)
    order = uniform(seed, "corrupted patches", slots, units[0] * units[1])
    if masking.shape == "block":
        order = order + rectangle_order(slots, seed=seed, grid=units)
    ids = order.argsort(dim=1)[:, : masking.count(n) // masking.unit**2]
    if masking.unit > 1:
        patch = torch.arange(n, device=slots.device).view(grid)
        patches = rearrange(patch, "(y v) (x w) -> (y x) (v w)", v=masking.unit, w=masking.unit)
        ids = patches[ids].flatten(1)
    chance = uniform(seed, "corruption", slots, masking.count(n))
    types = torch.where(chance < masking.mask + masking.replace, REPLACED, UNCHANGED)
    types = torch.where(chance < masking.mask, MASKED, types)
    # Sample one of the n - 1 different patches: indices from the patch's onwards are increased by one.
    replacement = (uniform(seed, "replacement", slots, masking.count(n)) * (n - 1)).long()
    return Corruption(ids, types, replacement + (replacement >= ids))


class MaskedPatch(Objective):
    """Implement the paper's self-supervised objective, with a [mask] embedding and a linear head, or with a decoder.

    The head is initialised with zeros, as are all output layers of the authors.

    Args:
        options: Options of the objective.
        encoder: The encoder.
        target: Target that computes labels and losses.
    """

    encoder: ViT
    options: masked_patch_options.MaskedPatch

    def __init__(self, options: masked_patch_options.MaskedPatch, *, encoder: ViT, target: Target) -> None:
        super().__init__(options, encoder)
        self.target = target
        self.decoder: Decoder | None = None
        if options.decoder is not None:
            self.decoder = Decoder(options.decoder, encoder=encoder, output_width=target.width)
            return
        self.mask_token = nn.Parameter(torch.randn(encoder.width) * 0.02)
        self.head = nn.Linear(encoder.width, target.width)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def prepare(self, batches: Iterator[Batch]) -> str:
        """Fit the target if it has a method `prepare`; see `Objective.prepare`."""
        return self.target.prepare(batches) if hasattr(self.target, "prepare") else ""

    def sample(self, slots: Tensor, *, seed: int) -> Corruption:
        """Sample the corruption of images of slots (b,)."""
        return sample_corruption(self.options.masking, slots, seed=seed, grid=self.encoder.grid)

    def predict(self, images: Tensor, noise: Corruption, depth_noise: Tensor | None = None) -> Tensor:
        """Predict the corrupted patches, by the head from their outputs or by the decoder.

        Args:
            images: Images, (b, c, h, w), uint8 or float in [0, 1].
            noise: Corruption of the images.
            depth_noise: Random numbers of stochastic depth, (b, 2 * depth), or None.

        Returns:
            Predictions, (b, m, width of the target).

        Raises:
            OptionError: The images do not have the encoder's size, for which the masks are sampled.
        """
        self.encoder.check_size(images)
        if self.decoder is None:
            tokens = corrupt(self.encoder.embed(images), self.mask_token, noise)
            return self.head(self.encoder.encode(tokens, output_ids=noise.ids, depth_noise=depth_noise))
        visible_ids = uncorrupted(noise.ids, self.encoder.patches)
        return self.decoder(self.encoder(images, visible_ids, depth_noise=depth_noise), visible_ids, noise.ids)

    def forward(self, batch: Batch, noise: Corruption, scheduled: Mapping[str, Tensor] = EMPTY) -> dict[str, Tensor]:
        """Return the mean loss and the mean score of the most probable labels, over the corrupted patches."""
        prediction = self.predict(batch.only_view(), noise, self.depth_noise(batch))
        truth = gather_tokens(self.target.labels(batch.only_view()), noise.ids)
        score = self.target.score(self.target.guess(prediction.detach()), truth)
        return {"loss": self.target.losses(prediction, truth).mean(), self.target.score_name: score.mean()}


def rectangle_order(slots: Tensor, *, seed: int, grid: tuple[int, int], rectangles: int = 16, view: int = 0) -> Tensor:
    """Return sort keys for block-wise masking: the index of the first rectangle that covers each patch.

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
        positions = torch.arange(count, device=slots.device)
        return (positions >= first[..., None]) & (positions < (first + length)[..., None])

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


def corrupt(tokens: Tensor, mask_token: Tensor, corruption: Corruption) -> Tensor:
    """Apply a corruption to patch embeddings.

    Args:
        tokens: Patch embeddings, (b, n, d).
        mask_token: [mask] embedding, (d,).
        corruption: The corruption.

    Returns:
        Corrupted patch embeddings, (b, n, d).
    """
    unchanged = torch.arange(tokens.shape[1], device=tokens.device).expand(len(tokens), -1)
    replaced = corruption.types == REPLACED
    source = unchanged.scatter(1, corruption.ids, torch.where(replaced, corruption.replacement, corruption.ids))
    masked = torch.zeros_like(unchanged, dtype=torch.bool).scatter(1, corruption.ids, corruption.types == MASKED)
    return torch.where(masked[:, :, None], mask_token.to(tokens.dtype), gather_tokens(tokens, source))
