"""Define the style of figures: colours, sizes in dots, truncated text. Matplotlib is imported when used."""

import textwrap
from bisect import bisect

from ssvit.errors import one_line
from ssvit.figures.base import Axes, Canvas, missing_glyphs_as_boxes

INK, PALE = "#222222", "#e6e6e6"
COLORS = {
    "model": "#1b6ca8", "train": "#9db4c4", "masked": "#1b6ca8", "replaced": "#e07b00", "unchanged": "#3a9d5d",
    "ink": INK,
}  # fmt: skip
# Colours of the objectives, the same in all figures; those of their targets are different.
OBJECTIVES = {
    "mae": "#1b6ca8", "masked_patch": "#3a9d5d", "masked_patch_decoder": "#7a5195", "color_grid": "#b39ddb",
    "simmim": "#8c9a2b", "hog": "#c79100", "codebook": "#8c564b", "latent": "#c2185b", "simclr": "#d62728",
    "contrastive_tuning": "#f08fb0", "dino": "#00796b", "ibot": "#4db6ac", "diet": "#a0622d", "supervised": "#607080",
    "distill": "#17a2d0",
}  # fmt: skip
DPI = 150


def panels(count: int, width: float, height: float, *, down: int = 1) -> tuple[Canvas, list[Axes]]:
    """Return a figure and its axes.

    Args:
        count: Number of axes.
        width: Width in inches.
        height: Height in inches.
        down: Rows of axes.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=DPI, layout="constrained")
    return figure, [figure.add_subplot(down, -(-count // down), index) for index in range(1, count + 1)]


def of_objective(*names: str) -> str:
    """Return the colour of an objective by the first of some names that begins with a known one, as mae_jitter does."""
    found = (max((known for known in OBJECTIVES if name.startswith(known)), key=len, default="") for name in names)
    return OBJECTIVES.get(next(filter(None, found), ""), COLORS["model"])


def width_of(text: str, size: float) -> float:
    """Return the width in dots of a text of `size` points."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    with missing_glyphs_as_boxes():
        return text_to_path.get_text_width_height_descent(text, FontProperties(size=size), False)[0] * DPI / 72


def fitted(name: str, size: float, room: float) -> str:
    """Truncate a name to a width of `room` dots at a font size of `size` points."""
    name = one_line(name)
    if width_of(name, size) <= room:
        return name
    letters = bisect(range(1, len(name)), room, key=lambda count: width_of(f"{name[:count]}…", size))
    return f"{name[:letters].rstrip()}…"


def wrapped(text: str, letters: int) -> str:
    """Return a title in lines of at most `letters` characters; its line breaks are kept."""
    return "\n".join(line for part in text.split("\n") for line in textwrap.wrap(one_line(part), letters))


def evenly_spaced(total: int, count: int) -> list[int]:
    """Return at most `count` evenly spaced indices below `total`."""
    count = min(total, count)
    return [index * total // count for index in range(count)]
