"""Is it learning? Masked patch prediction on held-out images, compared with trivial baselines.

The corruption is fixed, so all evaluations of a run can be compared. Three baselines: the entropy of the labels (the
least loss of a model that ignores the image), the most frequent label, and copying the nearest uncorrupted patch.

Letters: b images, n patches, m corrupted patches an image.
"""

from collections.abc import Mapping
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from ssvit.config.declaration import make
from ssvit.data.batch import EvalTransform
from ssvit.data.source import Source
from ssvit.evaluation import reconstruction_options
from ssvit.evaluation.base import Evaluation, History, with_metrics
from ssvit.evaluation.held_out import HeldOut
from ssvit.figures import reconstruction
from ssvit.models.vit import gather
from ssvit.objectives.base import Objective
from ssvit.objectives.masked_patch import MaskedPatch
from ssvit.objectives.masking import KINDS, MASKED

_SHOWN = 12  # images in a mosaic


def nearest_uncorrupted(at: Tensor, grid: tuple[int, int]) -> Tensor:
    """For each corrupted patch the nearest (Euclidean) one that is not: at (b, m) -> (b, m). ValueError without one."""
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


class Reconstruction(HeldOut):
    """The evaluation of an objective that predicts patches, with the same random choices each time."""

    def __init__(self, *, source: Source, transform: EvalTransform, **given: object) -> None:
        own = make(reconstruction_options.Reconstruction, given)
        super().__init__(source, transform, own)
        self.seed = own.seed

    @property
    def shown(self) -> tuple[Tensor, Tensor]:
        """Images and slots of a few of them, spread over all, since files come sorted by class."""
        images, slots = (torch.cat(parts) for parts in zip(*self.batches, strict=True))
        chosen = torch.linspace(0, len(images) - 1, min(_SHOWN, len(images))).long()
        return images[chosen], slots[chosen]

    def sampled(self, objective: Objective, images: Tensor, slots: Tensor) -> tuple[Tensor, Any]:
        """Images and the objective's random choices about them, on the model's device."""
        device = objective.encoder.mean.device
        noise = objective.sample(slots, seed=self.seed)
        return images.to(device), type(noise)(*(choice.to(device) for choice in noise))


class Prediction(Reconstruction):
    """The evaluation of a `MaskedPatch` model."""

    def __call__(self, objective: MaskedPatch, history: History | None = None) -> Evaluation:
        """Loss and score over all corrupted patches and apart for masked, replaced and unchanged, and baselines.

        Figures: `mosaic`, of some images, and `learning`.
        """
        metrics = self._metrics(objective)
        if history is None:
            return Evaluation(metrics=metrics)
        learning = reconstruction.learning(with_metrics(history, metrics), objective.target.score_name)
        figures = {"mosaic": self._mosaic(objective), "learning": learning}
        return Evaluation(metrics=metrics, lines=describe(metrics), figures=figures)

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
        answer, truth = target.paint(predicted), target.paint(labels)
        return reconstruction.mosaic(images=images, noise=noise, answer=answer, truth=truth, grid=grid)


def describe(metrics: Mapping[str, float]) -> list[str]:
    """Above or below each baseline, in words."""
    name = next(key.removesuffix("_constant") for key in metrics if key.endswith("_constant") and "loss" not in key)
    words, is_share = name.replace("_", " "), name == "accuracy"
    ignorant, constant_guess = reconstruction.CONSTANTS.get(name, reconstruction.CONSTANTS["squared_error"])

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


def conclude(passed: int, baselines: int) -> str:
    """In words, by how many of the baselines are beaten."""
    if passed == baselines:
        return "the model has learned to use the context"
    return f"the model beats {passed} of {baselines} baselines: it has not learned to use the context yet"
