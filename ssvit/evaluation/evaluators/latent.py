"""Evaluate latent prediction by the loss on held-out images, compared with trivial baselines, and detect its collapse.

Targets change with the teacher, so the loss alone is not informative: each evaluation measures the baselines on the
same targets. Two baselines ignore the image; two use the targets of its visible patches, which are not available to the
model. Targets that hardly differ between images are easy to predict, and indicate a collapse.

Shapes use b images, k masks of an image, m masked patches, n patches, d width of a target.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from ssvit.evaluation.evaluators.base import Shown
from ssvit.evaluation.evaluators.held_out import HeldOut
from ssvit.evaluation.evaluators.reconstruction import compare_losses, nearest_uncorrupted
from ssvit.figures.plot import History, Panel, Plot, curve
from ssvit.models.block import gather_tokens
from ssvit.objectives.latent import Latent

BASELINES = {
    "loss_constant": "the mean target",
    "loss_place": "the mean target at the patch's position",
    "loss_mean": "the mean target of the image's visible patches",
    "loss_copying": "copying the nearest visible patch's target",
}
# Standard deviations below which the authors' code stops (data2vec2.py: min_target_var, min_pred_var).
LEAST_TARGET, LEAST_PREDICTION = 0.1, 0.01


class LatentPrediction(HeldOut):
    """Evaluate a `Latent` model with the first mask of each image."""

    def show(self, objective: Latent, metrics: Mapping[str, float], history: History) -> Shown:
        """Return the figure `learning`, the metrics over the steps."""
        dashes = zip(BASELINES.items(), ("--", ":", "-.", "-"), strict=True)
        losses = (
            curve(history, "train/patch_loss", "training", "train"),
            curve(history, "loss", "held-out"),
            *(curve(history, key, words, "ink", dash=dash) for (key, words), dash in dashes),
        )
        deviations = (
            curve(history, "target_std", "targets", "unchanged"),
            curve(history, "target_std_images", "targets at the same position", "replaced"),
            curve(history, "prediction_std", "predictions"),
        )
        panels = Panel("loss on masked patches", losses), Panel("standard deviation of a feature", deviations)
        return describe(metrics), {"learning": Plot(panels, (10, 4.8), legend="under")}

    def measure(self, objective: Latent) -> dict[str, float]:
        """Return the losses of model and baselines on masked patches, and the deviations of targets and predictions."""
        columns = []
        for images, noise in (self.sampled(objective, *batch) for batch in self.batches):
            prediction, _ = objective.predict(images, noise)
            targets, masked_ids = objective.targets(images), noise.masked_ids[:, 0]
            mean = gather_tokens(targets, noise.visible_ids[:, 0]).mean(1, keepdim=True)
            nearest = gather_tokens(targets, nearest_uncorrupted(masked_ids, objective.encoder.grid))
            parts = (targets, masked_ids, prediction[:, 0].float(), mean, nearest)
            columns.append([part.cpu() for part in parts])
        targets, masked_ids, prediction, mean, nearest = map(torch.cat, zip(*columns, strict=True))
        mean_at_position = targets.mean(0)
        guesses = {
            "loss": prediction,
            "loss_constant": mean_at_position.mean(0),
            "loss_place": mean_at_position[masked_ids],
            "loss_mean": mean,
            "loss_copying": nearest,
        }
        truth = gather_tokens(targets, masked_ids)
        return {name: objective.loss(guess, truth).item() for name, guess in guesses.items()} | {
            "target_std": _deviation(targets.flatten(0, 1)),
            "target_std_images": (targets - mean_at_position).square().mean(0).sqrt().mean().item(),
            "prediction_std": _deviation(prediction.flatten(0, 1)),
        }


def _deviation(vectors: Tensor) -> float:
    """Return the standard deviation of each feature over all vectors (n, d), averaged over features."""
    return vectors.double().std(0).mean().item()


def describe(metrics: Mapping[str, float]) -> list[str]:
    """Return lines that compare the loss with each baseline and state whether the targets differ."""
    comparison, conclusion = compare_losses(metrics, BASELINES)
    deviations = (
        f"standard deviation: targets {metrics['target_std']:.2f}, targets at the same position "
        f"{metrics['target_std_images']:.2f}, predictions {metrics['prediction_std']:.2f}"
    )
    signs = []
    if min(metrics["target_std"], metrics["target_std_images"]) < LEAST_TARGET:
        signs.append(f"targets hardly differ (standard deviation below {LEAST_TARGET})")
    if metrics["prediction_std"] < LEAST_PREDICTION:
        signs.append(f"predictions hardly differ (standard deviation below {LEAST_PREDICTION})")
    if signs:
        conclusion = f"COLLAPSED, or at the start of training: {'; '.join(signs)}"
    return [comparison, deviations, conclusion]
