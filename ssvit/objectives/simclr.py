"""Contrastive learning (SimCLR, Chen et al. 2020): each view is matched with the other view of its image in the batch.

Letters: b images, v = 2 views, c channels, h, w pixels, n patches, m kept ones, e numbers of a projection.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from lightly.models.modules.heads import SimCLRProjectionHead
from torch import Tensor

from ssvit.data.batch import Batch
from ssvit.models.vit import ViT
from ssvit.objectives import simclr_options
from ssvit.objectives.base import NOTHING
from ssvit.objectives.contrast import VIEWS, Contrastive, gathered, similarities, two_views, unit
from ssvit.randomness import uniform


class Kept(NamedTuple):
    """The patches that the encoder sees of each view, (b, v, m) int64."""

    visible_ids: Tensor


class SimCLR(Contrastive):
    """The options are those of `simclr_options.SimCLR`. Batches have two "global" views.

    The head is lightly's without batch norm, whose statistics would differ from process to process.
    """

    encoder: ViT

    def __init__(self, options: simclr_options.SimCLR, *, encoder: ViT) -> None:
        super().__init__()
        self.options = options
        options.fits(encoder.options)
        self.encoder = encoder
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
