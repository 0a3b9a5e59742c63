"""Contrastive learning (SimCLR, Chen et al. 2020): each view is matched with the other view of its image in the batch.

`Contrastive` is the base of all methods that compare two views.

Letters: b images, v = 2 views, c channels, h, w pixels, n patches, m kept ones, e numbers of a projection, r rows of
this process, s rows of all processes.
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
    """An objective whose projections of two views are compared; the methods are those that its evaluation needs."""

    compares_images = True

    def project(self, views: Tensor) -> Tensor:
        """What is compared: (b, v, c, h, w) -> (v b, e)."""
        raise NotImplementedError

    def losses(self, projections: Tensor) -> Tensor:
        """Of each view among these alone: (v b, e) -> (v b,)."""
        raise NotImplementedError

    def chance(self, images: int) -> float:
        """The loss among so many images where all similarities are equal."""
        raise NotImplementedError


def two_views(batch: Batch) -> Tensor:
    """The views (b, v, c, h, w). UserError unless there are two "global" ones."""
    views = batch.views.get("global")
    if views is None or views.shape[1] != VIEWS:
        raise UserError(
            "data.augment: contrastive learning needs two global views of an image; add augment@data.augment=two_crops"
        )
    return views


def gathered(rows: Tensor) -> tuple[Tensor, int]:
    """The rows of all processes, through which gradients pass, and the place of this process's first: (r, e) -> (s, e).

    lightly's gather adds up the gradients of all processes, and data parallelism takes the mean: together that is the
    gradient of the mean of the processes' losses.
    """
    if dist.world_size() == 1:
        return rows, 0
    return torch.cat(dist.gather(rows)), dist.rank() * len(rows)


def unit(x: Tensor) -> Tensor:
    """Rows of length 1, in float32 or finer."""
    return F.normalize(at_least_float32(x), dim=-1)


def cosines(one: Tensor, other: Tensor) -> Tensor:
    """Of all pairs of rows of length 1, not rounded by autocast: (r, e), (s, e) -> (r, s)."""
    with torch.autocast(one.device.type, enabled=False):
        return one @ other.T


def similarities(own: Tensor, every: Tensor, first: int, temperature: float) -> tuple[Tensor, Tensor]:
    """Of NT-Xent (Chen et al. 2020, equation 1): the logits (v b, s), and which of the s rows is a view's other (v b,).

    own (v b, e): the rows of `every` (s, e) from `first` on, of length 1. A view's logit with itself is -inf. This is
    lightly's NTXentLoss, which selects logits by a mask: their number then depends on data, for which a GPU waits.
    """
    place = first + torch.arange(len(own), device=own.device)
    logits = (cosines(own, every) / temperature).scatter(1, place[:, None], -math.inf)
    return logits, place.roll(len(own) // VIEWS)


class Kept(NamedTuple):
    """The patches that the encoder sees of each view, (b, v, m) int64."""

    visible_ids: Tensor


class SimCLR(Contrastive):
    """The options are those of `simclr_options.SimCLR`. Batches have two "global" views.

    The head is lightly's without batch norm, whose statistics would differ from process to process.
    """

    encoder: ViT
    options: simclr_options.SimCLR

    def __init__(self, options: simclr_options.SimCLR, *, encoder: ViT) -> None:
        super().__init__(options, encoder)
        self.head = SimCLRProjectionHead(
            encoder.width, options.hidden, options.projection, options.layers, batch_norm=False
        )

    def sample(self, slots: Tensor, *, seed: int) -> Kept | tuple[()]:
        """Which patches of each view of the images of slots (b,) are kept; nothing where all are."""
        if self.options.keep == 1:
            return ()
        patches = self.encoder.patches
        orders = [uniform(seed, "kept patches", slots, patches, view).argsort(dim=1) for view in range(VIEWS)]
        return Kept(torch.stack(orders, dim=1)[:, :, : self.options.count(patches)])

    def project(self, views: Tensor, noise: Kept | tuple[()] = (), depth_noise: Tensor | None = None) -> Tensor:
        """(b, v, c, h, w) -> (v b, e), of all patches or those kept, which are sampled for the encoder's own size.

        OptionError for other sizes then.
        """
        images, ids = rearrange(views, "b v c h w -> (v b) c h w"), None
        if noise:
            self.encoder.check_size(images)
            ids = rearrange(noise[0], "b v m -> (v b) m")
        kept = {} if ids is None else {"visible_ids": ids}
        return self.head(self.encoder.represent(images, **kept, depth_noise=depth_noise))

    def losses(self, projections: Tensor) -> Tensor:
        """(v b, e) -> (v b,)."""
        own = unit(projections)
        return F.cross_entropy(*similarities(own, own, 0, self.options.temperature), reduction="none")

    def chance(self, images: int) -> float:
        """Of the 2 b - 1 other views, one is right."""
        return math.log(VIEWS * images - 1)

    def forward(
        self, batch: Batch, noise: Kept | tuple[()], scheduled: Mapping[str, Tensor] = NOTHING
    ) -> dict[str, Tensor]:
        """The mean loss among the micro-batches of all processes, and the share of views that find their other."""
        own = unit(self.project(two_views(batch), noise, self.depth_noise(batch, VIEWS)))
        logits, partner = similarities(own, *gathered(own), self.options.temperature)
        accuracy = (logits.detach().argmax(1) == partner).float().mean()
        return {"loss": F.cross_entropy(logits, partner), "accuracy": accuracy}
