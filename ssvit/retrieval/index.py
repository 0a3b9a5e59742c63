"""Which images of a store look alike? faiss indexes, rebuilt from the vectors each time, and how good an answer is.

Three kinds: `Flat` compares with every image, `IVF` with those of the nearest cells of a k-means, `HNSW` walks a graph
of neighbours. The two that skip images are compared with the one that does not (`found`). Vectors are of length one
(see `store.unit`), so that products are cosines.

Letters: m queries, n images of the store, d width, k neighbours.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import faiss
import torch
from torch import Tensor

from ssvit.evaluation.neighbours import Neighbours, check_k
from ssvit.options import OptionError
from ssvit.randomness import key
from ssvit.retrieval import options

_TIE = 1e-6  # of similarities: what float32 sums in another order differ by, at most


class Flat(options.Flat):
    """Exact: every image of the store is compared."""

    def build(self, vectors: Tensor) -> faiss.Index:
        index = faiss.IndexFlatIP(vectors.shape[1])
        index.add(_of_length_one(vectors).numpy())
        return index


class IVF(options.IVF):
    """Compare with the images of the `nprobe` nearest of `nlist` cells: see `options.IVF`."""

    def build(self, vectors: Tensor) -> faiss.Index:
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


class HNSW(options.HNSW):
    """Walk a graph in which each image has `links` neighbours: see `options.HNSW`.

    Built on one thread: with more, faiss 1.9 makes another graph each time.
    """

    def build(self, vectors: Tensor) -> faiss.Index:
        index = faiss.IndexHNSWFlat(vectors.shape[1], self.links, faiss.METRIC_INNER_PRODUCT)
        index.hnsw.efConstruction = self.ef_construction
        with _threads(1):
            index.add(_of_length_one(vectors).numpy())
        index.hnsw.efSearch = self.ef_search
        return index


def search(index: faiss.Index, queries: Tensor, k: int, *, own: Tensor | None = None) -> Neighbours:
    """The k nearest of the store for queries (m, d).

    own (m,): where a query itself stands in the store, and is left out; -1 for one that does not stand there. Only that
    place is left out: another image with the same vector stays. Where an approximate index has found fewer than k, the
    index is -1 and the similarity -inf. OptionError if the store has fewer than k others.
    """
    extra = 0 if own is None else 1
    check_k(k, index.ntotal, own=bool(extra))
    similarities, indices = map(torch.from_numpy, index.search(_of_length_one(queries).numpy(), k + extra))
    similarities = similarities.masked_fill(indices < 0, -math.inf)
    if own is not None:
        itself = (indices == own[:, None]) & (indices >= 0)
        similarities = similarities.masked_fill(itself, -math.inf)
        indices = indices.masked_fill(itself, -1)
    order = indices.argsort(dim=1, stable=True)
    order = order.gather(1, similarities.gather(1, order).argsort(dim=1, descending=True, stable=True))[:, :k]
    return Neighbours(similarities.gather(1, order), indices.gather(1, order))


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


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(count)
    try:
        yield
    finally:
        faiss.omp_set_num_threads(before)
