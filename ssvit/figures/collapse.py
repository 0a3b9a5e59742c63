"""Pictures of self-distillation: whether it collapses, and which images share a prototype.

Letters: n images, c channels, h, w pixels.
"""

import numpy as np
from matplotlib.figure import Figure
from torch import Tensor

from ssvit.figures.style import (
    COLORS,
    DPI,
    INK,
    History,
    Line,
    baseline,
    framed,
    latest,
    over_steps,
    panels,
    rgb,
    tidy,
)  # fmt: skip

ROWS, ACROSS = 8, 10  # prototypes, and images of each
_LABEL, _TOP, _SIDE = 1.15 * DPI, 0.4 * DPI, 0.1 * DPI  # dots: beside a row, above and around the images


def learning(history: History) -> Figure:
    """Entropies, the spread of features and the agreement over the steps."""
    figure, (entropies, features, agreement) = panels(3, 13.5, 3.8)
    model, other, third = (
        Line(color=COLORS[name], linewidth=2, marker=".") for name in ("model", "replaced", "unchanged")
    )
    over_steps(entropies, history, "entropy_of_mean", "of the mean assignment", **model)
    over_steps(entropies, history, "entropy", "of a single one, mean", **other)
    over_steps(entropies, history, "told", "difference: told of the image", **third)
    baseline(entropies, latest(history, "entropy_uniform"), "uniform", "--")
    baseline(entropies, latest(history, "told_at_most"), "most that can be told", ":")
    over_steps(features, history, "feature_std", "standard deviation", **model)
    over_steps(features, history, "feature_cosine", "mean cosine of two images", **other)
    baseline(features, 1, "in all directions alike", "--")
    over_steps(agreement, history, "agreement", "same first choice", 100, **model)
    over_steps(agreement, history, "agreement_by_chance", "by chance", 100, color=INK, linewidth=1, linestyle="-.")
    tidy(entropies, "step", "entropy (nats)")
    tidy(features, "step", "features of length 1")
    tidy(agreement, "step", "student and teacher (% of the images)")
    return figure


def prototypes(images: Tensor, choices: Tensor, confidence: Tensor) -> Figure:
    """A row for each of the prototypes that are chosen most, the most confident images first.

    images (n, c, h, w) uint8, their first choices (n,) and the confidence in these (n,).
    """
    numbers, counts = choices.unique(return_counts=True)
    order = counts.argsort(descending=True, stable=True)[:ROWS]
    h, w = images.shape[2:]
    gap = max(1, w // 16)
    pixels = np.ones((len(order) * (h + gap) - gap, ACROSS * (w + gap) - gap, 3), dtype=np.float32)
    dots = max(1, round(110 / w))
    tall, wide = (dots * side for side in pixels.shape[:2])
    size = wide + _LABEL + 2 * _SIDE, tall + _TOP + _SIDE
    figure, (axis,) = framed(*size, (_LABEL + _SIDE, _SIDE, wide, tall))
    axis.set_axis_off()
    for row, place in enumerate(order):
        members = (choices == numbers[place]).nonzero()[:, 0]
        best = members[confidence[members].argsort(descending=True, stable=True)][:ACROSS]
        y = row * (h + gap)
        for column, picture in enumerate(rgb(images[best] / 255)):
            x = column * (w + gap)
            pixels[y : y + h, x : x + w] = picture
        text = f"prototype {numbers[place]}\n{counts[place]} images"
        axis.text(-1.5 * gap, y + h / 2, text, ha="right", va="center", color=INK, fontsize=8)
    axis.imshow(pixels, interpolation="nearest")
    title = f"{len(numbers)} prototypes are a first choice of {len(images)} held-out images; the most confident first"
    axis.text(-0.5, -0.5 - 0.08 * DPI / dots, title, ha="left", va="bottom", color=INK, fontsize=9)
    return figure
