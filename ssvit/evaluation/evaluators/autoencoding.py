"""Evaluate masked autoencoders by the loss on held-out images, compared with trivial baselines.

The masks are fixed, so that all evaluations of a run are comparable. Two baselines predict a masked patch from the
visible patches of its image, normalised like the targets of the model: the mean colour, and the nearest visible patch.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from ssvit.evaluation.evaluators.base import Shown
from ssvit.evaluation.evaluators.held_out import HeldOut
from ssvit.evaluation.evaluators.reconstruction import compare_losses, nearest_uncorrupted
from ssvit.figures.pictures import Mosaic, masked
from ssvit.figures.plot import History, Plot, losses
from ssvit.models.block import gather_tokens
from ssvit.objectives.mae import MAE

BASELINES = {
    "loss_mean": "the mean of the image's visible pixels",
    "loss_copying": "copying the nearest visible patch",
}


class Autoencoding(HeldOut):
    """Evaluate an `MAE` model."""

    def show(self, objective: MAE, metrics: Mapping[str, float], history: History) -> Shown:
        """Return the figures `mosaic`, reconstructions of some images, and `learning`, the losses over the steps."""
        name = f"squared error of {'normalised patches' if objective.options.norm_pixels else 'pixels'}"
        learning = Plot([losses(history, BASELINES, name)], (6, 3.8))
        return compare_losses(metrics, BASELINES), {"mosaic": self._mosaic(objective), "learning": learning}

    def measure(self, objective: MAE) -> dict[str, float]:
        """Return the loss on all masked patches and the losses of the baselines."""
        errors: dict[str, list[Tensor]] = {name: [] for name in ("loss", *BASELINES)}
        for images, noise in (self.sampled(objective, *batch) for batch in self.batches):
            labels = objective.labels(images)
            truth = gather_tokens(labels, noise.masked_ids)
            colors = (
                gather_tokens(labels, noise.visible_ids).unflatten(-1, (objective.encoder.channels, -1)).mean((1, 3))
            )
            mean = colors.repeat_interleave(labels.shape[-1] // colors.shape[1], dim=1)
            nearest = gather_tokens(labels, nearest_uncorrupted(noise.masked_ids, objective.encoder.grid))
            guesses = {
                "loss": objective.predict(images, noise).to(truth.dtype),
                "loss_mean": mean[:, None],
                "loss_copying": nearest,
            }
            for name, guess in guesses.items():
                errors[name].append((guess - truth).square().mean(-1).double().cpu())
        return {name: torch.cat(parts).mean().item() for name, parts in errors.items()}

    def _mosaic(self, objective: MAE) -> Mosaic:
        images, noise = self.sampled(objective, *self.shown)
        labels, grid = objective.labels(images), objective.encoder.grid

        def painted(guess: Tensor) -> Tensor:
            at = noise.masked_ids[:, :, None].expand_as(guess)
            return self.display(objective.paint(labels.scatter(1, at, guess.to(labels.dtype)), images))

        panels = {
            "nearest copied": painted(gather_tokens(labels, nearest_uncorrupted(noise.masked_ids, grid))),
            "reconstructed": painted(objective.predict(images, noise)),
            "true": self.display(objective.paint(labels, images)),
        }
        scale = " with the mean and contrast of the true patch" if objective.options.norm_pixels else ""
        note = f"masked; the other columns show the predictions{scale}"
        return masked(panels, masked_ids=noise.masked_ids, grid=grid, note=note)
