"""Arrange contact sheets: rows of a query with its most similar images, best first; and pairs of images."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from ssvit.figures.pictures import GREEN, RED, Gallery, Picture
from ssvit.figures.style import INK

QUERIES, NEIGHBOURS = 8, 10  # maximum numbers in a sheet
PAIRS, _ACROSS = 20, 5  # pairs in a sheet, and in each of its rows
_MARKS = {None: ("", None), True: ("✓ ", GREEN), False: ("✗ ", RED)}


class Neighbour(NamedTuple):
    """Describe a neighbour in a contact sheet.

    Attributes:
        image: Image, (3, h, w) in [0, 1].
        distance: Distance from the query relative to the median over the gallery, see
            `evaluation.neighbours.relative_distances`.
        name: Class name; "" if unknown.
        same_class: Whether it has the class of the query; None if unknown.
    """

    image: Tensor
    distance: float
    name: str = ""
    same_class: bool | None = None


class Query(NamedTuple):
    """Describe an image (3, h, w) in [0, 1] by its class or another name, with its neighbours, best first."""

    image: Tensor
    name: str
    neighbours: Sequence[Neighbour]


def contact_sheet(queries: Sequence[Query]) -> Gallery:
    """Return a sheet of the first queries with the first neighbours of each.

    Neighbours of the same class have a green frame and a tick, neighbours of another class a red frame and a cross.
    Without labels there is no frame.
    """
    rows = []
    for query in queries[:QUERIES]:
        row = [Picture(query.image, (query.name,), INK)]
        for neighbour in query.neighbours[:NEIGHBOURS]:
            mark, color = _MARKS[neighbour.same_class]
            row.append(Picture(neighbour.image, (f"{mark}{100 * neighbour.distance:.1f} %", neighbour.name), color))
        rows.append(row)
    return Gallery(rows, "query, and the images most like it (distance in % of the median of the gallery)")


def pair_sheet(pairs: Sequence[tuple[Tensor, Tensor, float]]) -> Gallery:
    """Return a sheet of pairs of images with their cosine similarity."""
    shown = [pairs[place : place + _ACROSS] for place in range(0, min(len(pairs), PAIRS), _ACROSS)]
    rows = [
        [picture for first, second, cosine in row for picture in (Picture(first, (f"{cosine:.3f}",)), Picture(second))]
        for row in shown
    ]
    return Gallery(rows, "cosine of each image and the one on its right")
