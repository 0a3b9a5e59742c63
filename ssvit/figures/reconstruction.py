"""Pictures of a model at work, as matplotlib figures: drawn by the evaluations, shown in TensorBoard, saved as PNG.

Letters: b images, c channels, n patches of p x q pixels, m corrupted patches an image.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from einops import rearrange
from matplotlib.collections import PatchCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from torch import Tensor

from ssvit.figures.style import COLORS, DPI, INK, over_steps, rgb, tidy
from ssvit.objectives.masking import KINDS, MASKED, REPLACED, UNCHANGED, Corruption

GREY = 0.5
FRAME = 1.4  # points
COLUMNS = ("image", "corrupted", "predicted", "true")


def _assemble(patches: Tensor, grid: tuple[int, int]) -> Tensor:
    """(b, n, c, p, q) -> (b, c, h, w)."""
    return rearrange(patches, "b (y x) c p q -> b c (y p) (x q)", y=grid[0], x=grid[1])


def tiles(panels: Mapping[str, Tensor]) -> tuple[Figure, dict[str, list[tuple[int, int]]]]:
    """Images (b, c, h, w) of several kinds side by side, each kind under its title, and room for a legend.

    Returns the figure and, by title, the row and column of each image's first pixel. All is one picture, of a whole
    number of dots a pixel, since an axis for each image would take a second to draw.
    """
    count, _, height, width = next(iter(panels.values())).shape
    gap = max(1, width // 16)
    blocks = 2 if count > 3 else 1
    rows = -(-count // blocks)
    block_width = len(panels) * (width + gap) + 2 * gap
    tall, wide = rows * (height + gap) - gap, blocks * block_width - 3 * gap
    canvas = np.ones((tall, wide, 3), dtype=np.float32)
    dots = max(1, round(190 / width))
    top, bottom, side = 0.3 * DPI, 0.45 * DPI, 0.1 * DPI
    full_height, full_width = tall * dots + top + bottom, wide * dots + 2 * side
    figure = Figure(figsize=(full_width / DPI, full_height / DPI), dpi=DPI)
    axis = figure.add_axes(
        (side / full_width, bottom / full_height, wide * dots / full_width, tall * dots / full_height)
    )
    axis.set_axis_off()
    corners = {}
    for column, (title, panel) in enumerate(panels.items()):
        corners[title] = [
            (place % rows * (height + gap), place // rows * block_width + column * (width + gap))
            for place in range(count)
        ]
        for (y, x), image in zip(corners[title], rgb(panel), strict=True):
            canvas[y : y + height, x : x + width] = image.clip(0, 1)
            if y == 0:
                axis.text(x + width / 2 - 0.5, -0.5 - 0.05 * DPI / dots, title, ha="center", va="bottom", color=INK)
    axis.imshow(canvas, interpolation="nearest")
    return figure, corners


def _legend(figure: Figure, *handles: Patch) -> None:
    """Below the images."""
    figure.legend(
        handles=handles, loc="lower center", ncols=len(handles), frameon=False, fontsize=9, labelcolor=INK,
        borderaxespad=0.3, columnspacing=1.5,
    )  # fmt: skip


def mosaic(*, images: Tensor, noise: Corruption, answer: Tensor, truth: Tensor, grid: tuple[int, int]) -> Figure:
    """Each image (b, c, h, w) beside its corrupted form, the answer and the truth, both (b, n, c, p, q).

    Masked patches are grey; replaced and unchanged ones have a frame in the legend's colour.
    """
    images = images.float() / (255 if images.dtype == torch.uint8 else 1)
    p, q = answer.shape[-2:]
    patches = rearrange(images, "b c (y p) (x q) -> b (y x) c p q", p=p, q=q)
    fate = torch.full(patches.shape[:2], -1, device=images.device).scatter(1, noise.ids, noise.kind)
    source = torch.arange(patches.shape[1], device=images.device).expand(len(images), -1)
    source = source.scatter(1, noise.ids, torch.where(noise.kind == REPLACED, noise.replacement, noise.ids))
    seen = patches.gather(1, source[:, :, None, None, None].expand_as(patches))
    seen = torch.where((fate == MASKED)[:, :, None, None, None], GREY, seen)
    painted = (_assemble(part, grid) for part in (seen, answer, truth))
    figure, corners = tiles(dict(zip(COLUMNS, (images, *painted), strict=True)))

    (axis,) = figure.axes
    dots = axis.bbox.width / axis.images[0].get_array().shape[1]
    inset = FRAME * DPI / 72 / dots / 2  # half of a frame's line, in pixels, so that neighbours do not overlap
    for kind in (REPLACED, UNCHANGED):
        rectangles = []
        for image, patch in (fate == kind).nonzero().tolist():
            y, x = corners["corrupted"][image]
            corner = (x + patch % grid[1] * q - 0.5 + inset, y + patch // grid[1] * p - 0.5 + inset)
            rectangles.append(Rectangle(corner, q - 2 * inset, p - 2 * inset))
        own = {"facecolor": "none", "edgecolor": COLORS[KINDS[kind]], "linewidth": FRAME}
        axis.add_collection(PatchCollection(rectangles, joinstyle="miter", **own))
    _legend(
        figure,
        Patch(facecolor=str(GREY), label="masked"),
        Patch(facecolor="none", edgecolor=COLORS["replaced"], linewidth=FRAME, label="replaced by another"),
        Patch(facecolor="none", edgecolor=COLORS["unchanged"], linewidth=FRAME, label="unchanged, to be predicted"),
    )
    return figure


def masked_mosaic(panels: Mapping[str, Tensor], *, masked_ids: Tensor, grid: tuple[int, int], note: str) -> Figure:
    """Images (b, c, h, w) in [0, 1] by title, after what is visible of the last of them: patches of masked_ids (b, m)
    are grey. note: what the legend says of them.
    """
    whole = list(panels.values())[-1]
    masked = torch.zeros(len(whole), grid[0] * grid[1], dtype=torch.bool, device=whole.device)
    masked = rearrange(masked.scatter(1, masked_ids, True), "b (y x) -> b 1 y x", y=grid[0])
    p, q = whole.shape[2] // grid[0], whole.shape[3] // grid[1]
    hidden = masked.repeat_interleave(p, 2).repeat_interleave(q, 3)
    figure, _ = tiles({"visible": torch.where(hidden, GREY, whole), **panels})
    _legend(figure, Patch(facecolor=str(GREY), label=note))
    return figure


def learning(history: Sequence[Mapping[str, float]], score_name: str) -> Figure:
    """Loss and score over the steps, the baselines as dashed lines. `history`: rows of metrics."""
    score, words = score_name, score_name.replace("_", " ")
    percent = 100 if score == "accuracy" else 1
    figure = Figure(figsize=(10, 3.8), dpi=DPI, layout="constrained")
    left, right = figure.subplots(1, 2)

    _losses(left, history)
    entropy = "entropy of the labels" if score == "accuracy" else "variance of the labels"
    _baseline(left, history, "loss_constant", entropy, "--")
    for fate in ("masked", "replaced", "unchanged"):
        own = {"color": COLORS[fate], "linewidth": 2, "marker": "."}
        over_steps(right, history, f"{score}_{fate}", f"{fate} patches", percent, **own)
    _baseline(right, history, f"{score}_copying", "copying the nearest", "--", percent)
    constant = "most frequent class" if percent == 100 else "mean patch"
    _baseline(right, history, f"{score}_constant", constant, ":", percent)
    left.set_ylabel("loss" if percent == 1 else "loss (nats)")
    right.set_ylabel(words if percent == 1 else f"{words} (%)")
    for axis in (left, right):
        tidy(axis, "step")
    return figure


def learning_of_loss(history: Sequence[Mapping[str, float]], baselines: Mapping[str, str], name: str) -> Figure:
    """The loss, of some name, over the steps, and the metrics of its baselines, by their words, as dashed lines."""
    figure = Figure(figsize=(6, 3.8), dpi=DPI, layout="constrained")
    axis = figure.subplots()
    _losses(axis, history)
    for (key, words), style in zip(baselines.items(), ("--", ":"), strict=True):
        _baseline(axis, history, key, words, style)
    axis.set_ylabel(name)
    tidy(axis, "step")
    return figure


def _losses(axis: Any, history: Sequence[Mapping[str, float]]) -> None:
    over_steps(axis, history, "train/loss", "training", color=COLORS["train"], linewidth=1)
    over_steps(axis, history, "loss", "held-out", color=COLORS["model"], linewidth=2, marker=".")


def _baseline(
    axis: Any, history: Sequence[Mapping[str, float]], key: str, label: str, style: str, scale: float = 1
) -> None:
    """A dashed line at the last value of a metric."""
    values = [row[key] * scale for row in history if row.get(key) is not None]
    if values:
        axis.axhline(values[-1], color=INK, linewidth=1, linestyle=style, label=f"{label}: {values[-1]:.3g}")
