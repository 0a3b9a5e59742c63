"""Pictures of a classifier: which class is taken for which, its most confident mistakes, and how it has learned.

Letters: c channels, k classes.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.colors import LinearSegmentedColormap, PowerNorm
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from torch import Tensor

from ssvit.figures.style import COLORS, DPI, INK, PALE, chance_line, fitted, over_steps, rgb, tidy, width_of

_SIDE, _CELL = 900, 200  # dots: of the confusion matrix, and of one class at most
_NAMED, _NUMBERED = 40, 20  # classes up to which the matrix has their names, and the shares in its cells
_SHARES = LinearSegmentedColormap.from_list("shares", ["#ffffff", COLORS["model"], "#08263d"]).with_extremes(bad=PALE)
_TILE, _GAP, _ACROSS = 200, 16, 6  # dots of a mistake's picture and between two, and pictures in a row
_LINE = 21  # dots from one line of its caption to the next


class Mistake(NamedTuple):
    """An image (c, h, w) uint8, what it is, what it was taken for, and with which probability."""

    image: Tensor
    truth: str
    guess: str
    confidence: float


def confusion(counts: Tensor, classes: Sequence[str], *, accuracy: float, part: str = "test") -> Figure:
    """Each class's images by what they are taken for, as shares: a row for a true class, grey if it has no images.

    counts: (k, k), or fewer rows and columns for blocks of neighbouring classes. A class is a whole number of dots,
    so that none is lost. The colours grow with the root of the share, so that what is rare is seen. part: what the
    images are, test or validation.
    """
    counts = counts.double().numpy()
    images = counts.sum(1, keepdims=True)
    shares = np.divide(counts, images, out=np.full_like(counts, np.nan), where=images > 0)
    k = len(classes)
    cell = min(_CELL, max(1, _SIDE // len(counts)))
    size = 9 if k <= _NUMBERED else 7
    names = [fitted(name, size, 1.3 * DPI) for name in classes] if k <= _NAMED else []
    longest = max((width_of(name, size) for name in names), default=0.25 * DPI)
    upright = bool(names) and longest > 0.9 * cell
    side, left, right, top = len(counts) * cell, longest + 0.4 * DPI, 1.1 * DPI, 0.45 * DPI
    bottom = (longest if upright else 0.2 * DPI) + 0.4 * DPI
    width, height = left + side + right, bottom + side + top
    figure = Figure(figsize=(width / DPI, height / DPI), dpi=DPI)
    axis = figure.add_axes((left / width, bottom / height, side / width, side / height))
    edge = k - 0.5
    picture = axis.imshow(shares, cmap=_SHARES, norm=PowerNorm(0.5, 0, 1), extent=(-0.5, edge, edge, -0.5))
    if names:
        axis.set_xticks(range(k), names, fontsize=size, rotation=90 if upright else 0, parse_math=False)
        axis.set_yticks(range(k), names, fontsize=size, parse_math=False)
        axis.tick_params(length=0)
    if k <= _NUMBERED:
        for (row, column), share in np.ndenumerate(shares):
            if round(100 * share if images[row] else 0):
                color = INK if share < 0.12 else "white"
                axis.text(column, row, f"{100 * share:.0f}", ha="center", va="center", fontsize=8, color=color)
    axis.set_xlabel("taken for")
    axis.set_ylabel("true class")
    axis.set_title(f"accuracy {100 * accuracy:.1f} % on the {part} images", loc="left", fontsize=11, color=INK)
    bar = figure.add_axes(((left + side + 0.15 * DPI) / width, bottom / height, 0.12 * DPI / width, side / height))
    ticks = [0, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 1]
    figure.colorbar(picture, cax=bar, ticks=ticks, format=PercentFormatter(1, decimals=0, symbol=" %"))
    bar.set_ylabel("share of the true class")
    for spine in (*axis.spines.values(), *bar.spines.values()):
        spine.set_color(PALE)
    return figure


def mistakes(chosen: Sequence[Mistake], *, wrong: int, images: int, part: str = "test") -> Figure:
    """Images as the model sees them, what they are, and what they were taken for.

    wrong: mistakes in all `images`. part: what these are, test or validation.
    """
    h, w = chosen[0].image.shape[1:] if chosen else (1, 1)
    tall, wide = _TILE * h / max(h, w), _TILE * w / max(h, w)
    across, top = min(_ACROSS, max(len(chosen), 3)), 0.4 * DPI
    column, row = _TILE + _GAP, tall + 2 * _LINE + _GAP
    width, height = across * column + _GAP, -(-len(chosen) // across) * row + top + _GAP
    figure = Figure(figsize=(width / DPI, height / DPI), dpi=DPI)
    axis = figure.add_axes((0, 0, 1, 1))
    caption = {"ha": "center", "va": "top", "fontsize": 7, "parse_math": False}
    for number, one in enumerate(chosen):
        middle, upper = _GAP + number % across * column + _TILE / 2, top + number // across * row
        pixels = rgb(one.image[None] / 255)[0]
        axis.imshow(pixels, extent=(middle - wide / 2, middle + wide / 2, upper + tall, upper))
        sure = f", {100 * one.confidence:.0f} %"
        guess = f"→ {fitted(one.guess, 7, _TILE - width_of('→ ' + sure, 7))}{sure}"
        axis.text(middle, upper + tall + 4, fitted(one.truth, 7, _TILE), color=INK, **caption)
        axis.text(middle, upper + tall + 4 + _LINE, guess, color=COLORS["replaced"], **caption)
    title = (
        f"the most confident of {wrong:,} mistakes in {images:,} {part} images"
        if chosen
        else f"no mistake: all {images:,} {part} images are named right"
    )
    axis.text(_GAP, (top if chosen else height) / 2, title, va="center", fontsize=11, color=INK)
    axis.set(xlim=(0, width), ylim=(height, 0))
    axis.set_axis_off()
    return figure


def learning(history: Sequence[Mapping[str, float | None]], part: str, *, chance: float, entropy: float) -> Figure:
    """Loss and accuracy over the steps, of training and of the images measured on, beside what a model has that ignores
    the image: `chance`, the share of the most frequent class, and `entropy`, that of the classes, in nats.

    history: rows of metrics; part: test or validation. Beside test images, which are measured on at the end,
    validation images have their curves too.
    """
    figure = Figure(figsize=(10, 3.8), dpi=DPI, layout="constrained")
    left, right = figure.subplots(1, 2)

    trained = {"color": COLORS["train"], "linewidth": 1}
    over_steps(left, history, "train/loss", "training", **trained)
    over_steps(right, history, "train/accuracy", "training", 100, **trained)
    watched = any("validation/accuracy" in row for row in history)
    for prefix, name, marker in (("validation/", "validation", "."), ("", part, "*" if watched else ".")):
        own = {"color": COLORS["model"], "linewidth": 2, "marker": marker, "markersize": 12 if marker == "*" else 6}
        over_steps(left, history, f"{prefix}loss", name, **own)
        over_steps(right, history, f"{prefix}accuracy", f"{name}, top-1", 100, **own)
        over_steps(
            right, history, f"{prefix}accuracy_top5", f"{name}, top-5", 100, **own | {"color": COLORS["unchanged"]}
        )
    left.axhline(entropy, color=INK, linewidth=1, linestyle="-.", label=f"entropy of the classes: {entropy:.3g}")
    chance_line(right, chance)
    left.set_ylabel("loss (nats)")
    right.set_ylabel("accuracy (%)")
    for axis in (left, right):
        tidy(axis, "step")
    return figure
