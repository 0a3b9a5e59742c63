"""Pictures of a model that predicts masked patches.

Letters: b images, m masked patches of an image.
"""

from collections.abc import Mapping

import numpy as np
import torch
from einops import rearrange
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from torch import Tensor

from ssvit.figures.pictures import collage
from ssvit.figures.style import COLORS, DPI, INK, History, baseline, latest, over_steps, panels, tidy

GREY = 0.5  # of masked patches


def tiles(images: Mapping[str, Tensor]) -> tuple[Figure, dict[str, list[tuple[int, int]]]]:
    """Images (b, 3, h, w) in [0, 1] of several kinds side by side, each kind under its title; with room for
    a legend.

    Returns the figure and, by title, the row and column of each image's first pixel.
    """
    count, _, height, width = next(iter(images.values())).shape
    gap = max(1, width // 16)
    blocks = 2 if count > 3 else 1
    rows = -(-count // blocks)
    block_width = len(images) * (width + gap) + 2 * gap
    size = rows * (height + gap) - gap, blocks * block_width - 3 * gap
    dots = max(1, round(190 / width))
    ys, xs = np.arange(count) % rows * (height + gap), np.arange(count) // rows * block_width
    corners = {
        title: list(zip(ys.tolist(), (xs + column * (width + gap)).tolist(), strict=True))
        for column, title in enumerate(images)
    }
    placed = [
        (y, x, image)
        for title, kind in images.items()
        for (y, x), image in zip(corners[title], kind.movedim(1, -1).numpy(), strict=True)
    ]
    figure, axis = collage(placed, size, dots, (0.1 * DPI, 0.45 * DPI, 0.1 * DPI, 0.3 * DPI))
    for title, places in corners.items():
        for x in (x for y, x in places if y == 0):
            axis.text(x + width / 2 - 0.5, -0.5 - 0.05 * DPI / dots, title, ha="center", va="bottom", color=INK)
    return figure, corners


def legend(figure: Figure, *handles: Patch) -> None:
    """Below the images."""
    figure.legend(
        handles=handles, loc="lower center", ncols=len(handles), frameon=False, fontsize=9, labelcolor=INK,
        borderaxespad=0.3, columnspacing=1.5,
    )  # fmt: skip


def masked_mosaic(panels: Mapping[str, Tensor], *, masked_ids: Tensor, grid: tuple[int, int], note: str) -> Figure:
    """The visible patches of the last images, the masked_ids (b, m) grey, beside all images (b, 3, h, w) by title.

    note: the legend of the masked patches.
    """
    masked_ids = masked_ids.cpu()
    *_, true = panels.values()
    masked = torch.zeros(len(true), grid[0] * grid[1], dtype=torch.bool, device=true.device)
    masked = rearrange(masked.scatter(1, masked_ids, True), "b (y x) -> b 1 y x", y=grid[0])
    p, q = true.shape[2] // grid[0], true.shape[3] // grid[1]
    hidden = masked.repeat_interleave(p, 2).repeat_interleave(q, 3)
    figure, _ = tiles({"visible": torch.where(hidden, GREY, true), **panels})
    legend(figure, Patch(facecolor=str(GREY), label=note))
    return figure


def learning_of_loss(history: History, baselines: Mapping[str, str], name: str) -> Figure:
    """The loss over the steps; name: its label. baselines: metrics by their labels, plotted as dashed lines."""
    figure, (axis,) = panels(1, 6, 3.8)
    plot_losses(axis, history, baselines, name)
    return figure


def plot_losses(axis: Axes, history: History, baselines: Mapping[str, str], name: str) -> None:
    """The loss in training and on held-out images over the steps, and baselines."""
    over_steps(axis, history, "train/loss", "training", color=COLORS["train"], linewidth=1, zorder=2.5)
    over_steps(axis, history, "loss", "held-out", color=COLORS["model"], linewidth=2, marker=".")
    for (key, words), linestyle in zip(baselines.items(), ("--", ":"), strict=False):
        baseline(axis, latest(history, key), words, linestyle)
    tidy(axis, "step", name)
