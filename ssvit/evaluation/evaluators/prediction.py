"""Evaluate masked patch prediction on held-out images, compared with trivial baselines.

The corruption is fixed, so that all evaluations of a run are comparable. Three baselines: the entropy of the labels
(the minimum loss of a model that ignores the image), the most frequent label, and a copy of the nearest uncorrupted
patch.
"""

from collections.abc import Mapping

import torch
from einops import rearrange

from ssvit.evaluation.evaluators.base import Shown
from ssvit.evaluation.evaluators.held_out import HeldOut
from ssvit.evaluation.evaluators.reconstruction import compare_with_baselines, conclude, nearest_uncorrupted
from ssvit.figures.pictures import GREY, Mosaic
from ssvit.figures.plot import History, Panel, Plot, curve, level, losses
from ssvit.models.block import gather_tokens
from ssvit.objectives.masked_patch import CORRUPTION_TYPES, MASKED, REPLACED, MaskedPatch

# For each score: the minimum loss of a constant prediction, and the constant prediction of the best score.
_CONSTANTS = {
    "accuracy": ("entropy", "most frequent class"),
    "squared_error": ("variance", "mean patch"),
    "absolute_error": ("mean deviation", "median patch"),
}


class Prediction(HeldOut):
    """Evaluate a `MaskedPatch` model."""

    def show(self, objective: MaskedPatch, metrics: Mapping[str, float], history: History) -> Shown:
        """Return the figures `mosaic`, predictions for some images, and `learning`."""
        learning = _learning(history, objective.target.score_name)
        return describe(metrics), {"mosaic": self._mosaic(objective), "learning": learning}

    def measure(self, objective: MaskedPatch) -> dict[str, float]:
        """Return loss and score of the model over all corrupted patches and by their type, and of the baselines."""
        target, grid = objective.target, objective.encoder.grid
        parts, copied = [], []
        for images, noise in (self.sampled(objective, *batch) for batch in self.batches):
            labels = target.labels(images)
            truth, prediction = gather_tokens(labels, noise.ids), objective.predict(images, noise).float()
            loss, score = target.losses(prediction, truth).double(), target.score(target.guess(prediction), truth)
            parts.append([part.cpu() for part in (loss, score, noise.types, truth)])
            if noise.ids.shape[1] < grid[0] * grid[1]:
                nearest = gather_tokens(labels, nearest_uncorrupted(noise.ids, grid))
                copied.append(target.score(nearest, truth).cpu())
        loss, score, types, truth = map(torch.cat, zip(*parts, strict=True))
        name = target.score_name
        metrics = {"loss": loss.mean().item(), name: score.mean().item()}
        for corruption_type, word in enumerate(CORRUPTION_TYPES):
            if (types == corruption_type).any():
                metrics[f"loss_{word}"] = loss[types == corruption_type].mean().item()
                metrics[f"{name}_{word}"] = score[types == corruption_type].mean().item()
        metrics["loss_constant"], guess = target.constant(truth)
        metrics[f"{name}_constant"] = target.score(guess.expand_as(truth), truth).mean().item()
        if copied:
            metrics[f"{name}_copying"] = torch.cat(copied).mean().item()
        return metrics

    def _mosaic(self, objective: MaskedPatch) -> Mosaic:
        target, grid = objective.target, objective.encoder.grid
        images, noise = self.sampled(objective, *self.shown)
        labels = target.labels(images)
        guess = target.guess(objective.predict(images, noise).float())
        predicted = labels.scatter(1, noise.ids[:, :, None].expand_as(guess), guess.to(labels.dtype))
        images, *painted = (self.display(shown) for shown in (images, *map(target.paint, (predicted, labels))))
        ids, types, replacement = (part.cpu() for part in (noise.ids, noise.types, noise.replacement))
        p, q = painted[0].shape[-2:]
        patches = rearrange(images, "b c (y p) (x q) -> b (y x) c p q", p=p, q=q)
        type_of_patch = torch.full(patches.shape[:2], -1).scatter(1, ids, types)
        source = torch.arange(patches.shape[1]).expand(len(images), -1)
        source = source.scatter(1, ids, torch.where(types == REPLACED, replacement, ids))
        corrupted = patches.gather(1, source[:, :, None, None, None].expand_as(patches))
        corrupted = torch.where((type_of_patch == MASKED)[:, :, None, None, None], GREY, corrupted)
        columns = (rearrange(part, "b (y x) c p q -> b c (y p) (x q)", y=grid[0]) for part in (corrupted, *painted))
        names = ("corrupted", "predicted", "true")
        return Mosaic({"image": images, **dict(zip(names, columns, strict=True))}, {"masked": str(GREY)})


def _learning(history: History, score_name: str) -> Plot:
    """Plot loss and score over the steps, next to the baselines."""
    is_share = score_name == "accuracy"
    scale = 100 if is_share else 1
    ignorant, constant = _CONSTANTS.get(score_name, _CONSTANTS["squared_error"])
    loss = losses(history, {"loss_constant": f"{ignorant} of the labels"}, "loss (nats)" if is_share else "loss")
    curves = [
        curve(history, f"{score_name}_{corruption_type}", f"{corruption_type} patches", corruption_type, scale)
        for corruption_type in CORRUPTION_TYPES
    ]
    levels = (
        level(history, f"{score_name}_copying", "copying the nearest", "--", scale),
        level(history, f"{score_name}_constant", constant, ":", scale),
    )
    score = Panel(score_name.replace("_", " ") + (" (%)" if is_share else ""), curves, levels)
    return Plot((loss, score), (10, 3.8))


def describe(metrics: Mapping[str, float]) -> list[str]:
    """Return lines that compare the score with each baseline, and the conclusion from loss and score."""
    name = next(key.removesuffix("_constant") for key in metrics if key.endswith("_constant") and "loss" not in key)
    words, is_share = name.replace("_", " "), name == "accuracy"
    _, constant = _CONSTANTS.get(name, _CONSTANTS["squared_error"])

    def show(value: float) -> str:
        return f"{100 * value:.1f} %" if is_share else f"{value:.4f}"

    masked = f"{name}_{CORRUPTION_TYPES[MASKED]}"
    value, patches = (metrics[masked], "masked patches") if masked in metrics else (metrics[name], "corrupted patches")
    baselines = {
        description: (show(baseline), (value - baseline) * (1 if is_share else -1))
        for key, description in (("copying", "copying the nearest uncorrupted patch"), ("constant", f"the {constant}"))
        if (baseline := metrics.get(f"{name}_{key}")) is not None
    }
    return [
        compare_with_baselines(f"{words} on {patches}", show(value), baselines),
        conclude([metrics["loss_constant"] - metrics["loss"], *(gain for _, gain in baselines.values())]),
    ]
