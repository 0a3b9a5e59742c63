"""Nearest neighbours by cosine of frozen features, compared with faiss's IndexFlatIP in a single batch, on one thread.

Both start from features as an encoder gives them and are exact: faiss up to the rounding of float32, which now and then
puts two neighbours in the other order. The items of the rates are queries.
"""

import faiss
import torch
import torch.nn.functional as F
from threadpoolctl import threadpool_limits
from torch import Tensor

from ssvit.benchmark.timing import Rate, compare, threads
from ssvit.evaluation.neighbours import search

_QUERIES, _ITEMS = 10_000, 50_000
_WIDTHS, _NEIGHBOURS = (192, 768), (20, 200)


@threads(1)
@threadpool_limits.wrap(limits=1)
def run(*, rounds: int = 7) -> dict[str, list[Rate]]:
    """Rates in queries a second; the titles say how many neighbours faiss puts in another place."""
    return dict(_search(width, k, rounds) for width in _WIDTHS for k in _NEIGHBOURS)


def _search(width: int, k: int, rounds: int) -> tuple[str, list[Rate]]:
    generator = torch.Generator().manual_seed(0)
    # Independent numbers: as many near-ties as there can be.
    queries = torch.randn(_QUERIES, width, generator=generator)
    items = torch.randn(_ITEMS, width, generator=generator)

    def ours() -> Tensor:
        return search(queries, items, k).indices

    def theirs() -> Tensor:
        index = faiss.IndexFlatIP(width)
        index.add(F.normalize(items).numpy())
        return torch.from_numpy(index.search(F.normalize(queries).numpy(), k)[1])

    apart = (ours() != theirs()).sum().item()
    title = f"{k} of {_ITEMS:,} x {width} for {_QUERIES:,} queries, {apart} of {_QUERIES * k:,} neighbours differ"
    contenders = {"faiss IndexFlatIP": lambda: len(theirs()), "ssvit": lambda: len(ours())}
    return title, compare(contenders, reference="faiss IndexFlatIP", rounds=rounds)
