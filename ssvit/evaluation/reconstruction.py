"""Is it learning? Masked patch prediction on held-out images, beside what needs no learning at all.

The corruption is fixed, so every evaluation asks the same questions. Three baselines: the entropy of the labels (the
least loss of a model that ignores the image), the most frequent label, and copying the nearest uncorrupted patch.

Letters: b images, n patches, m corrupted patches an image.
"""

from collections.abc import Mapping

import torch
from matplotlib.figure import Figure
from torch import Tensor

from ssvit.evaluation.base import Evaluation, History, with_metrics
from ssvit.evaluation.held_out import HeldOut
from ssvit.figures import reconstruction
from ssvit.models.vit import gather
from ssvit.objectives.masked_patch import MaskedPatch
from ssvit.objectives.masking import KINDS, MASKED


def nearest_uncorrupted(at: Tensor, grid: tuple[int, int]) -> Tensor:
    """For each corrupted patch the nearest patch that is not: at (b, m) -> (b, m), the first in raster order of equals.

    Distance is Euclidean between patch centres. ValueError if nothing is uncorrupted.
    """
    n = grid[0] * grid[1]
    if at.shape[1] >= n:
        raise ValueError("every patch is corrupted, so there is none to copy")
    place = torch.arange(n, device=at.device)
    rows, columns = place // grid[1], place % grid[1]
    distance = (rows[:, None] - rows).square() + (columns[:, None] - columns).square()
    corrupted = torch.zeros(len(at), n, dtype=torch.bool, device=at.device).scatter(1, at, True)
    # Distances of equals are told apart by the place itself, so that the answer is the same on every device.
    cost = distance[at] * n + place
    return cost.masked_fill(corrupted[:, None, :], torch.iinfo(torch.int64).max).argmin(-1)


class Prediction(HeldOut):
    """The panel of a `MaskedPatch` model."""

    def __call__(self, objective: MaskedPatch, history: History | None = None) -> Evaluation:
        """Loss and score over all corrupted patches and apart for masked, replaced and unchanged, and baselines.

        Figures: `mosaic`, images, what the model sees of them, its answer, the truth; `learning`, the metrics over
        time.
        """
        metrics = self._metrics(objective)
        if history is None:
            return Evaluation(metrics=metrics)
        learning = reconstruction.learning(with_metrics(history, metrics), objective.target.score_name)
        figures = {"mosaic": self._mosaic(objective), "learning": learning}
        return Evaluation(metrics=metrics, lines=describe(metrics), figures=figures)

    def _metrics(self, objective: MaskedPatch) -> dict[str, float]:
        target, grid = objective.target, objective.encoder.grid
        losses, scores, fates, truths, copied = [], [], [], [], []
        for images, noise in (self.sampled(objective, *batch) for batch in self.batches):
            labels = target.labels(images)
            truth, prediction = gather(labels, noise.ids), objective.predict(images, noise).float()
            losses.append(target.losses(prediction, truth).double().cpu())
            scores.append(target.score(target.guess(prediction), truth).cpu())
            fates.append(noise.kind.cpu())
            truths.append(truth.cpu())
            if noise.ids.shape[1] < grid[0] * grid[1]:
                nearest = gather(labels, nearest_uncorrupted(noise.ids, grid))
                copied.append(target.score(nearest, truth).cpu())
        loss, score, fate, truth = map(torch.cat, (losses, scores, fates, truths))
        name = target.score_name
        metrics = {"loss": loss.mean().item(), name: score.mean().item()}
        for kind, word in enumerate(KINDS):
            if (fate == kind).any():
                metrics[f"loss_{word}"] = loss[fate == kind].mean().item()
                metrics[f"{name}_{word}"] = score[fate == kind].mean().item()
        metrics["loss_constant"], guess = target.constant(truth)
        metrics[f"{name}_constant"] = target.score(guess.expand_as(truth), truth).mean().item()
        if copied:
            metrics[f"{name}_copying"] = torch.cat(copied).mean().item()
        return metrics

    def _mosaic(self, objective: MaskedPatch) -> Figure:
        target = objective.target
        images, noise = self.sampled(objective, *self.shown)
        labels = target.labels(images)
        guess = target.guess(objective.predict(images, noise).float())
        answered = labels.clone().scatter(1, noise.ids[:, :, None].expand_as(guess), guess.to(labels.dtype))
        return reconstruction.mosaic(
            images=images,
            noise=noise,
            answer=target.paint(answered),
            truth=target.paint(labels),
            grid=objective.encoder.grid,
        )


def describe(metrics: Mapping[str, float]) -> list[str]:
    """Above or below each baseline, in words."""
    name = next(key.removesuffix("_constant") for key in metrics if key.endswith("_constant") and "loss" not in key)
    is_share = name == "accuracy"

    def show(value: float) -> str:
        return f"{100 * value:.1f} %" if is_share else f"{value:.4f}"

    def judge(good: bool, higher: bool) -> str:
        return f"{'above' if higher else 'below'}, {'better than' if good else 'NO better than'}"

    loss, floor = metrics["loss"], metrics["loss_constant"]
    ignoring = "the entropy of the labels" if is_share else "the variance of the labels"
    lines = [f"loss {loss:.3f}: {judge(loss < floor, loss > floor)} {ignoring}, {floor:.3f} (ignores the image)"]
    verdicts = [loss < floor]
    asked = f"{name}_{KINDS[MASKED]}"
    value = metrics.get(asked, metrics[name])
    what = f"{name.replace('_', ' ')} on masked patches" if asked in metrics else name.replace("_", " ")
    constant = "the most frequent class" if is_share else "the mean patch"
    for key, words in (
        (f"{name}_copying", "copying the nearest uncorrupted patch"),
        (f"{name}_constant", constant),
    ):
        if key in metrics:
            good = value > metrics[key] if is_share else value < metrics[key]
            verdicts.append(good)
            lines.append(f"{what} {show(value)}: {judge(good, value > metrics[key])} {words}, {show(metrics[key])}")
    fates = [f"{word} {show(metrics[f'{name}_{word}'])}" for word in KINDS if f"{name}_{word}" in metrics]
    lines.append(f"{name.replace('_', ' ')} by what became of the patch: {', '.join(fates)}")
    passed = sum(verdicts)
    lines.append(
        "the model has learned to use the context"
        if passed == len(verdicts)
        else f"the model beats {passed} of {len(verdicts)} baselines: it has not learned to use the context yet"
    )
    return lines
