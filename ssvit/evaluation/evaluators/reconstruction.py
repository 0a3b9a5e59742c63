"""Compute the baselines of predicted patches, and compare a model with them.

Shapes use b images, n patches, m corrupted patches of an image.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from ssvit.evaluation.statistics import Interval, verdict


def nearest_uncorrupted(at: Tensor, grid: tuple[int, int]) -> Tensor:
    """Return the nearest uncorrupted patch of each corrupted one, by Euclidean distance on the grid.

    Args:
        at: Indices of the corrupted patches, (b, m).
        grid: Rows and columns of patches, more than m together.

    Returns:
        Indices of uncorrupted patches, (b, m).
    """
    n = grid[0] * grid[1]
    indices = torch.arange(n, device=at.device)
    rows, columns = indices // grid[1], indices % grid[1]
    distance = (rows[:, None] - rows).square() + (columns[:, None] - columns).square()
    corrupted = torch.zeros(len(at), n, dtype=torch.bool, device=at.device).scatter(1, at, True)
    # Ties are broken by the index of the patch, so that the result is the same on all devices.
    cost = distance[at] * n + indices
    return cost.masked_fill(corrupted[:, None, :], torch.iinfo(torch.int64).max).argmin(-1)


def compare_with_baselines(name: str, value: str, baselines: Mapping[str, tuple[str, float]]) -> str:
    """Return a line with a value of the model, its baselines, and whether it is better than each of them.

    Args:
        name: What is measured.
        value: The value.
        baselines: For each baseline by its description, its value and the difference, positive if the model is better.
    """
    comparisons = (
        f"{verdict(Interval.around(difference), tested=False)} {words} ({baseline})"
        for words, (baseline, difference) in baselines.items()
    )
    return f"{name} {value}: {', '.join(comparisons)}"


def compare_losses(metrics: Mapping[str, float], baselines: Mapping[str, str]) -> list[str]:
    """Return lines that compare the loss on masked patches with baselines, and the conclusion.

    Args:
        metrics: Metrics, including "loss" and the baselines.
        baselines: Descriptions of the baselines by metric.
    """
    gains = {name: metrics[name] - metrics["loss"] for name in baselines}
    values = {words: (f"{metrics[name]:.3f}", gains[name]) for name, words in baselines.items()}
    return [
        compare_with_baselines("loss on masked patches", f"{metrics['loss']:.3f}", values),
        conclude([*gains.values()]),
    ]


def conclude(gains: list[float]) -> str:
    """Return a sentence on how many baselines the model beats, from its differences, positive if it is better."""
    better = [gain > 0 for gain in gains]
    if all(better):
        return "the model has learned to use the context: it is better than all baselines"
    return f"the model is better than {sum(better)} of {len(better)} baselines: it has not learned to use the context"
