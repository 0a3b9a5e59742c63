"""Pictures of masked patch prediction, whose patches are masked, replaced or unchanged.

Letters: b images, n patches of p x q pixels.
"""

import torch
from einops import rearrange
from matplotlib.collections import PatchCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from torch import Tensor

from ssvit.figures.reconstruction import GREY, legend, plot_losses, tiles
from ssvit.figures.style import COLORS, DPI, History, Line, baseline, latest, over_steps, panels, tidy
from ssvit.objectives.masking import KINDS, MASKED, REPLACED, UNCHANGED, Corruption

# By the score: the least loss of a constant prediction, and the constant guess that scores best.
CONSTANTS = {
    "accuracy": ("entropy", "most frequent class"),
    "squared_error": ("variance", "mean patch"),
    "absolute_error": ("mean deviation", "median patch"),
}
FRAME = 1.4  # points


def _frame(kind: str, label: str) -> Patch:
    return Patch(facecolor="none", edgecolor=COLORS[kind], linewidth=FRAME, label=label)


def mosaic(*, images: Tensor, noise: Corruption, answer: Tensor, truth: Tensor, grid: tuple[int, int]) -> Figure:
    """Each image (b, 3, h, w) beside its corrupted form, the answer and the truth, both (b, n, 3, p, q), in [0, 1].

    Masked patches are grey; replaced and unchanged ones have a frame in the legend's colour.
    """
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
    legend(figure, *(handle for kind, handle in handles.items() if (kinds == kind).any()))
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
