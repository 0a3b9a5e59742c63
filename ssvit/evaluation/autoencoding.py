"""Is a masked autoencoder learning? Its loss on held-out images, beside two that need no learning.

The masks are fixed, so every evaluation asks the same questions. The baselines give each masked patch what they make
of the visible ones of its image, as the loss wants it (patch by patch normalised, or not): the mean of their pixels, a
colour, or the nearest of them.

Letters: b images, n patches of p x q pixels, m masked patches an image, c channels.
"""

from collections.abc import Mapping

import torch
from matplotlib.figure import Figure
from torch import Tensor

from ssvit.evaluation.base import Evaluation, History, with_metrics
from ssvit.evaluation.held_out import HeldOut
from ssvit.evaluation.reconstruction import nearest_uncorrupted
from ssvit.figures import reconstruction
from ssvit.models.vit import gather
from ssvit.objectives.mae import MAE, Masks

BASELINES = {
    "loss_mean": "the mean of the image's visible pixels",
    "loss_copying": "copying the nearest visible patch",
}


def mean_of_visible(labels: Tensor, noise: Masks, channels: int) -> Tensor:
    """For each masked patch the mean colour of its image's visible ones: (b, n, c * p * q) -> (b, m, c * p * q)."""
    colors = gather(labels, noise.visible_ids).unflatten(-1, (channels, -1)).mean((1, 3))
    patch = colors.repeat_interleave(labels.shape[-1] // channels, dim=1)
    return patch[:, None].expand(-1, noise.masked_ids.shape[1], -1)


def nearest_visible(labels: Tensor, noise: Masks, grid: tuple[int, int]) -> Tensor:
    """For each masked patch the nearest one of its image that is visible: (b, n, c * p * q) -> (b, m, c * p * q)."""
    return gather(labels, nearest_uncorrupted(noise.masked_ids, grid))


class Autoencoding(HeldOut):
    """The panel of an `MAE` model."""

    def __call__(self, objective: MAE, history: History | None = None) -> Evaluation:
        """Loss on all masked patches, and that of the baselines.

        Figures: `mosaic`, what is visible of some images, a baseline, the model's answer, the truth; `learning`, the
        loss over time.
        """
        metrics = self._metrics(objective)
        if history is None:
            return Evaluation(metrics=metrics)
        name = f"squared error of {'normalised patches' if objective.options.norm_pixels else 'pixels'}"
        learning = reconstruction.learning_of_loss(with_metrics(history, metrics), BASELINES, name)
        figures = {"mosaic": self._mosaic(objective), "learning": learning}
        return Evaluation(metrics=metrics, lines=describe(metrics), figures=figures)

    def _metrics(self, objective: MAE) -> dict[str, float]:
        grid, channels = objective.encoder.grid, objective.encoder.channels
        errors: dict[str, list[Tensor]] = {name: [] for name in ("loss", *BASELINES)}
        for images, noise in (self.sampled(objective, *batch) for batch in self.batches):
            labels = objective.labels(images)
            truth = gather(labels, noise.masked_ids)
            guesses = (
                objective.predict(images, noise).to(truth.dtype),
                mean_of_visible(labels, noise, channels),
                nearest_visible(labels, noise, grid),
            )
            for own, guess in zip(errors.values(), guesses, strict=True):
                own.append((guess - truth).square().mean(-1).double().cpu())
        return {name: torch.cat(own).mean().item() for name, own in errors.items()}

    def _mosaic(self, objective: MAE) -> Figure:
        images, noise = self.sampled(objective, *self.shown)
        labels, grid = objective.labels(images), objective.encoder.grid

        def painted(guess: Tensor) -> Tensor:
            at = noise.masked_ids[:, :, None].expand_as(guess)
            return objective.paint(labels.scatter(1, at, guess.to(labels.dtype)), images)

        panels = {
            "nearest copied": painted(nearest_visible(labels, noise, grid)),
            "reconstructed": painted(objective.predict(images, noise)),
            "true": objective.paint(labels, images),
        }
        how = "with the true patch's mean and contrast" if objective.options.norm_pixels else "as they are"
        note = f"masked; in the other columns the guesses, {how}"
        return reconstruction.masked_mosaic(panels, masked_ids=noise.masked_ids, grid=grid, note=note)


def describe(metrics: Mapping[str, float]) -> list[str]:
    """Above or below each baseline, in words."""
    loss, lines = metrics["loss"], []
    for name, words in BASELINES.items():
        side = "below, better than" if loss < metrics[name] else "not below, NO better than"
        lines.append(f"loss on masked patches {loss:.4f}: {side} {words}, {metrics[name]:.4f}")
    passed = sum(loss < metrics[name] for name in BASELINES)
    if passed == len(BASELINES):
        return [*lines, "the model has learned to use the context"]
    return [
        *lines,
        f"the model beats {passed} of {len(BASELINES)} baselines: it has not learned to use the context yet",
    ]
