"""Pictures of self-distillation: whether it collapses, and which images share a prototype.

Letters: n images, c channels, h, w pixels.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from torch import Tensor

from ssvit.figures.style import COLORS, DPI, INK, over_steps, rgb, tidy

ROWS, ACROSS = 8, 10  # prototypes, and images of each
_LABEL = 1.15  # inches, for the words beside a row


def learning(history: Sequence[Mapping[str, float | None]]) -> Figure:
    """Entropies, the spread of features and the agreement over the steps. history: rows of metrics."""
    figure = Figure(figsize=(13.5, 3.8), dpi=DPI, layout="constrained")
    entropies, features, agreement = figure.subplots(1, 3)
    line = {"linewidth": 2, "marker": "."}

    def at(axis: Any, key: str, label: str, style: str) -> None:
        if (value := history[-1].get(key)) is not None:
            axis.axhline(value, color=INK, linewidth=1, linestyle=style, label=f"{label}: {value:.3g}")

    over_steps(entropies, history, "entropy_of_mean", "of the mean assignment", color=COLORS["model"], **line)
    over_steps(entropies, history, "entropy", "of a single one, mean", color=COLORS["replaced"], **line)
    over_steps(entropies, history, "told", "difference: told of the image", color=COLORS["unchanged"], **line)
    at(entropies, "entropy_uniform", "uniform", "--")
    at(entropies, "told_at_most", "most that can be told", ":")
    entropies.set_ylabel("entropy (nats)")
    over_steps(features, history, "feature_std", "standard deviation", color=COLORS["model"], **line)
    over_steps(features, history, "feature_cosine", "mean cosine of two images", color=COLORS["replaced"], **line)
    features.axhline(1, color=INK, linewidth=1, linestyle="--", label="in all directions alike: 1")
    features.set_ylabel("features of length 1")
    over_steps(agreement, history, "agreement", "same first choice", 100, color=COLORS["model"], **line)
    over_steps(agreement, history, "agreement_by_chance", "by chance", 100, color=INK, linewidth=1, linestyle="-.")
    agreement.set_ylabel("student and teacher (% of the images)")
    for axis in (entropies, features, agreement):
        tidy(axis, "step")
    return figure


def prototypes(images: Tensor, choices: Tensor, confidence: Tensor) -> Figure:
    """In each row the images (n, c, h, w) uint8 whose first choice (n,) is a prototype, the most confident (n,) first.

    Rows are the prototypes that are chosen most; beside each stands how many images choose it.
    """
    numbers, counts = choices.unique(return_counts=True)
    order = counts.argsort(descending=True, stable=True)[:ROWS]
    h, w = images.shape[2:]
    gap = max(1, w // 16)
    canvas = np.ones((len(order) * (h + gap) - gap, ACROSS * (w + gap) - gap, 3), dtype=np.float32)
    for row, (number, _) in enumerate(zip(numbers[order], counts[order], strict=True)):
        members = (choices == number).nonzero()[:, 0]
        best = members[confidence[members].argsort(descending=True, stable=True)][:ACROSS]
        for column, picture in enumerate(rgb(images[best] / 255)):
            y, x = row * (h + gap), column * (w + gap)
            canvas[y : y + h, x : x + w] = picture
    dots = max(1, round(110 / w))
    wide, tall = (canvas.shape[1] * dots / DPI, canvas.shape[0] * dots / DPI)
    top, side = 0.4, 0.1
    figure = Figure(figsize=(wide + _LABEL + 2 * side, tall + top + side), dpi=DPI)
    width, height = figure.get_size_inches()
    axis = figure.add_axes(((_LABEL + side) / width, side / height, wide / width, tall / height))
    axis.set_axis_off()
    axis.imshow(canvas, interpolation="nearest")
    for row, place in enumerate(order):
        text = f"prototype {numbers[place]}\n{counts[place]} images"
        axis.text(-1.5 * gap, row * (h + gap) + h / 2, text, ha="right", va="center", color=INK, fontsize=8)
    title = f"{len(numbers)} prototypes are a first choice of {len(images)} held-out images; the most confident first"
    axis.text(-0.5, -0.5 - 0.08 * DPI / dots, title, ha="left", va="bottom", color=INK, fontsize=9)
    return figure
