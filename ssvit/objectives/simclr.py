"""Implement contrastive learning (SimCLR, Chen et al. 2020): match each view with the other view of its image.

`Contrastive` is the base class of all methods that compare two views.

Letters: b images, v = 2 views, c channels, h, w pixels, n patches, m visible patches, e width of a projection, r rows
of this process, s rows of all processes.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from lightly.models.modules.heads import SimCLRProjectionHead
from lightly.utils import dist
from torch import Tensor

from ssvit.data.batch import Batch
from ssvit.models.vit import ViT
from ssvit.objectives import simclr_options
from ssvit.objectives.base import NOTHING, Objective, at_least_float32
from ssvit.options import UserError
from ssvit.randomness import uniform

VIEWS = 2


class Contrastive(Objective):
    """Define the base class of objectives that compare projections of two views."""

    compares_images = True

    def project(self, views: Tensor) -> Tensor:
        """Return the projections of views: (b, v, c, h, w) -> (v b, e)."""
        raise NotImplementedError

    def losses(self, projections: Tensor) -> Tensor:
        """Return the loss of each view among these views: (v b, e) -> (v b,)."""
        raise NotImplementedError

    def chance(self, images: int) -> float:
        """Return the loss among this number of images if all similarities are equal."""
        raise NotImplementedError


def two_views(batch: Batch) -> Tensor:
    """Return the two "global" views of a batch, (b, v, c, h, w).

    Raises:
        UserError: The batch does not have two global views.
    """
    views = batch.views.get("global")
    if views is None or views.shape[1] != VIEWS:
        raise UserError(
            "data.augment: contrastive learning needs two global views of an image; add augment@data.augment=two_crops"
        )
    return views


def gathered(rows: Tensor) -> tuple[Tensor, int]:
    """Gather the rows of all processes, with gradients, (r, e) -> (s, e), and return the row offset of this rank.

    lightly's gather sums the gradients of all processes, and data parallelism averages them: the result is the gradient
    of the mean of the processes' losses.
    """
    if dist.world_size() == 1:
        return rows, 0
    return torch.cat(dist.gather(rows)), dist.rank() * len(rows)


def unit(x: Tensor) -> Tensor:
    """Normalise rows to length 1, in float32 or finer."""
    return F.normalize(at_least_float32(x), dim=-1)


def cosines(one: Tensor, other: Tensor) -> Tensor:
    """Return the cosines of all pairs of unit rows, without autocast: (r, e), (s, e) -> (r, s)."""
    with torch.autocast(one.device.type, enabled=False):
        return one @ other.T


def similarities(own: Tensor, every: Tensor, first: int, temperature: float) -> tuple[Tensor, Tensor]:
    """Return the logits of NT-Xent (Chen et al. 2020, equation 1) and the index of each view's positive pair.

    This is equal to lightly's NTXentLoss, which selects logits by a mask: their number then depends on data, which
    synchronises host and device.

    Args:
        own: Unit projections of this process, (v b, e): the rows of `every` from `first` on.
        every: Unit projections of all processes, (s, e).
        first: Row offset of this rank.
        temperature: Divisor of the cosines.

    Returns:
        Logits (v b, s), -inf for a view with itself, and the row of the other view of each image, (v b,).
    """
    place = first + torch.arange(len(own), device=own.device)
    logits = (cosines(own, every) / temperature).scatter(1, place[:, None], -math.inf)
    return logits, place.roll(len(own) // VIEWS)


class Kept(NamedTuple):
    """Hold the indices of the patches of each view that the encoder encodes, (b, v, m) int64."""

    visible_ids: Tensor


class SimCLR(Contrastive):
    """Implement SimCLR, with the options of `simclr_options.SimCLR`.

    Batches have two "global" views. The head is lightly's without batch norm, whose statistics would differ
    between processes.
    """

    encoder: ViT
    options: simclr_options.SimCLR

    def __init__(self, options: simclr_options.SimCLR, *, encoder: ViT) -> None:
        super().__init__(options, encoder)
        self.head = SimCLRProjectionHead(
            encoder.width, options.hidden, options.projection, options.layers, batch_norm=False
        )

    def sample(self, slots: Tensor, *, seed: int) -> Kept | tuple[()]:
        """Sample the patches of each view that are encoded; returns () if all are.

        Args:
            slots: Slots of the images, (b,).
            seed: Seed of the run.

        Returns:
            Indices of the patches, or ().
        """
        if self.options.keep == 1:
            return ()
        patches = self.encoder.patches
        orders = [uniform(seed, "kept patches", slots, patches, view).argsort(dim=1) for view in range(VIEWS)]
        return Kept(torch.stack(orders, dim=1)[:, :, : self.options.count(patches)])

    def project(self, views: Tensor, noise: Kept | tuple[()] = (), depth_noise: Tensor | None = None) -> Tensor:
        """Project views to vectors.

        Args:
            views: Views, (b, v, c, h, w).
            noise: Result of `sample`; (): encode all patches.
            depth_noise: Random numbers of stochastic depth, (v b, 2 * depth), or None.

        Returns:
            Projections, (v b, e).

        Raises:
            OptionError: Patches are sampled, and the images do not have the encoder's size.
        """
        images, ids = rearrange(views, "b v c h w -> (v b) c h w"), None
        if noise:
            self.encoder.check_size(images)
            ids = rearrange(noise[0], "b v m -> (v b) m")
        kept = {} if ids is None else {"visible_ids": ids}
        return self.head(self.encoder.represent(images, **kept, depth_noise=depth_noise))

    def losses(self, projections: Tensor) -> Tensor:
        """Return the loss of each view: (v b, e) -> (v b,)."""
        own = unit(projections)
        return F.cross_entropy(*similarities(own, own, 0, self.options.temperature), reduction="none")

    def chance(self, images: int) -> float:
        """Return log(2 b - 1): one of the 2 b - 1 other views is the positive."""
        return math.log(VIEWS * images - 1)

    def forward(
        self, batch: Batch, noise: Kept | tuple[()], scheduled: Mapping[str, Tensor] = NOTHING
    ) -> dict[str, Tensor]:
        """Return the mean loss and the top-1 accuracy of matching positive pairs, among the views of all processes."""
        own = unit(self.project(two_views(batch), noise, self.depth_noise(batch, VIEWS)))
        logits, partner = similarities(own, *gathered(own), self.options.temperature)
        accuracy = (logits.detach().argmax(1) == partner).float().mean()
        return {"loss": F.cross_entropy(logits, partner), "accuracy": accuracy}
