"""Pictures of latent prediction: losses and deviations over the steps, and features as colours.

Letters: b images, n patches of p x q pixels, d numbers of a feature.
"""

from collections.abc import Mapping

import torch
from einops import rearrange
from matplotlib.figure import Figure
from torch import Tensor

from ssvit.figures.style import COLORS, INK, History, Line, over_steps, panels, tidy


def learning(history: History, baselines: Mapping[str, str]) -> Figure:
    """The loss and the deviations; baselines: metrics by their labels, which move as the targets do."""
    figure, (losses, deviations) = panels(2, 14, 3.8)
    over_steps(losses, history, "train/patch_loss", "training", color=COLORS["train"], linewidth=1)
    over_steps(losses, history, "loss", "held-out", color=COLORS["model"], linewidth=2, marker=".")
    for (key, words), linestyle in zip(baselines.items(), ("--", ":", "-.", "-"), strict=True):
        over_steps(losses, history, key, words, color=INK, linewidth=1, linestyle=linestyle)
    model, other, third = (
        Line(color=COLORS[name], linewidth=2, marker=".") for name in ("model", "replaced", "unchanged")
    )
    over_steps(deviations, history, "target_std", "targets", **third)
    over_steps(deviations, history, "target_std_images", "targets, of images at one place", **other)
    over_steps(deviations, history, "prediction_std", "predictions", **model)
    for axis, name in ((losses, "loss on masked patches"), (deviations, "standard deviation of a feature")):
        tidy(axis, "step", name, legend=False)
        axis.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False, fontsize=8)  # lines are all over
    return figure


def colors(targets: Tensor, predictions: Tensor, grid: tuple[int, int], patch: tuple[int, int]) -> list[Tensor]:
    """Both, (b, n, d), as images (b, 3, h, w) in [0, 1]: their first three principal components, those of the targets.

    A component's middle 96 % of the targets spans the range of its colour.
    """
    flat = targets.flatten(0, 1).double()
    mean = flat.mean(0)
    axes = torch.linalg.svd(flat - mean, full_matrices=False).Vh[:3]
    axes = axes * axes.sum(1, keepdim=True).sign()  # a sign of an axis that is no chance of the library's
    low, high = ((flat - mean) @ axes.T).quantile(torch.tensor([0.02, 0.98], dtype=torch.double, device=flat.device), 0)
    painted = []
    for features in (targets, predictions):
        values = ((features.double() - mean) @ axes.T - low) / (high - low).clamp(min=1e-12)
        image = rearrange(values.clamp(0, 1).float(), "b (y x) c -> b c y x", y=grid[0])
        painted.append(image.repeat_interleave(patch[0], 2).repeat_interleave(patch[1], 3))
    return painted
