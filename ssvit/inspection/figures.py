"""Pictures of a model at work, as matplotlib figures: drawn by the evaluations, shown in TensorBoard, saved as PNG.

Letters: b images, c channels, n patches of p x q pixels, m corrupted patches an image.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from einops import rearrange
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from torch import Tensor

from ssvit.masking import KEPT, MASKED, REPLACED, Corruption

INK = "#222222"
COLORS = {"model": "#1b6ca8", "train": "#9db4c4", "masked": "#1b6ca8", "replaced": "#e07b00", "kept": "#3a9d5d"}
GREY = 0.5


def _rgb(images: Tensor) -> np.ndarray:
    """(b, c, h, w) in [0, 1] -> (b, h, w, 3): three channels as they are, any other number as its mean in grey."""
    images = images.float().cpu()
    if images.shape[1] != 3:
        images = images.mean(1, keepdim=True).expand(-1, 3, -1, -1)
    return rearrange(images, "b c h w -> b h w c").numpy()


def _assemble(patches: Tensor, grid: tuple[int, int]) -> Tensor:
    """(b, n, c, p, q) -> (b, c, h, w)."""
    return rearrange(patches, "b (y x) c p q -> b c (y p) (x q)", y=grid[0], x=grid[1])


def mosaic(*, images: Tensor, draw: Corruption, answer: Tensor, truth: Tensor, grid: tuple[int, int]) -> Figure:
    """Each image (b, c, h, w) beside its corrupted form, the answer and the truth, both (b, n, c, p, q).

    Masked patches are grey; replaced and kept ones have a frame in the colour of the legend.
    """
    images = images.float() / (255 if images.dtype == torch.uint8 else 1)
    p, q = answer.shape[-2:]
    patches = rearrange(images, "b c (y p) (x q) -> b (y x) c p q", p=p, q=q)
    fate = torch.full(patches.shape[:2], -1, device=images.device).scatter(1, draw.at, draw.fate)
    source = torch.arange(patches.shape[1], device=images.device).expand(len(images), -1)
    source = source.scatter(1, draw.at, torch.where(draw.fate == REPLACED, draw.other, draw.at))
    seen = patches.gather(1, source[:, :, None, None, None].expand_as(patches))
    seen = torch.where((fate == MASKED)[:, :, None, None, None], GREY, seen)

    columns = ("image", "corrupted", "predicted", "true")
    panels = [_rgb(part) for part in (images, *(_assemble(part, grid) for part in (seen, answer, truth)))]
    blocks = 2 if len(images) > 3 else 1
    rows = -(-len(images) // blocks)
    height, width = images.shape[2:]
    figure = Figure(figsize=(1.35 * (4 * blocks + 0.3 * (blocks - 1)), 1.35 * rows * height / width + 0.75), dpi=110)
    spacing = [part for block in range(blocks) for part in [*([0.18] if block else []), 1, 1, 1, 1]]
    axes = figure.add_gridspec(
        rows, len(spacing), width_ratios=spacing, left=0.01, right=0.99, top=1 - 0.32 / figure.get_figheight(),
        bottom=0.36 / figure.get_figheight(), wspace=0.06, hspace=0.06,
    )  # fmt: skip
    for place in range(len(images)):
        row, block = place % rows, place // rows
        for column, (title, panel) in enumerate(zip(columns, panels, strict=True)):
            axis = figure.add_subplot(axes[row, block * 5 + column])
            axis.imshow(panel[place].clip(0, 1), interpolation="nearest")
            axis.set_axis_off()
            if row == 0:
                axis.set_title(title, fontsize=10, color=INK, pad=4)
            if title == "corrupted":
                for patch, kind in enumerate(fate[place].tolist()):
                    if kind in (REPLACED, KEPT):
                        corner = (patch % grid[1] * q - 0.5, patch // grid[1] * p - 0.5)
                        color = COLORS["replaced" if kind == REPLACED else "kept"]
                        axis.add_patch(Rectangle(corner, q, p, fill=False, edgecolor=color, linewidth=1.1))
    figure.legend(
        handles=[
            Patch(facecolor=str(GREY), label="masked"),
            Patch(facecolor="none", edgecolor=COLORS["replaced"], label="replaced by another patch"),
            Patch(facecolor="none", edgecolor=COLORS["kept"], label="kept, still to be predicted"),
        ],
        loc="lower center", ncols=3, frameon=False, fontsize=9, labelcolor=INK, borderaxespad=0.2,
    )  # fmt: skip
    return figure


def learning(history: Sequence[Mapping[str, float]], score_name: str) -> Figure:
    """Loss and score over the steps, with the baselines as dashed lines. `history`: rows of metrics, each with "step"."""
    score = score_name.replace(" ", "_")
    percent = 100 if score == "accuracy" else 1
    figure = Figure(figsize=(10, 3.8), dpi=110, layout="constrained")
    left, right = figure.subplots(1, 2)

    def line(axis: Any, key: str, label: str, color: str, scale: float = 1, **style: Any) -> None:
        points = [(row["step"], row[key] * scale) for row in history if key in row]
        if points:
            axis.plot(*zip(*points, strict=True), label=label, color=color, **style)

    def floor(axis: Any, key: str, label: str, style: str, scale: float = 1) -> None:
        values = [row[key] * scale for row in history if key in row]
        if values:
            axis.axhline(values[-1], color=INK, linewidth=1, linestyle=style, label=f"{label}: {values[-1]:.3g}")

    line(left, "train/loss", "training", COLORS["train"], linewidth=1)
    line(left, "held_out/loss", "held-out", COLORS["model"], linewidth=2, marker=".")
    entropy = "entropy of the labels" if score == "accuracy" else "variance of the labels"
    floor(left, "held_out/loss_constant", entropy, "--")
    for fate in ("masked", "replaced", "kept"):
        line(right, f"held_out/{score}_{fate}", f"{fate} patches", COLORS[fate], percent, linewidth=2, marker=".")
    floor(right, f"held_out/{score}_copying", "copying the nearest", "--", percent)
    floor(right, f"held_out/{score}_constant", "most frequent class" if percent == 100 else "mean patch", ":", percent)
    left.set_ylabel("loss" if percent == 1 else "loss (nats)")
    right.set_ylabel(score_name if percent == 1 else f"{score_name} (%)")
    for axis in (left, right):
        axis.set_xlabel("step")
        axis.set_ylim(bottom=0)
        axis.grid(color="#e6e6e6", linewidth=0.8)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, fontsize=8)
    return figure
