"""Search nearest neighbours by cosine with faiss: exact (`flat`), k-means cells (`ivf`) or a graph (`hnsw`).

An index is rebuilt from the vectors for each search. Cosines are inner products of unit vectors in float32.

Shapes use m queries, n images searched, d width, k neighbours.
"""

import math
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from threadpoolctl import threadpool_limits
from torch import Tensor

from ssvit.config.declaration import Options
from ssvit.engine.randomness import key
from ssvit.errors import OptionError, UserError
from ssvit.evaluation.options import HNSW, IVF, Flat
from ssvit.evaluation.processes import all_gather_results, rank_and_world
from ssvit.kernels.fast_faiss import faiss

_ROWS = 4096  # rows of a chunk in float64
_SAMPLED = 4096  # maximum number of images for a median distance


class Neighbours(NamedTuple):
    """Store the most similar images in descending order; ties are in the order of the images.

    If an approximate index returns fewer than k neighbours, the missing similarities are -inf and indices -1.
    """

    similarities: Tensor  # cosines, (m, k) float32
    indices: Tensor  # (m, k) int64


def flat(options: Flat, *, vectors: Tensor) -> faiss.Index:
    """Build an index of unit vectors (n, d) float32 that compares a query with each of them."""
    index = faiss.IndexFlatIP(vectors.shape[1])
    index.add(vectors.numpy())
    return index


def ivf(options: IVF, *, vectors: Tensor) -> faiss.Index:
    """Build an index of unit vectors (n, d) float32 that searches the `nprobe` nearest of `nlist` cells."""
    n, d = vectors.shape
    nlist = options.nlist or min(n, round(4 * math.sqrt(n)))
    if nlist > n:
        raise OptionError("nlist", nlist, f"must be at most {n}, the number of images")
    index = faiss.IndexIVFFlat(faiss.IndexFlatIP(d), d, nlist, faiss.METRIC_INNER_PRODUCT)
    index.cp.spherical = True
    index.cp.seed = key(options.seed, "ivf") & 0x7FFFFFFF
    index.cp.max_points_per_centroid = 64
    index.cp.min_points_per_centroid = 1  # avoids a warning for the small cells of a small store
    index.train(vectors.numpy())
    index.add(vectors.numpy())
    index.nprobe = min(options.nprobe or round(math.sqrt(nlist)), nlist)
    return index


def hnsw(options: HNSW, *, vectors: Tensor) -> faiss.Index:
    """Build an index of unit vectors (n, d) float32 that searches a graph in which each has `links` neighbours.

    The graph is built on one thread: with several threads, faiss 1.9 is not deterministic.
    """
    index = faiss.IndexHNSWFlat(vectors.shape[1], options.links, faiss.METRIC_INNER_PRODUCT)
    index.hnsw.efConstruction = options.ef_construction
    with threadpool_limits(1, user_api="openmp"):
        index.add(vectors.numpy())
    index.hnsw.efSearch = options.ef_search
    return index


def search(
    queries: Tensor, train: Tensor, k: int, *, excluded: Tensor | None = None, index: Options | None = None
) -> Neighbours:
    """Search the k nearest neighbours, with the queries distributed over all processes. The cosine with 0 is 0.

    Each process calls this function, and receives all results.

    Args:
        queries: Features of the queries, (m, d), of any length.
        train: Features of the images searched, (n, d), of any length.
        k: Number of neighbours.
        excluded: Index of each query in train, (m,), which is excluded from its neighbours; -1 for none.
        index: Options of the index; None for exact search.

    Raises:
        OptionError: If fewer than k images can be neighbours.
        UserError: If a vector is not finite.
    """
    check_k(k, len(train), excludes=excluded is not None)
    queries, train = _unit(queries, "query"), _unit(train, "training")
    built = (index or Flat()).build(vectors=train)
    rank, world = rank_and_world()
    part = queries.tensor_split(world)[rank]
    excluded = None if excluded is None else excluded.tensor_split(world)[rank]
    parts = all_gather_results(lambda: tuple(nearest(built, part, k, excluded=excluded)))
    return Neighbours(*map(torch.cat, zip(*parts, strict=True)))


def nearest(index: faiss.Index, queries: Tensor, k: int, *, excluded: Tensor | None = None) -> Neighbours:
    """Search the k nearest neighbours with an index.

    Images with the same vector as the query count as neighbours, except the query itself.

    Args:
        index: The index.
        queries: Unit vectors, (m, d) float32.
        k: Number of neighbours, see `check_k`.
        excluded: Index of each query among the images searched, see `search`.
    """
    if isinstance(index, faiss.IndexHNSW):
        index.hnsw.efSearch = max(index.hnsw.efSearch, 2 * k)  # with k candidates, recall is low
    similarities, indices = index.search(queries.numpy(), k + (excluded is not None))
    if excluded is not None:
        indices[indices == excluded[:, None].numpy()] = -1
    similarities[indices < 0] = -math.inf
    order = np.lexsort((indices, -similarities))[:, :k]
    ordered = (np.take_along_axis(values, order, axis=1) for values in (similarities, indices))
    return Neighbours(*map(torch.from_numpy, ordered))


def relative_distances(neighbours: Neighbours, queries: Tensor, train: Tensor) -> Tensor:
    """Return the cosine distances of neighbours relative to the query's median distance to all training images.

    For some encoders all cosines are close to 1, so that only relative distances are informative.

    Args:
        neighbours: The neighbours (m, k) of the queries.
        queries: Features (m, d).
        train: Features (n, d), of which at most 4,096, evenly spaced, determine the median.

    Returns:
        Distances, (m, k) float32: 0 for features of the same direction, 1 for the median distance.
    """
    sample = _unit(train[:: -(-len(train) // _SAMPLED)], "training")
    medians = [(block @ sample.T).median(1, keepdim=True).values for block in _unit(queries, "query").split(_ROWS)]
    least = torch.finfo(torch.float32).eps
    return (1 - neighbours.similarities).clamp_min(0) / (1 - torch.cat(medians)).clamp_min(least)


def check_k(k: int, images: int, *, excludes: bool) -> None:
    """Raise OptionError unless k neighbours exist; if `excludes`, the query is one of the images and is excluded."""
    if k + excludes > images:
        besides = " besides the query itself" if excludes else ""
        raise OptionError("k", k, f"must be at most {images - excludes}, the images to search{besides}")


def _unit(features: Tensor, which: str) -> Tensor:
    """Return unit vectors on the CPU: (n, d) -> (n, d) float32. Zero vectors are unchanged."""
    eps = torch.finfo(torch.float64).tiny
    unit = torch.cat([F.normalize(rows.double(), eps=eps).float() for rows in features.split(_ROWS)]).cpu()
    if len(wrong := (~unit.isfinite().all(1)).nonzero()):
        raise UserError(f"the features of {which} image {wrong[0, 0]} are not finite")
    return unit
