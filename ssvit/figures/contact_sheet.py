"""The contact sheet of a retrieval: in each row a query and, best first, the images that are most similar to it.

Images are (3, h, w) in [0, 1]. Letters: h, w pixels.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor

from ssvit.figures.style import COLORS, DPI, INK, canvas, fitted, show

QUERIES, NEIGHBOURS = 8, 10  # in a sheet at most
PAIRS, _ACROSS = 20, 5  # in a sheet of pairs, and in a row of it
_TILE, _GAP, _LINE = 170, 14, 26  # dots: a picture's longer side, between two, and a line of text
_APART = 46  # dots between a query and its neighbours
_FRAME = 2.2  # points
_SIZE = 7  # points of a caption
_MAT = "#f1f1f1"
_MARKS = {None: ("", None), True: ("✓ ", COLORS["unchanged"]), False: ("✗ ", "#c8372d")}


class Neighbour(NamedTuple):
    """An image of a sheet.

    distance: from the query, relative to the median over the gallery
    (`evaluation.neighbours.relative_distances`). name: its class, "" if unknown. right: whether that is the query's.
    """

    image: Tensor
    distance: float
    name: str = ""
    right: bool | None = None


class Row(NamedTuple):
    """A query, its class or another name, and its neighbours, best first."""

    query: Tensor
    name: str
    neighbours: Sequence[Neighbour]


def contact_sheet(rows: Sequence[Row]) -> Figure:
    """The first rows and the first neighbours of each, as many as a sheet holds.

    Images of any aspect are fitted into squares. A neighbour has a green frame and a tick if its class is the query's,
    a red frame and a cross if it is not, neither where that is not known.
    """
    rows = rows[:QUERIES]
    across = min(NEIGHBOURS, max(1, *(len(row.neighbours) for row in rows)))
    top, left, height = _LINE + _GAP, _TILE + _GAP + _APART, _TILE + 2 * _LINE + _GAP
    figure, axis = canvas(left + across * (_TILE + _GAP), top + len(rows) * height)

    def caption(x: float, y: float, text: str, **style: Any) -> None:
        style = {"color": INK, "fontsize": _SIZE, "ha": "center", **style}
        axis.text(x, y, text, va="center", **style)

    caption(_GAP, top / 2, "query", ha="left", fontsize=9)
    caption(left, top / 2, "most alike (distance in % of the median of the gallery)", ha="left", fontsize=9)
    for number, row in enumerate(rows):
        y = top + number * height
        _place(axis, row.query, _GAP, y, INK)
        caption(_GAP + _TILE / 2, y + _TILE + 0.8 * _LINE, fitted(row.name, _SIZE, _TILE))
        for place, one in enumerate(row.neighbours[:across]):
            x = left + place * (_TILE + _GAP)
            mark, color = _MARKS[one.right]
            _place(axis, one.image, x, y, color)
            caption(x + _TILE / 2, y + _TILE + 0.8 * _LINE, f"{mark}{100 * one.distance:.1f} %", color=color or INK)
            caption(x + _TILE / 2, y + _TILE + 1.6 * _LINE, fitted(one.name, _SIZE, _TILE))
    return figure


def pair_sheet(pairs: Sequence[tuple[Tensor, Tensor, float]]) -> Figure:
    """Pairs of images side by side, with the cosine of both; as many as a sheet holds."""
    pairs = pairs[:PAIRS]
    across = min(_ACROSS, len(pairs))
    wide, high = 2 * _TILE + _APART, _TILE + _LINE + _GAP
    figure, axis = canvas(_GAP + across * wide, _GAP + -(-len(pairs) // across) * high)
    for place, (one, other, cosine) in enumerate(pairs):
        x, y = _GAP + place % across * wide, _GAP + place // across * high
        _place(axis, one, x, y, None)
        _place(axis, other, x + _TILE + _GAP // 4, y, None)
        middle, below = x + _TILE, y + _TILE + 0.8 * _LINE
        axis.text(middle, below, f"{cosine:.3f}", color=INK, fontsize=_SIZE, ha="center", va="center")
    return figure


def _place(axis: Axes, image: Tensor, x: float, y: float, color: str | None) -> None:
    """An image in the middle of its square, which has a frame if there is a colour for it."""
    pixels = image.movedim(0, -1).numpy()
    h, w = (_TILE * side / max(pixels.shape[:2]) for side in pixels.shape[:2])
    axis.add_patch(Rectangle((x, y), _TILE, _TILE, facecolor=_MAT, edgecolor="none", zorder=0))
    show(axis, pixels, x + (_TILE - w) / 2, y + (_TILE - h) / 2, w, h)
    if color:
        out = _FRAME * DPI / 72 / 2 + 0.5  # half of the line and what it blurs, so that it hides no pixel
        corner, side = (x - out, y - out), _TILE + 2 * out
        frame = Rectangle(corner, side, side, facecolor="none", edgecolor=color, linewidth=_FRAME, joinstyle="miter")
        axis.add_patch(frame)
