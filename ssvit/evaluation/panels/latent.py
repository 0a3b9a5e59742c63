"""Evaluate latent prediction by the loss on held-out images, compared with trivial baselines, and detect its collapse.

Targets change with the teacher, so the loss alone is not informative: each evaluation measures the baselines on the
same targets. Two baselines ignore the image; two use the targets of its visible patches, which are not available to the
model. Targets that hardly differ between images are easy to predict, and indicate a collapse.

Shapes use b images, k masks of an image, m masked patches, n patches, d width of a target.
"""

from collections.abc import Mapping

import torch
from einops import rearrange
from torch import Tensor

from ssvit.evaluation.panels.base import Evaluation, with_metrics
from ssvit.evaluation.panels.reconstruction import Reconstruction, conclude, describe_losses, nearest_uncorrupted
from ssvit.figures.pictures import Mosaic, masked
from ssvit.figures.plot import History, Panel, Plot, curve
from ssvit.models.block import gather
from ssvit.objectives.latent import Latent

BASELINES = {
    "loss_constant": "the mean target",
    "loss_place": "the mean target at the patch's place",
    "loss_mean": "the mean target of the image's visible patches",
    "loss_copying": "copying the nearest visible patch's target",
}
# Standard deviations below which the authors' code stops (data2vec2.py: min_target_var, min_pred_var).
LEAST_TARGET, LEAST_PREDICTION = 0.1, 0.01


class LatentPrediction(Reconstruction):
    """Evaluate a `Latent` model with the first mask of each image."""

    def __call__(self, objective: Latent, history: History | None = None) -> Evaluation:
        """Return the loss on masked patches, that of the baselines, and standard deviations of targets and predictions.

        Figures: `learning`, these metrics over the steps; `features`, targets and predictions of some images as
        colours.
        """
        metrics = self._metrics(objective)
        if history is None:
            return Evaluation(metrics=metrics)
        history = with_metrics(history, metrics)
        dashes = zip(BASELINES.items(), ("--", ":", "-.", "-"), strict=True)
        losses = (
            curve(history, "train/patch_loss", "training", "train"),
            curve(history, "loss", "held-out"),
            *(curve(history, key, words, "ink", dash=dash) for (key, words), dash in dashes),
        )
        deviations = (
            curve(history, "target_std", "targets", "unchanged"),
            curve(history, "target_std_images", "targets, of images at one place", "replaced"),
            curve(history, "prediction_std", "predictions"),
        )
        panels = Panel("loss on masked patches", losses), Panel("standard deviation of a feature", deviations)
        learning = Plot(panels, (14, 3.8), legend="right")  # the curves cover the whole panel
        figures = {"learning": learning, "features": self._features(objective)}
        return Evaluation(metrics=metrics, lines=describe(metrics), figures=figures)

    def _answers(self, objective: Latent, images: Tensor, slots: Tensor) -> tuple[Tensor, ...]:
        """Return images, targets (b, n, d), predictions (b, m, d), and visible and masked ids of the first mask."""
        images, noise = self.sampled(objective, images, slots)
        prediction, _ = objective.predict(images, noise)
        return (
            images,
            objective.targets(images),
            prediction[:, 0].float(),
            noise.visible_ids[:, 0],
            noise.masked_ids[:, 0],
        )

    def _metrics(self, objective: Latent) -> dict[str, float]:
        columns = []
        for batch in self.batches:
            _, targets, prediction, visible_ids, masked_ids = self._answers(objective, *batch)
            mean = gather(targets, visible_ids).mean(1, keepdim=True)
            nearest = gather(targets, nearest_uncorrupted(masked_ids, objective.encoder.grid))
            columns.append([part.cpu() for part in (targets, masked_ids, prediction, mean, nearest)])
        targets, masked_ids, prediction, mean, nearest = map(torch.cat, zip(*columns, strict=True))
        place = targets.mean(0)
        guesses = {
            "loss": prediction,
            "loss_constant": place.mean(0),
            "loss_place": place[masked_ids],
            "loss_mean": mean,
            "loss_copying": nearest,
        }
        truth = gather(targets, masked_ids)
        return {name: objective.loss(guess, truth).item() for name, guess in guesses.items()} | {
            "target_std": _deviation(targets.flatten(0, 1)),
            "target_std_images": (targets - place).square().mean(0).sqrt().mean().item(),
            "prediction_std": _deviation(prediction.flatten(0, 1)),
        }

    def _features(self, objective: Latent) -> Mosaic:
        images, targets, prediction, _, masked_ids = self._answers(objective, *self.shown)
        encoder = objective.encoder
        at = masked_ids[:, :, None].expand_as(prediction)
        painted = colors(targets, targets.scatter(1, at, prediction), encoder.grid, encoder.patch_size)
        panels = dict(zip(("targets", "predicted"), painted, strict=True)) | {"image": images}
        panels = {title: self.display(panel) for title, panel in panels.items()}
        note = "masked; the colours are the targets' first three principal components, at visible places the true ones"
        return masked(panels, masked_ids=masked_ids, grid=encoder.grid, note=note)


def _deviation(vectors: Tensor) -> float:
    """Return the standard deviation of each feature over all vectors (n, d), averaged over features."""
    return vectors.double().std(0).mean().item()


def colors(targets: Tensor, predictions: Tensor, grid: tuple[int, int], patch: tuple[int, int]) -> list[Tensor]:
    """Map targets and predictions to RGB by the first three principal components of the targets.

    The colour range of a component spans the central 96 % of the targets.

    Args:
        targets: Targets, (b, n, d).
        predictions: Predictions, (b, n, d).
        grid: Rows and columns of patches.
        patch: Height and width of a patch in pixels.

    Returns:
        Two images, (b, 3, h, w) in [0, 1].
    """
    flat = targets.flatten(0, 1).double()
    mean = flat.mean(0)
    axes = torch.linalg.svd(flat - mean, full_matrices=False).Vh[:3]
    axes = axes * axes.sum(1, keepdim=True).sign()  # fix the sign of each axis, which is arbitrary in the SVD
    low, high = ((flat - mean) @ axes.T).quantile(torch.tensor([0.02, 0.98], dtype=torch.double, device=flat.device), 0)
    painted = []
    for features in (targets, predictions):
        values = ((features.double() - mean) @ axes.T - low) / (high - low).clamp(min=1e-12)
        image = rearrange(values.clamp(0, 1).float(), "b (y x) c -> b c y x", y=grid[0])
        painted.append(image.repeat_interleave(patch[0], 2).repeat_interleave(patch[1], 3))
    return painted


def describe(metrics: Mapping[str, float]) -> list[str]:
    """Return lines that compare the loss with each baseline and state whether the targets differ."""
    lines = describe_losses(metrics, BASELINES, 3)
    lines.append(
        f"standard deviation of the targets {metrics['target_std']:.2f}, from image to image at one place "
        f"{metrics['target_std_images']:.2f}, of the predictions {metrics['prediction_std']:.2f}"
    )
    signs = []
    if min(metrics["target_std"], metrics["target_std_images"]) < LEAST_TARGET:
        signs.append(f"targets hardly differ (standard deviation below {LEAST_TARGET})")
    if metrics["prediction_std"] < LEAST_PREDICTION:
        signs.append(f"predictions hardly differ (standard deviation below {LEAST_PREDICTION})")
    if signs:
        return [*lines, f"COLLAPSED, or hardly begun: {'; '.join(signs)}"]
    return [*lines, conclude(sum(metrics["loss"] < metrics[name] for name in BASELINES), len(BASELINES))]
