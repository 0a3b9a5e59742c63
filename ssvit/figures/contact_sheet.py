"""The contact sheet of a retrieval: in each row a query and, best first, the images that are most like it.

Letters: c channels, h, w pixels.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor

from ssvit.figures.style import COLORS, DPI, INK, fitted, rgb

QUERIES, NEIGHBOURS = 8, 10  # in a sheet at most
_TILE, _GAP, _LINE = 170, 14, 26  # dots: a picture's longer side, between two, and a line of text
_APART = 46  # between a query and its neighbours
_FRAME = 2.2  # points
_SIZE = 7  # points of a caption
_RIGHT, _WRONG = COLORS["unchanged"], "#c8372d"
_MAT = "#f1f1f1"


class Neighbour(NamedTuple):
    """An image (c, h, w) uint8, its cosine with the query, its class ("" if unknown), whether that is the query's."""

    image: Tensor
    similarity: float
    name: str = ""
    right: bool | None = None


class Row(NamedTuple):
    """A query (c, h, w) uint8, its class or what else to call it, and its neighbours, best first."""

    query: Tensor
    name: str
    neighbours: Sequence[Neighbour]


def contact_sheet(rows: Sequence[Row]) -> Figure:
    """The first rows and the first neighbours of each, as many as a sheet holds.

    Pictures of any aspect are fitted into squares. A neighbour's frame is green and its caption ticked if its class is
    the query's, red and crossed if it is not, and there is none where that is not known.
    """
    rows = rows[:QUERIES]
    across = min(NEIGHBOURS, max(1, *(len(row.neighbours) for row in rows)))
    top, text = _LINE + _GAP, 2 * _LINE
    left = _TILE + _GAP + _APART
    width = left + across * (_TILE + _GAP)
    height = top + len(rows) * (_TILE + text + _GAP)
    figure = Figure(figsize=(width / DPI, height / DPI), dpi=DPI)
    axis = figure.add_axes((0, 0, 1, 1))
    axis.set_axis_off()

    def caption(x: float, y: float, text: str, **style: Any) -> None:
        style = {"color": INK, "fontsize": _SIZE, "ha": "center", **style}
        axis.text(x, y, text, va="center", parse_math=False, **style)

    caption(_GAP, top / 2, "query", ha="left", fontsize=9)
    caption(left, top / 2, "most alike (cosine)", ha="left", fontsize=9)
    for number, row in enumerate(rows):
        y = top + number * (_TILE + text + _GAP)
        _place(axis, row.query, _GAP, y, INK)
        caption(_GAP + _TILE / 2, y + _TILE + 0.8 * _LINE, fitted(row.name, _SIZE, _TILE))
        for place, one in enumerate(row.neighbours[:across]):
            x = left + place * (_TILE + _GAP)
            color = {None: None, True: _RIGHT, False: _WRONG}[one.right]
            mark = {None: "", True: "✓ ", False: "✗ "}[one.right]
            _place(axis, one.image, x, y, color)
            cosine = f"{mark}{one.similarity:.3f}"
            caption(x + _TILE / 2, y + _TILE + 0.8 * _LINE, cosine, color=color or INK)
            caption(x + _TILE / 2, y + _TILE + 1.6 * _LINE, fitted(one.name, _SIZE, _TILE))
    axis.set(xlim=(0, width), ylim=(height, 0))
    return figure


def _place(axis: Any, image: Tensor, x: float, y: float, color: str | None) -> None:
    """An image in the middle of its square, with a frame around the square where it has a colour."""
    pixels = rgb(image[None] / 255)[0]
    h, w = (_TILE * side / max(pixels.shape[:2]) for side in pixels.shape[:2])
    left, upper = x + (_TILE - w) / 2, y + (_TILE - h) / 2
    axis.add_patch(Rectangle((x, y), _TILE, _TILE, facecolor=_MAT, edgecolor="none", zorder=0))
    interpolation = "nearest" if max(pixels.shape[:2]) <= _TILE / 2 else "antialiased"
    axis.imshow(pixels, extent=(left, left + w, upper + h, upper), interpolation=interpolation)
    if color:
        out = _FRAME * DPI / 72 / 2 + 0.5  # half of the line and what it blurs, so that it hides no pixel
        corner, side = (x - out, y - out), _TILE + 2 * out
        axis.add_patch(
            Rectangle(corner, side, side, facecolor="none", edgecolor=color, linewidth=_FRAME, joinstyle="miter")
        )
