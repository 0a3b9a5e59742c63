"""Select the patch at a position of a picture, and search the patches of a store that are most similar to it.

Shapes use n pictures, m queries, k neighbours, y, x rows and columns of patches, d width.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ssvit.data.batch import EvalTransform
from ssvit.data.windows import parsed_name
from ssvit.errors import OptionError
from ssvit.evaluation.neighbours import Neighbours
from ssvit.retrieval.pictures import PictureSet


def nearest_windows(pictures: PictureSet, position: Sequence[int]) -> list[int]:
    """Return the row of each whole picture, and that of the window of each other one that is nearest to a position."""
    nearest: dict[str, tuple[float, int]] = {}
    for row, name in enumerate(pictures.names):
        image, box = parsed_name(name)
        center = (box.left + box.width / 2, box.top + box.height / 2) if box else position
        nearest[image] = min((math.dist(center, position), row), nearest.get(image, (math.inf, row)))
    return [row for _, row in nearest.values()]


def cell(
    pictures: PictureSet, row: int, position: Sequence[int], transform: EvalTransform, grid: Sequence[int]
) -> tuple[int, int]:
    """Return row and column of the patch at a position of a picture.

    Args:
        pictures: The pictures.
        row: Row of the picture or window.
        position: Column and row of a pixel in the picture.
        transform: Transforms pictures to the input of the encoder.
        grid: Rows and columns of patches.

    Raises:
        OptionError: The encoder does not receive the pixel.
    """
    (name, box), image = parsed_name(pictures.names[row]), pictures.source.read(row)
    corner = torch.tensor([box.left, box.top] if box else [0, 0])  # x, y, as are the following
    to_picture = transform.geometry(torch.tensor([image.shape[1:]]))[0]  # neither rotates nor flips
    low = to_picture[:, 2] + corner
    high = low + to_picture.diagonal() * torch.tensor(transform([image]).shape[2:]).flip(0)
    ends = low.maximum(corner), high.minimum(corner + torch.tensor(image.shape[1:]).flip(0))
    point = torch.tensor(position) + 0.5
    if not ((ends[0] <= point) & (point < ends[1])).all():
        (left, top), (right, bottom) = (end.round().int().tolist() for end in ends)
        shown = f"columns {left} to {right - 1} and rows {top} to {bottom - 1}"
        raise OptionError("patch", [*position], f"must be in {shown}, which the encoder receives of {name}")
    column, of_row = ((point - low) / (high - low) * torch.tensor(grid).flip(0)).floor().int().tolist()
    return of_row, column


def nearest_patches(vectors: Tensor, queries: Tensor, k: int, excluded: Tensor) -> tuple[Neighbours, list[list[int]]]:
    """Search the pictures with the patches that are most similar to those of queries, by comparison with all patches.

    Args:
        vectors: Unit vectors of the patches of the store, (n, p, d).
        queries: Unit vectors, (m, d).
        k: Number of neighbours.
        excluded: Whether a picture of the store is excluded from the neighbours of a query, (n, m).

    Returns:
        The most similar pictures by the cosine of their most similar patch, and the number of this patch.
    """
    cosines, patches = (vectors @ queries.T).max(1)  # (n, m)
    cosines[excluded] = -math.inf
    neighbours = Neighbours(*(column[:k].T for column in cosines.sort(dim=0, descending=True, stable=True)))
    return neighbours, patches.T.gather(1, neighbours.indices).tolist()
