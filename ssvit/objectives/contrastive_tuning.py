"""Implement contrastive tuning of a finished run (MAE-CT, Lehner et al. 2023), which groups features of similar images.

A view is matched with the nearest neighbour of the image's other view among earlier images (NNCLR, Dwibedi et al.
2021). Only the upper layers are trained, after a first phase in which only the new heads are trained.

Letters: b images, v = 2 views, c channels, h, w pixels, e width of a projection, q length of the queue, r, s rows.
"""

import itertools
import math
from collections.abc import Iterable, Mapping

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from ssvit.data.batch import Batch
from ssvit.models.vit import ViT
from ssvit.objectives import contrastive_tuning_options
from ssvit.objectives.base import NOTHING
from ssvit.objectives.simclr import VIEWS, Contrastive, cosines, gathered, two_views, unit
from ssvit.options import OptionError


class ContrastiveTuning(Contrastive):
    """Implement contrastive tuning, with the options of `contrastive_tuning_options.ContrastiveTuning`.

    Batches have two "global" views.

    Attributes:
        queue: Projections of the newest images, (q, e). The position of an image is its slot modulo q, so that the
            queue does not depend on how a batch is divided.
    """

    encoder: ViT
    options: contrastive_tuning_options.ContrastiveTuning
    queue: Tensor

    def __init__(self, options: contrastive_tuning_options.ContrastiveTuning, *, encoder: ViT) -> None:
        super().__init__(options, encoder.requires_grad_(False))
        upper = options.trained or math.ceil(len(encoder.blocks) / 2)
        for part in (*list(encoder.blocks)[-upper:], encoder.norm):
            part.requires_grad_(True)
        self.projector = perceptron(encoder.width, options.hidden, options.hidden, options.projection)
        self.predictor = perceptron(options.projection, options.hidden, options.projection)
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
        near = self.queue[self.nearest(projections)]
        pairs = zip(near.chunk(VIEWS), reversed(predictions.chunk(VIEWS)), strict=True)
        return torch.cat([cosines(*pair) for pair in pairs]) / self.options.temperature

    def losses(self, projections: Tensor) -> Tensor:
        """Return the loss of each view: (v b, e) -> (v b,)."""
        logits = self.logits(projections, unit(self.predictor(projections)))
        right = torch.arange(logits.shape[1], device=logits.device).repeat(VIEWS)
        return F.cross_entropy(logits, right, reduction="none")

    def chance(self, images: int) -> float:
        """Return log(b): one of the b predictions is the positive."""
        return math.log(images)

    def forward(self, batch: Batch, noise: object, scheduled: Mapping[str, Tensor] = NOTHING) -> dict[str, Tensor]:
        """Return the mean loss, the accuracy, and for `after_step` the new queue entries, for all processes."""
        if len(batch.slots) > len(self.queue):
            raise OptionError("objective.queue", len(self.queue), f"must hold the {len(batch.slots)} images of a batch")
        projections = self.project(two_views(batch), scheduled["encoder_gradient"], self.depth_noise(batch, VIEWS))
        every, first = gathered(unit(self.predictor(projections)))
        b = len(batch.slots)
        logits = self.logits(projections, rearrange(every, "(r v b) e -> (v r b) e", v=VIEWS, b=b))
        right = (first // VIEWS + torch.arange(b, device=logits.device)).repeat(VIEWS)
        place = batch.slots % len(self.queue)
        newest = unit(projections[:b].detach()).to(self.queue.dtype)
        return {
            "loss": F.cross_entropy(logits, right),
            "accuracy": (logits.detach().argmax(1) == right).float().mean(),
            "newest": torch.zeros_like(self.queue).index_add(0, place, newest),
            "entered": torch.zeros_like(self.queue[:, 0]).index_fill(0, place, 1.0),
        }

    def frozen(self, scheduled: Mapping[str, float]) -> Iterable[Tensor]:
        """Return the parameters of the encoder while only the heads are trained."""
        return () if scheduled["encoder_gradient"] else self.encoder.parameters()

    def after_step(self, outputs: Mapping[str, Tensor], scheduled: Mapping[str, Tensor], applied: Tensor) -> None:
        """Write the projections of the step's first views to the queue, over the oldest ones."""
        # Averaging over micro-batches and processes scales each vector, so it is normalised to length 1 again.
        entered = applied & (outputs["entered"] > 0)
        self.queue.copy_(torch.where(entered[:, None], unit(outputs["newest"]), self.queue))


def perceptron(*widths: int) -> nn.Sequential:
    """Return linear layers with layer norm and GELU between them; NNCLR's batch norm would differ between processes."""
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.LayerNorm(before), nn.GELU()] if layers else []
        layers.append(nn.Linear(before, after))
    return nn.Sequential(*layers)


def scale_gradient(x: Tensor, factor: Tensor | float) -> Tensor:
    """Return the same value with its gradient multiplied by a factor."""
    if isinstance(factor, Tensor):
        factor = factor.to(x.dtype)
    return x * factor + x.detach() * (1 - factor)
