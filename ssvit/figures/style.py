"""What all pictures share: colours, text that fits, images as matplotlib wants them, and lines over the steps.

Letters: b images, c channels, h, w pixels.
"""

from bisect import bisect
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from einops import rearrange
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import text_to_path
from torch import Tensor

INK, PALE = "#222222", "#e6e6e6"
COLORS = {"model": "#1b6ca8", "train": "#9db4c4", "masked": "#1b6ca8", "replaced": "#e07b00", "unchanged": "#3a9d5d"}
DPI = 150


def rgb(images: Tensor) -> np.ndarray:
    """(b, c, h, w) in [0, 1] -> (b, h, w, 3): three channels as they are, any other number as its mean in grey."""
    images = images.float().cpu()
    if images.shape[1] != 3:
        images = images.mean(1, keepdim=True).expand(-1, 3, -1, -1)
    return rearrange(images, "b c h w -> b h w c").numpy()


def shown(name: str) -> str:
    """A class's name as one line of text that can be written anywhere: names of folders may hold what is no text."""
    return " ".join(name.encode(errors="backslashreplace").decode().split())


def width_of(text: str, size: float) -> float:
    """Of a text of that many points, in dots."""
    return text_to_path.get_text_width_height_descent(text, FontProperties(size=size), False)[0] * DPI / 72


def fitted(name: str, size: float, room: float) -> str:
    """As much of a name as `room` dots hold."""
    name = shown(name)
    if width_of(name, size) <= room:
        return name
    letters = bisect(range(1, len(name)), room, key=lambda count: width_of(f"{name[:count]}…", size))
    return f"{name[:letters].rstrip()}…"


def over_steps(
    axis: Any, history: Sequence[Mapping[str, float | None]], key: str, label: str, scale: float = 1, **style: Any
) -> None:
    """Draw one metric of a history (rows of metrics) as a line, where it was measured."""
    points = [(row["step"], row[key] * scale) for row in history if row.get(key) is not None]
    if points:
        axis.plot(*zip(*points, strict=True), label=label, **style)


def chance_line(axis: Any, chance: float) -> None:
    """Draw the accuracy of a model that ignores the image, 0 to 1, on an axis in per cent."""
    axis.axhline(100 * chance, color=INK, linewidth=1, linestyle="-.", label=f"chance: {100 * chance:.1f} %")


def tidy(axis: Any, xlabel: str, *, legend: str | None = "best") -> None:
    """Zero at the bottom, a pale grid, no frame at the top and right, a legend unless it is None."""
    axis.set_xlabel(xlabel)
    axis.set_ylim(bottom=0)
    axis.grid(color=PALE, linewidth=0.8)
    axis.spines[["top", "right"]].set_visible(False)
    if legend is not None:
        # On white, so that no line runs through its words.
        axis.legend(facecolor="white", edgecolor="none", framealpha=0.85, fontsize=8, loc=legend)
