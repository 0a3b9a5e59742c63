"""Evaluate contrastive models by instance discrimination: two fixed views of each held-out image, compared with chance.

Shapes use b, n images, v = 2 views, c channels, h, w pixels, d width, e width of a projection.
"""

from collections.abc import Mapping
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor

from ssvit.data.augment.views import Views
from ssvit.data.batch import EvalTransform
from ssvit.data.sources.base import Source
from ssvit.evaluation.panels import contrast_options
from ssvit.evaluation.panels.base import Evaluation, with_metrics
from ssvit.evaluation.panels.held_out import HeldOut
from ssvit.evaluation.panels.spread import describe_spread, one_way, spread_of
from ssvit.figures.pictures import Gallery, Picture
from ssvit.figures.plot import History, Panel, Plot, curve, losses, spread
from ssvit.figures.style import evenly_spaced
from ssvit.objectives.simclr import Contrastive, cosines, similarities, unit

NONE: Mapping[str, float | None] = MappingProxyType({})
_ROWS, _ACROSS = 8, 10  # query images in the figure, and images in the row of each


class Contrast(HeldOut):
    """Evaluate a `Contrastive` model.

    Args:
        options: Options of the evaluation.
        source: Held-out images.
        transform: Transform of the evaluation.
        augment: Augmentation that makes the views, as in training.
    """

    fewest = 2

    def __init__(
        self, options: contrast_options.Contrast, *, source: Source, transform: EvalTransform, augment: Views
    ) -> None:
        super().__init__(options, source=source, transform=transform)
        self.augment, self.seed = augment, options.seed

    def __call__(self, objective: Contrastive, history: History | None = None) -> Evaluation:
        """Return the loss, top-1 accuracy of matching views, alignment, uniformity and spread of the features.

        Figures: `learning`, these metrics over the steps, and `neighbours`, images with their nearest neighbours.
        """
        device = objective.encoder.mean.device
        projected, features = [], []
        for images, slots in self.batches:
            views = self.augment(images, slots, self.seed)["global"]
            projected.append(objective.project(views.to(device)).unflatten(0, (-1, len(images))))
            features.append(unit(objective.backbone().represent(images.to(device))))
        projections, vectors = torch.cat(projected, 1).flatten(0, 1), torch.cat(features)
        losses, chance = objective.losses(projections), objective.chance(len(vectors))
        metrics = {"loss": losses.double().mean().item(), "loss_by_chance": chance}
        metrics |= measure(unit(projections)) | spread_of(vectors)
        if history is None:
            return Evaluation(metrics=metrics)
        every = torch.cat([images for images, _ in self.batches])
        shown = evenly_spaced(len(every), _ROWS)
        near = cosines(vectors[shown], vectors)
        near[range(len(shown)), shown] = 2.0  # the image itself comes first, even if another one has the same features
        nearest = near.topk(min(_ACROSS, len(every)))
        rows = [
            [
                Picture(image, () if place == 0 else (f"cosine {cosine:.2f}",))
                for place, (image, cosine) in enumerate(zip(self.display(every[ids]), row.tolist(), strict=True))
            ]
            for ids, row in zip(nearest.indices.cpu(), nearest.values.cpu(), strict=True)
        ]
        title = f"held-out images, each next to those of {len(every)} whose features are nearest"
        figures = {"learning": learning(with_metrics(history, metrics)), "neighbours": Gallery(rows, title, tile=110)}
        return Evaluation(metrics=metrics, lines=describe(metrics, history[0]), figures=figures)


def measure(projections: Tensor) -> dict[str, float]:
    """Return matching accuracy, alignment and uniformity of projections of unit length, (v b, e).

    alignment is the mean squared distance of the views of an image. uniformity is the log of the mean of
    exp(-2 * squared distance) over pairs of images, averaged over the views (Wang and Isola 2020, section 4.1.2).
    """
    n = len(projections) // 2
    logits, partner = similarities(projections, projections, 0, 1.0)
    first, second = projections.double().split(n)
    apart = torch.stack([F.pdist(view).square() for view in (first, second)])
    return {
        "top1": (logits.argmax(1) == partner).double().mean().item(),
        "top1_by_chance": 1 / (2 * n - 1),
        "alignment": (first - second).square().sum(1).mean().item(),
        "distance": apart.mean().item(),
        "uniformity": (-2 * apart).exp().mean(1).log().mean().item(),
    }


def describe(metrics: Mapping[str, float], start: Mapping[str, float | None] = NONE) -> list[str]:
    """Return lines that compare the metrics with chance and with step 0, and state whether the model has collapsed."""
    loss, chance, top1 = metrics["loss"], metrics["loss_by_chance"], metrics["top1"]
    first_loss, first = start.get("loss"), start.get("top1")
    lines = [
        f"loss {loss:.3f}: {'below, better than' if loss < chance else 'not below, NO better than'} chance, "
        f"{chance:.3f} (all views alike)" + ("" if first_loss is None else f"; {first_loss:.3f} at step 0"),
        f"the nearest of all other views is the image's own for {100 * top1:.1f} % of the views, by chance for "
        f"{100 * metrics['top1_by_chance']:.2f} %" + ("" if first is None else f", at step 0 for {100 * first:.1f} %"),
        f"squared distance of an image's views {metrics['alignment']:.2f}, of different images "
        f"{metrics['distance']:.2f}; uniformity {metrics['uniformity']:.2f} (0: all alike, -4: in all directions)",
        describe_spread(metrics),
    ]
    if signs := one_way(metrics):
        return [*lines, f"COLLAPSED, or hardly begun: {signs[0]}"]
    if loss < chance and top1 > max(first or 0.0, metrics["top1_by_chance"]):
        return [*lines, "the model tells images apart, better than at step 0"]
    if first_loss is not None and loss < min(first_loss, chance):
        return [*lines, "the loss has fallen, but views find each other NO more often than at step 0"]
    return [*lines, "the model does NOT tell images apart better than at step 0"]


def learning(history: History) -> Plot:
    """Plot the loss, the matching accuracy, distances and the spread of features over the steps."""
    matching = (
        curve(history, "top1", "held-out", scale=100),
        curve(history, "top1_by_chance", "by chance", "ink", 100, "-."),
    )
    distances = (
        curve(history, "alignment", "of an image's views"),
        curve(history, "distance", "of different images", "replaced"),
    )
    panels = (
        losses(history, {"loss_by_chance": "chance, held-out"}, "loss (nats)"),
        Panel("nearest is the image's other view (%)", matching),
        Panel("squared distance of projections", distances),
        spread(history),
    )
    return Plot(panels, (10, 7.2), down=2)
