"""Pictures of a model that predicts corrupted or masked patches.

Letters: b images, c channels, n patches of p x q pixels, m masked patches of an image.
"""

from collections.abc import Mapping

import numpy as np
import torch
from einops import rearrange
from matplotlib.axes import Axes
from matplotlib.collections import PatchCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from torch import Tensor

from ssvit.figures.display import displayed, rgb
from ssvit.figures.pictures import collage
from ssvit.figures.style import COLORS, DPI, INK, History, Line, baseline, latest, over_steps, panels, tidy
from ssvit.objectives.masking import KINDS, MASKED, REPLACED, UNCHANGED, Corruption

# By the score: the least loss of a constant prediction, and the constant guess that scores best.
CONSTANTS = {
    "accuracy": ("entropy", "most frequent class"),
    "squared_error": ("variance", "mean patch"),
    "absolute_error": ("mean deviation", "median patch"),
}
GREY = 0.5
FRAME = 1.4  # points


def tiles(images: Mapping[str, Tensor]) -> tuple[Figure, dict[str, list[tuple[int, int]]]]:
    """Images (b, c, h, w), in [0, 1] or uint8, of several kinds side by side, each kind under its title; with room for
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
        (y, x, image) for title, kind in images.items() for (y, x), image in zip(corners[title], rgb(kind), strict=True)
    ]
    figure, axis = collage(placed, size, dots, (0.1 * DPI, 0.45 * DPI, 0.1 * DPI, 0.3 * DPI))
    for title, places in corners.items():
        for x in (x for y, x in places if y == 0):
            axis.text(x + width / 2 - 0.5, -0.5 - 0.05 * DPI / dots, title, ha="center", va="bottom", color=INK)
    return figure, corners


def _legend(figure: Figure, *handles: Patch) -> None:
    """Below the images."""
    figure.legend(
        handles=handles, loc="lower center", ncols=len(handles), frameon=False, fontsize=9, labelcolor=INK,
        borderaxespad=0.3, columnspacing=1.5,
    )  # fmt: skip


def _frame(kind: str, label: str) -> Patch:
    return Patch(facecolor="none", edgecolor=COLORS[kind], linewidth=FRAME, label=label)


def mosaic(*, images: Tensor, noise: Corruption, answer: Tensor, truth: Tensor, grid: tuple[int, int]) -> Figure:
    """Each image (b, c, h, w) beside its corrupted form, the answer and the truth, both (b, n, c, p, q).

    Masked patches are grey; replaced and unchanged ones have a frame in the legend's colour.
    """
    images, answer, truth = displayed(images), displayed(answer), displayed(truth)
    noise = Corruption(*(part.cpu() for part in noise))
    p, q = answer.shape[-2:]
    patches = rearrange(images, "b c (y p) (x q) -> b (y x) c p q", p=p, q=q)
    kinds = torch.full(patches.shape[:2], -1, device=images.device).scatter(1, noise.ids, noise.kind)
    source = torch.arange(patches.shape[1], device=images.device).expand(len(images), -1)
    source = source.scatter(1, noise.ids, torch.where(noise.kind == REPLACED, noise.replacement, noise.ids))
    corrupted = patches.gather(1, source[:, :, None, None, None].expand_as(patches))
    corrupted = torch.where((kinds == MASKED)[:, :, None, None, None], GREY, corrupted)
    corrupted, predicted, true = (
        rearrange(part, "b (y x) c p q -> b c (y p) (x q)", y=grid[0]) for part in (corrupted, answer, truth)
    )
    figure, corners = tiles({"image": images, "corrupted": corrupted, "predicted": predicted, "true": true})

    (axis,) = figure.axes
    shown = axis.images[0].get_array()
    assert shown is not None
    dots = axis.bbox.width / shown.shape[1]
    inset = FRAME * DPI / 72 / dots / 2  # half of a frame's line, in pixels, so that neighbours do not overlap
    for kind in (REPLACED, UNCHANGED):
        rectangles = []
        for image, patch in (kinds == kind).nonzero().tolist():
            y, x = corners["corrupted"][image]
            corner = (x + patch % grid[1] * q - 0.5 + inset, y + patch // grid[1] * p - 0.5 + inset)
            rectangles.append(Rectangle(corner, q - 2 * inset, p - 2 * inset))
        frames = PatchCollection(
            rectangles, joinstyle="miter", facecolor="none", edgecolor=COLORS[KINDS[kind]], linewidth=FRAME
        )
        axis.add_collection(frames)
    handles = {
        MASKED: Patch(facecolor=str(GREY), label="masked"),
        REPLACED: _frame("replaced", "replaced by another"),
        UNCHANGED: _frame("unchanged", "unchanged, to be predicted"),
    }
    _legend(figure, *(handle for kind, handle in handles.items() if (kinds == kind).any()))
    return figure


def masked_mosaic(panels: Mapping[str, Tensor], *, masked_ids: Tensor, grid: tuple[int, int], note: str) -> Figure:
    """The visible patches of the last images, the masked_ids (b, m) grey, beside all images (b, c, h, w) by title.

    note: the legend of the masked patches.
    """
    panels, masked_ids = {title: displayed(panel) for title, panel in panels.items()}, masked_ids.cpu()
    *_, true = panels.values()
    masked = torch.zeros(len(true), grid[0] * grid[1], dtype=torch.bool, device=true.device)
    masked = rearrange(masked.scatter(1, masked_ids, True), "b (y x) -> b 1 y x", y=grid[0])
    p, q = true.shape[2] // grid[0], true.shape[3] // grid[1]
    hidden = masked.repeat_interleave(p, 2).repeat_interleave(q, 3)
    figure, _ = tiles({"visible": torch.where(hidden, GREY, true), **panels})
    _legend(figure, Patch(facecolor=str(GREY), label=note))
    return figure


def learning(history: History, score_name: str) -> Figure:
    """Loss and score over the steps, the baselines as dashed lines."""
    is_share = score_name == "accuracy"
    scale = 100 if is_share else 1
    figure, (left, right) = panels(2, 10, 3.8)
    ignorant, constant = CONSTANTS.get(score_name, CONSTANTS["squared_error"])
    baselines = {"loss_constant": f"{ignorant} of the labels"}
    plot_losses(left, history, baselines, "loss (nats)" if is_share else "loss")
    for kind in ("masked", "replaced", "unchanged"):
        style = Line(color=COLORS[kind], linewidth=2, marker=".")
        over_steps(right, history, f"{score_name}_{kind}", f"{kind} patches", scale, **style)
    baseline(right, latest(history, f"{score_name}_copying", scale), "copying the nearest", "--")
    baseline(right, latest(history, f"{score_name}_constant", scale), constant, ":")
    tidy(right, "step", score_name.replace("_", " ") + (" (%)" if is_share else ""))
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
