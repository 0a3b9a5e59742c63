"""The exact nearest neighbours by cosine, the same in any batch, on any number of threads or processes.

Vectors of length one are rounded to multiples of 2^-26. Their products, and sums of these, are then exact in float64 in
any order, so equal images have equal similarities in any batch.

Letters: m queries, n training images, b queries of a block, d width, k neighbours.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ssvit.evaluation.processes import gather, rank_and_world
from ssvit.options import OptionError, UserError, whole

_FINEST = 2.0**26  # a product of two of length one stays below float64's 2^53
_ROWS = 4096  # in float64 at a time
_BLOCK, _SIMILARITIES = 256, 1 << 26  # most queries at a time, and most similarities
_SAMPLED = 4096  # images by which a median distance is measured, at most


class Neighbours(NamedTuple):
    """The most similar training images, best first, equals in the order of the training images."""

    similarities: Tensor  # (m, k) float32: cosines
    indices: Tensor  # (m, k) int64


def search(queries: Tensor, train: Tensor, k: int, *, own: Tensor | None = None) -> Neighbours:
    """The k nearest of train (n, d) for queries (m, d), on the queries' device. With zeros every cosine is 0.

    own (m,): a query's own place in train, which is left out; -1 for none. OptionError if there are fewer than k
    others, UserError if a vector is not finite or the widths differ.
    """
    return _nearest(*_prepared(queries, train, k, own), k, own)


def search_together(queries: Tensor, train: Tensor, k: int, *, own: Tensor | None = None) -> Neighbours:
    """As `search`, each process for its part of the queries; every process calls it alike and gets all, on the CPU."""
    queries, train = _prepared(queries, train, k, own)  # of all queries, so that an error names the image
    rank, world = rank_and_world()
    part = queries.tensor_split(world)[rank]
    own = None if own is None else own.tensor_split(world)[rank]
    parts = gather(lambda: tuple(column.cpu() for column in _nearest(part, train, k, own)))
    return Neighbours(*map(torch.cat, zip(*parts, strict=True)))


def relative_distances(neighbours: Neighbours, queries: Tensor, train: Tensor) -> Tensor:
    """Return the cosine distances of neighbours relative to the query's median distance to all training images.

    The cosines of some encoders are all close to 1, and only their distances relative to each other differ visibly.

    Args:
        neighbours: The neighbours (m, k) of the queries.
        queries: Features (m, d).
        train: Features (n, d), of which at most 4,096, evenly spaced, determine the median.

    Returns:
        (m, k) float32: 0 for features of the same direction, 1 for the median distance.
    """
    sample = _unit(train[:: -(-len(train) // _SAMPLED)].to(queries.device), "training")
    medians = [(block @ sample.T).median(1, keepdim=True).values for block in _unit(queries, "query").split(_BLOCK)]
    least = torch.finfo(torch.float32).eps
    return (1 - neighbours.similarities).clamp_min(0) / (1 - torch.cat(medians)).clamp_min(least)


def check_k(k: int, images: int, *, own: bool) -> None:
    """OptionError unless so many training images have k neighbours; own: for a query that is one of them."""
    whole("k", k)
    if k + own > images:
        besides = " besides the query itself" if own else ""
        raise OptionError("k", k, f"must be at most {images - own}, the images to search{besides}")


def _prepared(queries: Tensor, train: Tensor, k: int, own: Tensor | None) -> tuple[Tensor, Tensor]:
    """Both as unit vectors on the queries' device."""
    if train.shape[1] != (width := queries.shape[1]):
        raise UserError(f"the training images' features have width {train.shape[1]}, but the queries' {width}")
    check_k(k, len(train), own=own is not None)
    return _unit(queries, "query"), _unit(train.to(queries.device), "training")


def _unit(features: Tensor, which: str) -> Tensor:
    """Vectors of length one, of multiples of 1 / _FINEST: (n, d) -> (n, d) float32. Those of zeros stay zeros."""
    unit = torch.empty_like(features, dtype=torch.float32, memory_format=torch.contiguous_format)
    for start in range(0, len(features), _ROWS):
        exact = features[start : start + _ROWS].double()
        length = exact.square().sum(1, keepdim=True).sqrt()
        if not length.isfinite().all():
            row = start + (~length.isfinite()).nonzero()[0, 0].item()
            raise UserError(f"the features of {which} image {row} are not finite")
        scale = _FINEST / torch.where(length > 0, length, 1)
        unit[start : start + _ROWS] = (exact * scale).round_().div_(_FINEST)
    return unit


def _nearest(queries: Tensor, train: Tensor, k: int, own: Tensor | None) -> Neighbours:
    """`search` of what `_unit` gives."""
    own = torch.full((len(queries),), -1) if own is None else own
    size = max(1, min(_BLOCK, _SIMILARITIES // len(train)))
    found = []
    for block, places in zip(queries.split(size), own.to(queries.device).split(size), strict=True):
        similarities = torch.cat([block.double() @ rows.double().T for rows in train.split(_ROWS)], dim=1)
        inside = places >= 0
        similarities[inside, places[inside]] = -torch.inf
        found.append(_first(similarities, k))
    return Neighbours(*map(torch.cat, zip(*found, strict=True)))


def _first(similarities: Tensor, k: int) -> Neighbours:
    """The k highest of each row (b, n), of equals those that stand first, which `topk` does not promise."""
    indices = similarities.topk(min(k + 1, similarities.shape[1])).indices.sort(dim=1).values
    values, order = similarities.gather(1, indices).sort(dim=1, descending=True, stable=True)
    indices = indices.gather(1, order)
    cut = values[:, k - 1] == values[:, -1]  # some of several equals may be left out
    if cut.any():
        best = similarities[cut].sort(dim=1, descending=True, stable=True)
        values[cut], indices[cut] = (column[:, : values.shape[1]] for column in best)
    return Neighbours(values[:, :k].float(), indices[:, :k])
