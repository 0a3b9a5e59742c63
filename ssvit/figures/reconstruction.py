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


def mosaic(*, images: Tensor, noise: Corruption, answer: Tensor, truth: Tensor, grid: tuple[int, int]) -> Figure:
    """Each image (b, c, h, w) beside its corrupted form, the answer and the truth, both (b, n, c, p, q).

    Masked patches are grey; replaced and unchanged ones have a frame in the legend's colour. All is one picture, of
    a whole number of dots a pixel, since an axis for each image would take a second to draw.
    """
    images = images.float() / (255 if images.dtype == torch.uint8 else 1)
    p, q = answer.shape[-2:]
    patches = rearrange(images, "b c (y p) (x q) -> b (y x) c p q", p=p, q=q)
    fate = torch.full(patches.shape[:2], -1, device=images.device).scatter(1, noise.ids, noise.kind)
    source = torch.arange(patches.shape[1], device=images.device).expand(len(images), -1)
    source = source.scatter(1, noise.ids, torch.where(noise.kind == REPLACED, noise.replacement, noise.ids))
    seen = patches.gather(1, source[:, :, None, None, None].expand_as(patches))
    seen = torch.where((fate == MASKED)[:, :, None, None, None], GREY, seen)
    panels = [rgb(part) for part in (images, *(_assemble(part, grid) for part in (seen, answer, truth)))]
    fates = fate.tolist()

    height, width = images.shape[2:]
    gap = max(1, width // 16)
    blocks = 2 if len(images) > 3 else 1
    rows = -(-len(images) // blocks)
    tall, wide = rows * (height + gap) - gap, blocks * (4 * (width + gap) + 2 * gap) - 3 * gap
    canvas = np.ones((tall, wide, 3), dtype=np.float32)
    dots = max(1, round(190 / width))
    top, bottom, side = 0.3 * DPI, 0.45 * DPI, 0.1 * DPI
    full_height, full_width = tall * dots + top + bottom, wide * dots + 2 * side
    figure = Figure(figsize=(full_width / DPI, full_height / DPI), dpi=DPI)
    axis = figure.add_axes(
        (side / full_width, bottom / full_height, wide * dots / full_width, tall * dots / full_height)
    )
    axis.set_axis_off()
    frames: dict[str, list[Rectangle]] = {"replaced": [], "unchanged": []}
    inset = FRAME * DPI / 72 / dots / 2  # half of a frame's line, in pixels, so that neighbours do not overlap
    for place in range(len(images)):
        row, block = place % rows, place // rows
        y = row * (height + gap)
        for column, (title, panel) in enumerate(zip(COLUMNS, panels, strict=True)):
            x = block * (4 * (width + gap) + 2 * gap) + column * (width + gap)
            canvas[y : y + height, x : x + width] = panel[place].clip(0, 1)
            if row == 0:
                axis.text(x + width / 2 - 0.5, -0.5 - 0.05 * DPI / dots, title, ha="center", va="bottom", color=INK)
            if title == "corrupted":
                for patch, kind in enumerate(fates[place]):
                    if kind in (REPLACED, UNCHANGED):
                        corner = (x + patch % grid[1] * q - 0.5 + inset, y + patch // grid[1] * p - 0.5 + inset)
                        frames[KINDS[kind]].append(Rectangle(corner, q - 2 * inset, p - 2 * inset))
    axis.imshow(canvas, interpolation="nearest")
    for name, rectangles in frames.items():
        axis.add_collection(
            PatchCollection(rectangles, facecolor="none", edgecolor=COLORS[name], linewidth=FRAME, joinstyle="miter")
        )
    figure.legend(
        handles=[
            Patch(facecolor=str(GREY), label="masked"),
            Patch(facecolor="none", edgecolor=COLORS["replaced"], linewidth=FRAME, label="replaced by another"),
            Patch(facecolor="none", edgecolor=COLORS["unchanged"], linewidth=FRAME, label="unchanged, to be predicted"),
        ],
        loc="lower center", ncols=3, frameon=False, fontsize=9, labelcolor=INK, borderaxespad=0.3, columnspacing=1.5,
    )  # fmt: skip
    return figure


def learning(history: Sequence[Mapping[str, float]], score_name: str) -> Figure:
    """Loss and score over the steps, the baselines as dashed lines. `history`: rows of metrics."""
    score, words = score_name, score_name.replace("_", " ")
    percent = 100 if score == "accuracy" else 1
    figure = Figure(figsize=(10, 3.8), dpi=DPI, layout="constrained")
    left, right = figure.subplots(1, 2)

    def floor(axis: Any, key: str, label: str, style: str, scale: float = 1) -> None:
        values = [row[key] * scale for row in history if row.get(key) is not None]
        if values:
            axis.axhline(values[-1], color=INK, linewidth=1, linestyle=style, label=f"{label}: {values[-1]:.3g}")

    over_steps(left, history, "train/loss", "training", color=COLORS["train"], linewidth=1)
    over_steps(left, history, "loss", "held-out", color=COLORS["model"], linewidth=2, marker=".")
    entropy = "entropy of the labels" if score == "accuracy" else "variance of the labels"
    floor(left, "loss_constant", entropy, "--")
    for fate in ("masked", "replaced", "unchanged"):
        own = {"color": COLORS[fate], "linewidth": 2, "marker": "."}
        over_steps(right, history, f"{score}_{fate}", f"{fate} patches", percent, **own)
    floor(right, f"{score}_copying", "copying the nearest", "--", percent)
    floor(right, f"{score}_constant", "most frequent class" if percent == 100 else "mean patch", ":", percent)
    left.set_ylabel("loss" if percent == 1 else "loss (nats)")
    right.set_ylabel(words if percent == 1 else f"{words} (%)")
    for axis in (left, right):
        tidy(axis, "step")
    return figure
