"""Is it learning? Masked patch prediction on held-out images, compared with trivial baselines.

The corruption is fixed, so all evaluations of a run can be compared. Three baselines: the entropy of the labels (the
least loss of a model that ignores the image), the most frequent label, and copying the nearest uncorrupted patch.
"""

from collections.abc import Mapping

import torch
from matplotlib.figure import Figure

from ssvit.evaluation.panels.base import Evaluation, History, with_metrics
from ssvit.evaluation.panels.reconstruction import Reconstruction, conclude, nearest_uncorrupted
from ssvit.figures import prediction as figures
from ssvit.models.block import gather
from ssvit.objectives.masked_patch import MaskedPatch
from ssvit.objectives.masking import KINDS, MASKED


class Prediction(Reconstruction):
    """The evaluation of a `MaskedPatch` model."""

    def __call__(self, objective: MaskedPatch, history: History | None = None) -> Evaluation:
        """Loss and score over all corrupted patches and apart for masked, replaced and unchanged, and baselines.

        Figures: `mosaic`, of some images, and `learning`.
        """
        metrics = self._metrics(objective)
        if history is None:
            return Evaluation(metrics=metrics)
        learning = figures.learning(with_metrics(history, metrics), objective.target.score_name)
        pictures = {"mosaic": self._mosaic(objective), "learning": learning}
        return Evaluation(metrics=metrics, lines=describe(metrics), figures=pictures)

    def _metrics(self, objective: MaskedPatch) -> dict[str, float]:
        target, grid = objective.target, objective.encoder.grid
        parts, copied = [], []
        for images, noise in (self.sampled(objective, *batch) for batch in self.batches):
            labels = target.labels(images)
            truth, prediction = gather(labels, noise.ids), objective.predict(images, noise).float()
            loss, score = target.losses(prediction, truth).double(), target.score(target.guess(prediction), truth)
            parts.append([part.cpu() for part in (loss, score, noise.kind, truth)])
            if noise.ids.shape[1] < grid[0] * grid[1]:
                nearest = gather(labels, nearest_uncorrupted(noise.ids, grid))
                copied.append(target.score(nearest, truth).cpu())
        loss, score, kinds, truth = map(torch.cat, zip(*parts, strict=True))
        name = target.score_name
        metrics = {"loss": loss.mean().item(), name: score.mean().item()}
        for kind, word in enumerate(KINDS):
            if (kinds == kind).any():
                metrics[f"loss_{word}"] = loss[kinds == kind].mean().item()
                metrics[f"{name}_{word}"] = score[kinds == kind].mean().item()
        metrics["loss_constant"], guess = target.constant(truth)
        metrics[f"{name}_constant"] = target.score(guess.expand_as(truth), truth).mean().item()
        if copied:
            metrics[f"{name}_copying"] = torch.cat(copied).mean().item()
        return metrics

    def _mosaic(self, objective: MaskedPatch) -> Figure:
        target, grid = objective.target, objective.encoder.grid
        images, noise = self.sampled(objective, *self.shown)
        labels = target.labels(images)
        guess = target.guess(objective.predict(images, noise).float())
        predicted = labels.scatter(1, noise.ids[:, :, None].expand_as(guess), guess.to(labels.dtype))
        painted = (target.paint(values) for values in (predicted, labels))
        images, answer, truth = (self.display(shown) for shown in (images, *painted))
        return figures.mosaic(images=images, noise=noise, answer=answer, truth=truth, grid=grid)


def describe(metrics: Mapping[str, float]) -> list[str]:
    """Above or below each baseline, in words."""
    name = next(key.removesuffix("_constant") for key in metrics if key.endswith("_constant") and "loss" not in key)
    words, is_share = name.replace("_", " "), name == "accuracy"
    ignorant, constant_guess = figures.CONSTANTS.get(name, figures.CONSTANTS["squared_error"])

    def show(value: float) -> str:
        return f"{100 * value:.1f} %" if is_share else f"{value:.4f}"

    def compare(better: bool, higher: bool) -> str:
        return f"{'above' if higher else 'below'}, {'better than' if better else 'NO better than'}"

    loss, constant = metrics["loss"], metrics["loss_constant"]
    better = [loss < constant]
    side = compare(better[0], loss > constant)
    lines = [f"loss {loss:.3f}: {side} the {ignorant} of the labels, {constant:.3f} (ignores the image)"]
    masked = f"{name}_{KINDS[MASKED]}"
    value, what = (metrics[masked], f"{words} on masked patches") if masked in metrics else (metrics[name], words)
    baselines = {
        f"{name}_copying": "copying the nearest uncorrupted patch",
        f"{name}_constant": f"the {constant_guess}",
    }
    for key, action in baselines.items():
        if (baseline := metrics.get(key)) is not None:
            better.append(value > baseline if is_share else value < baseline)
            side = compare(better[-1], value > baseline)
            lines.append(f"{what} {show(value)}: {side} {action}, {show(baseline)}")
    kinds = [f"{kind} {show(metrics[f'{name}_{kind}'])}" for kind in KINDS if f"{name}_{kind}" in metrics]
    return [*lines, f"{words} by what became of the patch: {', '.join(kinds)}", conclude(sum(better), len(better))]
