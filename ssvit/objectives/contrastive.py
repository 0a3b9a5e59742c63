"""Implement objectives that compare the views of images: SimCLR, and contrastive tuning of a finished run.

Letters: b images, v = 2 views, c channels, h, w pixels, n patches, m visible patches, e width of a projection, r rows
of this process, s rows of all processes, q length of the queue.
"""

import math
from collections import OrderedDict
from collections.abc import Iterable, Mapping

import torch
import torch.nn.functional as F
from einops import rearrange
from lightly.utils import dist
from torch import Tensor, nn

from ssvit.data.batch import Batch
from ssvit.engine.randomness import uniform
from ssvit.models.encoder import Encoder
from ssvit.models.vit import ViT
from ssvit.objectives import contrastive_options
from ssvit.objectives.base import EMPTY, VIEWS, Objective, at_least_float32, mlp, scale_gradient, two_views


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


def cosines(rows: Tensor, columns: Tensor) -> Tensor:
    """Return the cosines of all pairs of unit vectors, without autocast: (r, e), (s, e) -> (r, s)."""
    with torch.autocast(rows.device.type, enabled=False):
        return rows @ columns.T


def matching(logits: Tensor, positives: Tensor) -> dict[str, Tensor]:
    """Return the mean loss of logits (r, s) with the columns (r,) of the positives, and the top-1 accuracy."""
    accuracy = (logits.detach().argmax(1) == positives).float().mean()
    return {"loss": F.cross_entropy(logits, positives), "accuracy": accuracy}


