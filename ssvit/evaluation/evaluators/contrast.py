"""Evaluate contrastive models by instance discrimination: two fixed views of each held-out image, compared with chance.

Shapes use b, n images, v = 2 views, c channels, h, w pixels, d width, e width of a projection.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ssvit.data.augment.views import Views
from ssvit.evaluation.evaluators.base import Shown
from ssvit.evaluation.evaluators.held_out import HeldOut, collapsed_features, describe_spread, spread_of
from ssvit.evaluation.evaluators.options import Contrast as ContrastOptions
from ssvit.evaluation.evaluators.reconstruction import compare_with_baselines
from ssvit.figures.plot import History, Panel, Plot, curve, feature_spread, losses
from ssvit.objectives.contrastive import ContrastiveTuning, SimCLR, similarities, unit


class Contrast(HeldOut):
    """Evaluate SimCLR or contrastive tuning.

    Args:
        options: Options of the evaluation.
        augment: Augmentation that makes the views, as in training.
        images: Arguments of `HeldOut`.
    """

    fewest = 2

    def __init__(self, options: ContrastOptions, *, augment: Views, **images: Any) -> None:
        super().__init__(options, **images)
        self.augment = augment

    def show(self, objective: SimCLR | ContrastiveTuning, metrics: Mapping[str, float], history: History) -> Shown:
        """Return the figure `learning`, the metrics over the steps."""
        return describe(metrics, history[0] if len(history) > 1 else {}), {"learning": learning(history)}

    def measure(self, objective: SimCLR | ContrastiveTuning) -> dict[str, float]:
        """Return the loss, top-1 accuracy of matching views, alignment, uniformity and spread of the features."""
        device = objective.encoder.mean.device
        projected, features = [], []
        for images, slots in self.batches:
            views = self.augment(images, slots, self.options.seed)["global"]
            projected.append(objective.project(views.to(device)).unflatten(0, (-1, len(images))))
            features.append(unit(objective.backbone().represent(images.to(device))))
        projections, vectors = torch.cat(projected, 1).flatten(0, 1), torch.cat(features)
        loss = objective.losses(projections).double().mean().item()
        metrics = {"loss": loss, "loss_by_chance": objective.chance(len(vectors))}
        return metrics | measure(unit(projections)) | spread_of(vectors)


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


def describe(metrics: Mapping[str, float], start: Mapping[str, float | None]) -> list[str]:
    """Return lines that compare the metrics with chance and with step 0, and state whether the model has collapsed.

    Args:
        metrics: The metrics.
        start: Metrics of step 0, if they were measured.
    """

    def line(name: str, key: str, sign: int, show: Callable[[float], str]) -> str:
        baselines = {"chance": metrics[f"{key}_by_chance"], "the model at step 0": start.get(key)}
        known = {words: value for words, value in baselines.items() if value is not None}
        gains = {words: (show(value), sign * (metrics[key] - value)) for words, value in known.items()}
        return compare_with_baselines(name, show(metrics[key]), gains)

    lines = [
        line("loss", "loss", -1, "{:.3f}".format),
        line("top-1 accuracy of matching views", "top1", 1, lambda share: f"{100 * share:.2f} %"),
        f"mean squared distance between the views of an image {metrics['alignment']:.2f}, between images "
        f"{metrics['distance']:.2f}; uniformity {metrics['uniformity']:.2f} (0: equal projections, -4: uniform)",
        describe_spread(metrics),
    ]
    if signs := collapsed_features(metrics):
        return [*lines, f"COLLAPSED, or at the start of training: {signs[0]}"]
    top1_baseline = max(metrics["top1_by_chance"], start.get("top1") or 0.0)
    if metrics["loss"] < metrics["loss_by_chance"] and metrics["top1"] > top1_baseline:
        return [*lines, "the model discriminates images better than chance and than at step 0"]
    return [*lines, "the model does not discriminate images better than chance and than at step 0"]


def learning(history: History) -> Plot:
    """Plot the loss, the matching accuracy, distances and the spread of features over the steps."""
    matching = (
        curve(history, "top1", "held-out", scale=100),
        curve(history, "top1_by_chance", "by chance", "ink", 100, "-."),
    )
    distances = (
        curve(history, "alignment", "between the views of an image"),
        curve(history, "distance", "between images", "replaced"),
    )
    panels = (
        losses(history, {"loss_by_chance": "chance, held-out"}, "loss (nats)"),
        Panel("top-1 accuracy of matching views (%)", matching),
        Panel("squared distance of projections", distances),
        feature_spread(history),
    )
    return Plot(panels, (10, 7.2), down=2)
