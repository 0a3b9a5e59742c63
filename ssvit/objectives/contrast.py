"""The common part of contrastive methods: two views of an image, compared with those of all images of a batch.

Letters: b images, v = 2 views, c channels, h, w pixels, e numbers of a projection, r rows, s rows of all processes.
"""

import math

import torch
import torch.nn.functional as F
from lightly.utils import dist
from torch import Tensor

from ssvit.data.batch import Batch
from ssvit.objectives.base import Objective, at_least_float32
from ssvit.options import UserError

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