def similarities(projections: Tensor, others: Tensor, offset: int, temperature: float) -> tuple[Tensor, Tensor]:
    """Return the logits of NT-Xent (Chen et al. 2020, equation 1) and the index of each view's positive pair.

    This is equal to lightly's NTXentLoss, which selects logits by a mask: their number then depends on data, which
    synchronises host and device.

    Args:
        projections: Unit projections of this process, (v b, e): the rows of `others` from `offset` on.
        others: Unit projections of all processes, (s, e).
        offset: Row offset of this rank.
        temperature: Divisor of the cosines.

    Returns:
        Logits (v b, s), -inf for a view with itself, and the row of the other view of each image, (v b,).
    """
    rows = offset + torch.arange(len(projections), device=projections.device)
    logits = (cosines(projections, others) / temperature).scatter(1, rows[:, None], -math.inf)
    return logits, rows.roll(len(projections) // VIEWS)


class SimCLR(Objective):
    """Implement SimCLR (Chen et al. 2020), with the options of `contrastive_options.SimCLR`.

    The two views of an image are a positive pair. Batches have two "global" views. The head has the layers of lightly's
    without batch norm, whose statistics would differ between processes.
    """

    options: contrastive_options.SimCLR

    def __init__(self, options: contrastive_options.SimCLR, *, encoder: Encoder) -> None:
        super().__init__(options, encoder)
        widths = [encoder.width, *[options.hidden] * (options.layers - 1), options.projection]
        self.head = nn.Sequential(OrderedDict(layers=mlp(widths, between=(lambda hidden: nn.ReLU(),))))

    def sample(self, slots: Tensor, *, seed: int) -> tuple[Tensor, ...]:
        """Sample the patches of each view that are encoded.

        Args:
            slots: Slots of the images, (b,).
            seed: Seed of the run.

        Returns:
            Indices of the patches, (b, v, m) int64; () if all patches are encoded.
        """
        if self.options.keep == 1:
            return ()
        assert isinstance(self.encoder, ViT)  # checked by the options
        patches = self.encoder.patches
        orders = [uniform(seed, "kept patches", slots, patches, view).argsort(dim=1) for view in range(VIEWS)]
        return (torch.stack(orders, dim=1)[:, :, : self.options.count(patches)],)

    def project(self, views: Tensor, noise: tuple[Tensor, ...] = (), depth_noise: Tensor | None = None) -> Tensor:
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
        images = rearrange(views, "b v c h w -> (v b) c h w")
        if not noise:
            return self.head(self.encoder.represent(images, depth_noise=depth_noise))
        assert isinstance(self.encoder, ViT)
        self.encoder.check_size(images)
        visible_ids = rearrange(noise[0], "b v m -> (v b) m")
        return self.head(self.encoder.represent(images, visible_ids=visible_ids, depth_noise=depth_noise))

    def losses(self, projections: Tensor) -> Tensor:
        """Return the loss of each view among these views: (v b, e) -> (v b,)."""
        units = unit(projections)
        return F.cross_entropy(*similarities(units, units, 0, self.options.temperature), reduction="none")

    def chance(self, images: int) -> float:
        """Return the loss if all similarities are equal, log(2 b - 1), for 2 b - 1 other views."""
        return math.log(VIEWS * images - 1)

    def forward(
        self, batch: Batch, noise: tuple[Tensor, ...], scheduled: Mapping[str, Tensor] = EMPTY
    ) -> dict[str, Tensor]:
        """Return the mean loss and the top-1 accuracy of matching positive pairs, among the views of all processes."""
        units = unit(self.project(two_views(batch), noise, self.depth_noise(batch, VIEWS)))
        return matching(*similarities(units, *gathered(units), self.options.temperature))


class ContrastiveTuning(Objective):
    """Implement contrastive tuning of a finished run (MAE-CT, Lehner et al. 2023), which groups similar images.

    A view is matched with the nearest neighbour of the image's other view among earlier images (NNCLR, Dwibedi et al.
    2021). Only the upper layers are trained, after a first phase in which only the new heads are trained. The heads
    have layer norm: the statistics of NNCLR's batch norm would differ between processes. Batches have two "global"
    views.

    Attributes:
        queue: Projections of the newest images, (q, e). The position of an image is its slot modulo q, so that the
            queue does not depend on how a batch is divided.
    """

    encoder: ViT
    options: contrastive_options.ContrastiveTuning
    queue: Tensor

    def __init__(self, options: contrastive_options.ContrastiveTuning, *, encoder: ViT) -> None:
        super().__init__(options, encoder)
        encoder.train_last(options.trained or math.ceil(encoder.depth / 2))
        # The identity keeps the names of the weights in checkpoints, which had a dropout layer there.
        between = (nn.LayerNorm, lambda hidden: nn.GELU(), nn.Identity)
        self.projector = mlp([encoder.width, options.hidden, options.hidden, options.projection], between)
        self.predictor = mlp([options.projection, options.hidden, options.projection], between)
        self.register_buffer("queue", unit(torch.randn(options.queue, options.projection)))

    def project(self, views: Tensor, gradient: Tensor | float = 1.0, depth_noise: Tensor | None = None) -> Tensor:
        """Project views to vectors.

        Args:
            views: Views, (b, v, c, h, w).
            gradient: Factor of the gradient of the encoder; the result does not depend on it.
            depth_noise: Random numbers of stochastic depth, (v b, 2 * depth), or None.

        Returns:
            Projections, (v b, e).
        """
        images = rearrange(views, "b v c h w -> (v b) c h w")
        features = self.encoder.represent(images, depth_noise=depth_noise)
        return self.projector(scale_gradient(features, gradient))

    def nearest(self, projections: Tensor) -> Tensor:
        """Return the indices in the queue of the nearest neighbours: (r, e) -> (r,)."""
        return cosines(unit(projections.detach()), self.queue).argmax(1)

    def logits(self, projections: Tensor, predictions: Tensor) -> Tensor:
        """Return the logits of each view's nearest neighbour with the predictions of the opposite views.

        Args:
            projections: Projections, (v b, e), all first views first.
            predictions: Unit predictions of all processes, (v s, e), in the same order.

        Returns:
            Logits, (v b, s).
        """
        neighbours = self.queue[self.nearest(projections)]
        pairs = zip(neighbours.chunk(VIEWS), reversed(predictions.chunk(VIEWS)), strict=True)
        return torch.cat([cosines(*pair) for pair in pairs]) / self.options.temperature

    def losses(self, projections: Tensor) -> Tensor:
        """Return the loss of each view among these views: (v b, e) -> (v b,)."""
        logits = self.logits(projections, unit(self.predictor(projections)))
        positives = torch.arange(logits.shape[1], device=logits.device).repeat(VIEWS)
        return F.cross_entropy(logits, positives, reduction="none")

    def chance(self, images: int) -> float:
        """Return the loss if all similarities are equal, log(b), for b predictions."""
        return math.log(images)

    def forward(self, batch: Batch, noise: object, scheduled: Mapping[str, Tensor] = EMPTY) -> dict[str, Tensor]:
        """Return the mean loss, the accuracy, and for `after_step` the new queue entries, for all processes."""
        b = len(batch.slots)
        projections = self.project(two_views(batch), scheduled["encoder_gradient"], self.depth_noise(batch, VIEWS))
        predictions, offset = gathered(unit(self.predictor(projections)))
        logits = self.logits(projections, rearrange(predictions, "(r v b) e -> (v r b) e", v=VIEWS, b=b))
        positives = (offset // VIEWS + torch.arange(b, device=logits.device)).repeat(VIEWS)
        position = batch.slots % len(self.queue)
        newest = unit(projections[:b].detach()).to(self.queue.dtype)
        return {
            **matching(logits, positives),
            "newest": torch.zeros_like(self.queue).index_add(0, position, newest),
            "entered": torch.zeros_like(self.queue[:, 0]).index_fill(0, position, 1.0),
        }

    def frozen(self, scheduled: Mapping[str, float]) -> Iterable[Tensor]:
        """Return the parameters of the encoder while only the heads are trained."""
        return () if scheduled["encoder_gradient"] else self.encoder.parameters()

    def after_step(self, outputs: Mapping[str, Tensor], scheduled: Mapping[str, Tensor], applied: Tensor) -> None:
        """Write the projections of the step's first views to the queue, over the oldest ones."""
        # Averaging over micro-batches and processes scales each vector, so it is normalised to length 1 again.
        entered = applied & (outputs["entered"] > 0)
        self.queue.copy_(torch.where(entered[:, None], unit(outputs["newest"]), self.queue))
