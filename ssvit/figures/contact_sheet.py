"""Contact sheets: in each row a query and, best first, the images that are most similar to it; and pairs of images."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from ssvit.figures.pictures import GREEN, RED, Gallery, Picture
from ssvit.figures.style import INK

QUERIES, NEIGHBOURS = 8, 10  # in a sheet at most
PAIRS, _ACROSS = 20, 5  # in a sheet of pairs, and in a row of it
_MARKS = {None: ("", None), True: ("✓ ", GREEN), False: ("✗ ", RED)}


class Neighbour(NamedTuple):
    """An image (3, h, w) of a sheet.

    distance: from the query, relative to the median over the gallery
    (`evaluation.neighbours.relative_distances`). name: its class, "" if unknown. same_class: whether the query has it.
    """

    image: Tensor
    distance: float
    name: str = ""
    same_class: bool | None = None


class Query(NamedTuple):
    """An image (3, h, w) in [0, 1], its class or another name, and its neighbours, best first."""

    image: Tensor
    name: str
    neighbours: Sequence[Neighbour]


def contact_sheet(queries: Sequence[Query]) -> Gallery:
    """Return the first queries and the first neighbours of each, as many as a sheet holds.

    A neighbour has a green frame and a tick if its class is the query's, a red frame and a cross if it is not, neither
    where that is not known.
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
    """Return pairs of images side by side, with the cosine of both; as many as a sheet holds."""
    shown = [pairs[place : place + _ACROSS] for place in range(0, min(len(pairs), PAIRS), _ACROSS)]
    rows = [
        [picture for first, second, cosine in row for picture in (Picture(first, (f"{cosine:.3f}",)), Picture(second))]
        for row in shown
    ]
    return Gallery(rows, "cosine of each image and the one on its right")
