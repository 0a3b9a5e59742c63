"""The nearest neighbours by cosine, found by faiss: exactly (`Flat`), in k-means cells (`IVF`), or in a graph (`HNSW`).

An index is built from the vectors each time. Cosines are products of vectors of length one in float32.

Letters: m queries, n images that are searched, d width, k neighbours.
"""

import math
from typing import NamedTuple

import faiss
import numpy as np
import torch
import torch.nn.functional as F
from threadpoolctl import threadpool_limits
from torch import Tensor

from ssvit.evaluation import neighbours_options
from ssvit.evaluation.processes import gather, rank_and_world
from ssvit.options import OptionError, UserError, whole
from ssvit.randomness import key

_ROWS = 4096  # in float64 at a time
_SAMPLED = 4096  # images by which a median distance is measured, at most
_TIE = 1e-6  # of similarities: what float32 sums in another order differ by, at most


class Neighbours(NamedTuple):
    """The most similar images, best first, equals in the order of the images.

    Where an approximate index finds fewer than k, the similarity is -inf and the index -1.
    """

    similarities: Tensor  # (m, k) float32: cosines
    indices: Tensor  # (m, k) int64


class Flat(neighbours_options.Flat):
    """Exact: every image is compared."""

    def over(self, vectors: Tensor) -> faiss.Index:
        """Return the index of vectors (n, d) float32 of length one."""
        index = faiss.IndexFlatIP(vectors.shape[1])
        index.add(vectors.numpy())
        return index


class IVF(neighbours_options.IVF):
    """Compare with the images of the `nprobe` nearest of `nlist` cells."""

    def over(self, vectors: Tensor) -> faiss.Index:
        """Return the index of vectors (n, d) float32 of length one."""
        n, d = vectors.shape
        nlist = self.nlist or min(n, round(4 * math.sqrt(n)))
        if nlist > n:
            raise OptionError("nlist", nlist, f"must be at most {n}, the number of images")
        index = faiss.IndexIVFFlat(faiss.IndexFlatIP(d), d, nlist, faiss.METRIC_INNER_PRODUCT)
        index.cp.spherical = True
        index.cp.seed = key(self.seed, "ivf") & 0x7FFFFFFF
        index.cp.max_points_per_centroid = 64
        index.cp.min_points_per_centroid = 1  # a small store has small cells, which need no warning
        index.train(vectors.numpy())
        index.add(vectors.numpy())
        index.nprobe = min(self.nprobe or round(math.sqrt(nlist)), nlist)
        return index


class HNSW(neighbours_options.HNSW):
    """Walk a graph in which each image has `links` neighbours.

    Built on one thread: with more, faiss 1.9 makes another graph each time.
    """

    def over(self, vectors: Tensor) -> faiss.Index:
        """Return the index of vectors (n, d) float32 of length one."""
        index = faiss.IndexHNSWFlat(vectors.shape[1], self.links, faiss.METRIC_INNER_PRODUCT)
        index.hnsw.efConstruction = self.ef_construction
        with threadpool_limits(1, user_api="openmp"):
            index.add(vectors.numpy())
        index.hnsw.efSearch = self.ef_search
        return index


Kind = Flat | IVF | HNSW


def search(queries: Tensor, train: Tensor, k: int, *, own: Tensor | None = None) -> Neighbours:
    """Find the k nearest of train (n, d) for queries (m, d) exactly. With zeros every cosine is 0.

    Args:
        queries: Features of any length.
        train: Features that are searched.
        k: The number of neighbours.
        own: (m,), each query's place in train, which is left out; -1 for none.

    Raises:
        OptionError: There are fewer than k others.
        UserError: A vector is not finite, or the widths differ.
    """
    queries, train = _prepared(queries, train, k, own)
    return nearest(Flat().over(train), queries, k, own=own)


def search_together(
    queries: Tensor, train: Tensor, k: int, *, own: Tensor | None = None, kind: Kind | None = None
) -> Neighbours:
    """As `search`, each process for its part of the queries; every process calls it alike and gets all.

    kind: of the index, exact by default.
    """
    queries, train = _prepared(queries, train, k, own)  # of all queries, so that an error names the image
    index = (kind or Flat()).over(train)
    rank, world = rank_and_world()
    part = queries.tensor_split(world)[rank]
    own = None if own is None else own.tensor_split(world)[rank]
    parts = gather(lambda: tuple(nearest(index, part, k, own=own)))
    return Neighbours(*map(torch.cat, zip(*parts, strict=True)))


def nearest(index: faiss.Index, queries: Tensor, k: int, *, own: Tensor | None = None) -> Neighbours:
    """Find the k nearest by an index, for queries (m, d) float32 of length one. own: as of `search`.

    An image with the same vector as the query's own is a neighbour. OptionError if the index has fewer than k others.
    """
    check_k(k, index.ntotal, own=own is not None)
    if isinstance(index, faiss.IndexHNSW):
        index.hnsw.efSearch = max(index.hnsw.efSearch, 2 * k)  # with k candidates some neighbours are missed
    similarities, indices = index.search(queries.numpy(), k + (own is not None))
    if own is not None:
        indices[indices == own[:, None].numpy()] = -1
    similarities[indices < 0] = -math.inf
    order = np.lexsort((indices, -similarities))[:, :k]
    return Neighbours(*(torch.from_numpy(np.take_along_axis(one, order, axis=1)) for one in (similarities, indices)))


def recall(approximate: Neighbours, exact: Neighbours) -> float:
    """Return the recall@k of an approximate index: the share of the exact k neighbours that it finds, 0 to 1.

    An image as similar as the exact k-th counts as well as that one: which of equals is the neighbour is chance.
    """
    least = exact.similarities[:, -1:] - _TIE
    return (approximate.similarities >= least).double().mean().item()


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
    sample = _unit(train[:: -(-len(train) // _SAMPLED)], "training")
    medians = [(block @ sample.T).median(1, keepdim=True).values for block in _unit(queries, "query").split(_ROWS)]
    least = torch.finfo(torch.float32).eps
    return (1 - neighbours.similarities).clamp_min(0) / (1 - torch.cat(medians)).clamp_min(least)


def check_k(k: int, images: int, *, own: bool) -> None:
    """OptionError unless so many training images have k neighbours; own: for a query that is one of them."""
    whole("k", k)
    if k + own > images:
        besides = " besides the query itself" if own else ""
        raise OptionError("k", k, f"must be at most {images - own}, the images to search{besides}")


def _prepared(queries: Tensor, train: Tensor, k: int, own: Tensor | None) -> tuple[Tensor, Tensor]:
    """Both as unit vectors."""
    if train.shape[1] != (width := queries.shape[1]):
        raise UserError(f"the training images' features have width {train.shape[1]}, but the queries' {width}")
    check_k(k, len(train), own=own is not None)
    return _unit(queries, "query"), _unit(train, "training")


def _unit(features: Tensor, which: str) -> Tensor:
    """Vectors of length one, on the CPU: (n, d) -> (n, d) float32. Those of zeros stay zeros."""
    eps = torch.finfo(torch.float64).tiny
    unit = torch.cat([F.normalize(rows.double(), eps=eps).float() for rows in features.split(_ROWS)]).cpu()
    if len(wrong := (~unit.isfinite().all(1)).nonzero()):
        raise UserError(f"the features of {which} image {wrong[0, 0]} are not finite")
    return unit
