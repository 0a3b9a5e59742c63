"""Pictures of a classifier: its confusion matrix, its most confident mistakes, and its learning curves.

Letters: h, w pixels, k classes.
"""

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
from matplotlib.colors import LinearSegmentedColormap, PowerNorm
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from torch import Tensor

from ssvit.figures import style
from ssvit.figures.style import COLORS, DPI, INK, PALE, History, Line, fitted, width_of

_SIDE, _CELL = 900, 200  # dots: of the confusion matrix, and of one class at most
_NAMED, _NUMBERED = 40, 20  # classes up to which the matrix has their names, and the shares in its cells
_SHARES = LinearSegmentedColormap.from_list("shares", ["#ffffff", COLORS["model"], "#08263d"]).with_extremes(bad=PALE)
_TILE, _GAP, _ACROSS = 200, 16, 6  # dots of a mistake's picture and between two, and pictures in a row
_LINE = 21  # dots from one line of its caption to the next


def confusion(counts: Tensor, classes: Sequence[str], *, accuracy: float, part: str, by: str = "") -> Figure:
    """Each true class (row) by the shares of its images taken for each class; grey if it has no images.

    counts: (k, k), or fewer rows and columns for blocks of neighbouring classes. A class is a whole number of dots,
    so that none is lost. Colours grow with the root of the share, so that rare confusions show. part: test or
    validation. by: the classifier, where there are several.
    """
    counts = counts.double()
    shares = (counts / counts.sum(1, keepdim=True)).numpy()
    k = len(classes)
    cell = min(_CELL, max(1, _SIDE // len(counts)))
    size = 9 if k <= _NUMBERED else 7
    names = [fitted(name, size, 1.3 * DPI) for name in classes] if k <= _NAMED else []
    longest = max((width_of(name, size) for name in names), default=0.25 * DPI)
    upright = bool(names) and longest > 0.9 * cell
    side, left = len(counts) * cell, longest + 0.4 * DPI
    bottom = (longest if upright else 0.2 * DPI) + 0.4 * DPI
    boxes = (left, bottom, side, side), (left + side + 0.15 * DPI, bottom, 0.12 * DPI, side)
    figure, (axis, bar) = style.framed(left + side + 1.1 * DPI, bottom + side + (0.7 if by else 0.45) * DPI, *boxes)
    edge = k - 0.5
    picture = axis.imshow(shares, cmap=_SHARES, norm=PowerNorm(0.5, 0, 1), extent=(-0.5, edge, edge, -0.5))
    if names:
        axis.set_xticks(range(k), names, fontsize=size, rotation=90 if upright else 0)
        axis.set_yticks(range(k), names, fontsize=size)
        axis.tick_params(length=0)
    if k <= _NUMBERED:
        for (row, column), share in np.ndenumerate(shares):
            if share > 0.005:
                color = INK if share < 0.12 else "white"
                axis.text(column, row, f"{100 * share:.0f}", ha="center", va="center", fontsize=8, color=color)
    axis.set(xlabel="taken for", ylabel="true class")
    found = f"accuracy {100 * accuracy:.1f} % on the {part} images"
    title = f"{fitted(by, 11, side + DPI)}\n{found}" if by else found
    axis.set_title(title, loc="left", fontsize=11, color=INK)
    ticks = [0, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 1]
    figure.colorbar(picture, cax=bar, ticks=ticks, format=PercentFormatter(1, decimals=0, symbol=" %"))
    bar.set_ylabel("share of the true class")
    for spine in (*axis.spines.values(), *bar.spines.values()):
        spine.set_color(PALE)
    return figure


def mistakes(chosen: Sequence[tuple[Tensor, str, str, float]], *, wrong: int, images: int, part: str) -> Figure:
    """chosen: images (3, h, w) in [0, 1], their class, the class each was taken for, and the probability of that one.

    wrong: all mistakes in so many `images` of `part`, test or validation.
    """
    h, w = chosen[0][0].shape[1:] if chosen else (1, 1)
    tall, wide = _TILE * h / max(h, w), _TILE * w / max(h, w)
    across, top = min(_ACROSS, max(len(chosen), 3)), 0.4 * DPI
    column, row = _TILE + _GAP, tall + 2 * _LINE + _GAP
    height = -(-len(chosen) // across) * row + top + _GAP
    figure, axis = style.canvas(across * column + _GAP, height)
    caption = partial(axis.text, ha="center", va="top", fontsize=7)
    for number, (image, truth, guess, confidence) in enumerate(chosen):
        middle, upper = _GAP + number % across * column + _TILE / 2, top + number // across * row
        axis.imshow(image.movedim(0, -1).numpy(), extent=(middle - wide / 2, middle + wide / 2, upper + tall, upper))
        sure = f", {100 * confidence:.0f} %"
        guess = f"→ {fitted(guess, 7, _TILE - width_of('→ ' + sure, 7))}{sure}"
        caption(middle, upper + tall + 4, fitted(truth, 7, _TILE), color=INK)
        caption(middle, upper + tall + 4 + _LINE, guess, color=COLORS["replaced"])
    title = f"the most confident of {wrong:,} mistakes in {images:,} {part} images"
    if not chosen:
        title = f"no mistake: all {images:,} {part} images are named right"
    axis.text(_GAP, (top if chosen else height) / 2, title, va="center", fontsize=11, color=INK)
    return figure


def precisions(found: Mapping[str, tuple[float, float]], *, mean: float, part: str) -> Figure:
    """The average precision of each class, highest first, and that of a random order: the share of images that have it.

    found: both by the class's name, 0 to 1. Of many classes the highest and the lowest are shown.
    """
    names = sorted(found, key=lambda name: -found[name][0])
    shown = names if len(names) <= _NAMED else [*names[: _NAMED // 2], *names[-_NAMED // 2 :]]
    figure, (axis,) = style.panels(1, 7, 1.1 + 0.22 * len(shown))
    places, values = range(len(shown)), [100 * found[name][0] for name in shown]
    axis.barh(places, values, color=COLORS["model"], label="average precision")
    shares = [100 * found[name][1] for name in shown]
    axis.plot(shares, places, "|", color=COLORS["replaced"], markersize=11, label="a random order")
    axis.set_yticks(places, [fitted(name, 8, 1.6 * DPI) for name in shown], fontsize=8)
    axis.set_ylim(len(shown) - 0.4, -0.6)
    axis.set(xlabel="average precision (%)", xlim=(0, 100))
    of_all = "" if len(shown) == len(names) else f"; {len(shown)} of {len(names)} classes, the highest and the lowest"
    axis.set_title(f"mAP {100 * mean:.1f} % on the {part} images{of_all}", loc="left", fontsize=11, color=INK)
    axis.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    return figure


def learning_several(history: History, part: str, *, chance: float) -> Figure:
    """Loss and mAP over the steps, beside a random order, for images that may have several classes; part: as below."""
    figure, (left, right) = style.panels(2, 10, 3.8)
    style.over_steps(left, history, "train/loss", "training", color=COLORS["train"], linewidth=1, zorder=2.5)
    has_validation = any("validation/map" in row for row in history)
    for prefix, name, marker in (("validation/", "validation", "."), ("", part, "*" if has_validation else ".")):
        line: Line = {"color": COLORS["model"], "linewidth": 2, "marker": marker}
        style.over_steps(left, history, f"{prefix}loss", name, **line)
        style.over_steps(right, history, f"{prefix}map", f"{name}, mAP", 100, **line)
        of_f1: Line = line | {"color": COLORS["unchanged"]}
        style.over_steps(right, history, f"{prefix}micro_f1", f"{name}, micro-F1 at 0.5", 100, **of_f1)
    style.baseline(right, 100 * chance, "mAP of a random order", "-.", "{:.1f} %")
    style.tidy(left, "step", "loss (nats, summed over the classes)")
    style.tidy(right, "step", "%")
    return figure


def learning(history: History, part: str, *, chance: float, chance_top5: float, entropy: float) -> Figure:
    """Loss and accuracy over the steps, beside a model that ignores the image.

    part: test or validation, the images of the reported figure; beside test images, which are measured on at the end,
    validation images have their curves too. chance: the share of the most frequent class; chance_top5: of the five most
    frequent ones. entropy: of the classes, in nats.
    """
    figure, (left, right) = style.panels(2, 10, 3.8)
    train: Line = {"color": COLORS["train"], "linewidth": 1, "zorder": 2.5}
    style.over_steps(left, history, "train/loss", "training", **train)
    style.over_steps(right, history, "train/accuracy", "training", 100, **train)
    has_validation = any("validation/accuracy" in row for row in history)
    each: Line = {"marker": "."}
    at_end: Line = {"marker": "*", "markersize": 12} if has_validation else each
    for prefix, name, marker in (("validation/", "validation", each), ("", part, at_end)):
        top_1: Line = {"color": COLORS["model"], "linewidth": 2, **marker}
        top_5: Line = top_1 | {"color": COLORS["unchanged"]}
        style.over_steps(left, history, f"{prefix}loss", name, **top_1)
        style.over_steps(right, history, f"{prefix}accuracy", f"{name}, top-1", 100, **top_1)
        style.over_steps(right, history, f"{prefix}accuracy_top5", f"{name}, top-5", 100, **top_5)
    style.baseline(left, entropy, "entropy of the classes", "-.")
    style.chance_line(right, chance)
    if any("accuracy_top5" in name for row in history for name in row):
        style.baseline(right, 100 * chance_top5, "top-5 chance (most frequent five)", ":", "{:.1f} %")
    style.tidy(left, "step", "loss (nats)")
    style.tidy(right, "step", "accuracy (%)")
    return figure
