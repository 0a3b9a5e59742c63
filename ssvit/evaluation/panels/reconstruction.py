"""Define the base class of evaluations of predicted patches, with fixed corruption, and their baselines.

Shapes use b images, n patches, m corrupted patches of an image.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ssvit.data.batch import EvalTransform
from ssvit.data.sources.base import Source
from ssvit.evaluation.panels import reconstruction_options
from ssvit.evaluation.panels.held_out import HeldOut
from ssvit.objectives.base import Objective

_SHOWN = 12  # images in a mosaic


def nearest_uncorrupted(at: Tensor, grid: tuple[int, int]) -> Tensor:
    """Return the nearest uncorrupted patch of each corrupted one, by Euclidean distance on the grid.

    Args:
        at: Indices of the corrupted patches, (b, m).
        grid: Rows and columns of patches.

    Returns:
        Indices of uncorrupted patches, (b, m).

    Raises:
        ValueError: If all patches are corrupted.
    """
    n = grid[0] * grid[1]
    if at.shape[1] >= n:
        raise ValueError("every patch is corrupted, so there is none to copy")
    place = torch.arange(n, device=at.device)
    rows, columns = place // grid[1], place % grid[1]
    distance = (rows[:, None] - rows).square() + (columns[:, None] - columns).square()
    corrupted = torch.zeros(len(at), n, dtype=torch.bool, device=at.device).scatter(1, at, True)
    # Ties are broken by the index of the patch, so that the result is the same on all devices.
    cost = distance[at] * n + place
    return cost.masked_fill(corrupted[:, None, :], torch.iinfo(torch.int64).max).argmin(-1)


class Reconstruction(HeldOut):
    """Evaluate an objective that predicts patches, with the same random choices in each evaluation."""

    def __init__(
        self, options: reconstruction_options.Reconstruction, *, source: Source, transform: EvalTransform
    ) -> None:
        super().__init__(options, source=source, transform=transform)
        self.seed = options.seed

    @property
    def shown(self) -> tuple[Tensor, Tensor]:
        """Return images and slots for the mosaic, spread evenly over the batches because files are sorted by class."""
        images, slots = (torch.cat(parts) for parts in zip(*self.batches, strict=True))
        chosen = torch.linspace(0, len(images) - 1, min(_SHOWN, len(images))).long()
        return images[chosen], slots[chosen]

    def sampled(self, objective: Objective, images: Tensor, slots: Tensor) -> tuple[Tensor, Any]:
        """Return images and the random choices of the objective for them, on the device of the model."""
        device = objective.encoder.mean.device
        noise = objective.sample(slots, seed=self.seed)
        return images.to(device), type(noise)(*(choice.to(device) for choice in noise))


def beside(value: float, baseline: float, *, higher: bool = False) -> str:
    """Return text on which side of a baseline a value is, and whether that is better.

    Args:
        value: Value of the model.
        baseline: Value of the baseline.
        higher: Whether higher is better.
    """
    better = value > baseline if higher else value < baseline
    return f"{'above' if value > baseline else 'below'}, {'better than' if better else 'NO better than'}"


def describe_losses(metrics: Mapping[str, float], baselines: Mapping[str, str], digits: int) -> list[str]:
    """Return lines that compare the loss with each baseline.

    Args:
        metrics: Metrics, including "loss" and the baselines.
        baselines: Descriptions of the baselines by metric.
        digits: Number of decimals.
    """
    loss = metrics["loss"]
    return [
        f"loss on masked patches {loss:.{digits}f}: {beside(loss, metrics[name])} {words}, {metrics[name]:.{digits}f}"
        for name, words in baselines.items()
    ]


def conclude(passed: int, baselines: int) -> str:
    """Return a sentence on how many baselines the model beats."""
    if passed == baselines:
        return "the model has learned to use the context"
    return f"the model beats {passed} of {baselines} baselines: it has not learned to use the context yet"
