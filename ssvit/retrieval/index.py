"""faiss indexes of a store, rebuilt from the vectors each time, and the share of the true neighbours that they find.

`Flat` compares with every image, `IVF` with the images of the nearest k-means cells, `HNSW` searches in a graph of
neighbours. Vectors are of length one (see `store.unit`), so products are cosines.

Letters: m queries, n images of the store, d width, k neighbours.
"""

import math

import faiss
import numpy as np
import torch
from threadpoolctl import threadpool_limits
from torch import Tensor

from ssvit.evaluation.neighbours import Neighbours, check_k
from ssvit.options import OptionError
from ssvit.randomness import key
from ssvit.retrieval import index_options

_TIE = 1e-6  # of similarities: what float32 sums in another order differ by, at most


class Flat(index_options.Flat):
    """Exact: every image of the store is compared."""

    def over(self, vectors: Tensor) -> faiss.Index:
        index = faiss.IndexFlatIP(vectors.shape[1])
        index.add(_of_length_one(vectors).numpy())
        return index


class IVF(index_options.IVF):
    """Compare with the images of the `nprobe` nearest of `nlist` cells: see `index_options.IVF`."""

    def over(self, vectors: Tensor) -> faiss.Index:
        n, d = vectors.shape
        nlist = self.nlist or min(n, round(4 * math.sqrt(n)))
        if nlist > n:
            raise OptionError("nlist", nlist, f"must be at most {n}, the number of images")
        index = faiss.IndexIVFFlat(faiss.IndexFlatIP(d), d, nlist, faiss.METRIC_INNER_PRODUCT)
        index.cp.spherical = True
        index.cp.seed = key(self.seed, "ivf") & 0x7FFFFFFF
        index.cp.max_points_per_centroid = 64
        index.cp.min_points_per_centroid = 1  # a small store has small cells, which need no warning
        vectors = _of_length_one(vectors)
        index.train(vectors.numpy())
        index.add(vectors.numpy())
        index.nprobe = min(self.nprobe or round(math.sqrt(nlist)), nlist)
        return index


class HNSW(index_options.HNSW):
    """Walk a graph in which each image has `links` neighbours: see `index_options.HNSW`.

    Built on one thread: with more, faiss 1.9 makes another graph each time.
    """

    def over(self, vectors: Tensor) -> faiss.Index:
        index = faiss.IndexHNSWFlat(vectors.shape[1], self.links, faiss.METRIC_INNER_PRODUCT)
        index.hnsw.efConstruction = self.ef_construction
        with threadpool_limits(1, user_api="openmp"):
            index.add(_of_length_one(vectors).numpy())
        index.hnsw.efSearch = self.ef_search
        return index


def search(index: faiss.Index, queries: Tensor, k: int, *, own: Tensor | None = None) -> Neighbours:
    """The k nearest of the store for queries (m, d).

    own (m,): each query's own place in the store, which is left out, but no other image with the same vector; -1 for
    none. Where an approximate index has found fewer than k, the index is -1 and the similarity -inf. OptionError if
    the store has fewer than k others.
    """
    check_k(k, index.ntotal, own=own is not None)
    similarities, indices = index.search(_of_length_one(queries).numpy(), k + (own is not None))
    if own is not None:
        indices[indices == own[:, None].numpy()] = -1
    similarities[indices < 0] = -math.inf
    order = np.lexsort((indices, -similarities))[:, :k]
    return Neighbours(*(torch.from_numpy(np.take_along_axis(one, order, axis=1)) for one in (similarities, indices)))


def found(approximate: Neighbours, exact: Neighbours) -> float:
    """The recall@k of an approximate index: the share of the exact k neighbours that it finds, 0 to 1.

    An image as similar as the exact k-th counts as well as that one: which of equals is the neighbour is chance.
    """
    least = exact.similarities[:, -1:] - _TIE
    return (approximate.similarities >= least).double().mean().item()


def _of_length_one(vectors: Tensor) -> Tensor:
    lengths = torch.linalg.vector_norm(vectors, dim=1)
    if vectors.dtype != torch.float32 or not ((lengths - 1).abs() < 1e-3).all():
        raise ValueError("vectors must be float32 and of length one (see store.unit)")
    return vectors.contiguous()
