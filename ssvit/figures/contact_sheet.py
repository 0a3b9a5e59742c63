"""Arrange contact sheets: rows of a query with its most similar images, best first; and pairs of images."""

from collections.abc import Sequence
from itertools import chain

from torch import Tensor

from ssvit.figures.pictures import GREEN, RED, Gallery, Picture, in_rows
from ssvit.figures.style import INK

QUERIES, NEIGHBOURS = 8, 10  # maximum numbers in a sheet
PAIRS, _ACROSS = 20, 5  # pairs in a sheet, and in each of its rows
_MARKS = {None: ("", None), True: ("✓ ", GREEN), False: ("✗ ", RED)}


def query(image: Tensor, name: str) -> Picture:
    """Return the picture of a query, (3, h, w) in [0, 1], with its class or another name."""
    return Picture(image, (name,), INK)


def neighbour(image: Tensor, distance: float, name: str = "", same_class: bool | None = None) -> Picture:
    """Return the picture of a neighbour.

    A neighbour of the same class has a green frame and a tick, one of another class a red frame and a cross.

    Args:
        image: Image, (3, h, w) in [0, 1].
        distance: Distance from the query relative to the median over the gallery, see
            `evaluation.neighbours.relative_distances`.
        name: Class name; "" if unknown.
        same_class: Whether it has the class of the query; None if unknown.
    """
    mark, color = _MARKS[same_class]
    return Picture(image, (f"{mark}{100 * distance:.1f} %", name), color)


def contact_sheet(rows: Sequence[Sequence[Picture]], kind: str = "images") -> Gallery:
    """Return a sheet of the first rows: a query and the first of its neighbours, which are images or another kind."""
    shown = [row[: 1 + NEIGHBOURS] for row in rows[:QUERIES]]
    return Gallery(shown, f"queries and their most similar {kind} (distance in % of the median of the gallery)")


def pair_sheet(pairs: Sequence[tuple[Tensor, Tensor, float]]) -> Gallery:
    """Return a sheet of pairs of images with the correlation of their details."""
    pictures = [(Picture(first, (f"{value:.2f}",)), Picture(second)) for first, second, value in pairs[:PAIRS]]
    rows = [list(chain(*row)) for row in in_rows(pictures, _ACROSS)]
    return Gallery(rows, "correlation of the details of each image and the one to its right")
