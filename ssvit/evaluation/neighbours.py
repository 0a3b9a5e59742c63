"""The exact nearest neighbours by cosine: a rough scan of the whole bank, then the similarities of the few it leaves.

Vectors of length one are rounded to float32 and to multiples of 2^-26. Their products, and sums of these, are then
exact in float64 in any order, so similarities are the same in any batch and on any number of threads or processes, and
equals are equals. The scan multiplies in bfloat16 where the processor does so natively. Its error has a bound, and
whatever might be among the nearest within that bound is compared exactly: features decide how long it takes, never the
answer.

Letters: m queries, n images of the bank, b queries of a block, d width, k neighbours, p pairs of a query and an image.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, distributed

from ssvit.options import OptionError, UserError, whole

_FINEST = 2.0**26  # a product of two of length one stays below float64's 2^53
_CHUNK = 256  # rows in float64 at a time, few enough to stay in a processor's cache
_BLOCK, _SCORES = 256, 1 << 26  # most queries at a time, and most scores
_GROUP = 16  # images of which the best is looked at first
_SMALL = 2 * _GROUP  # with fewer queries, or fewer images for each neighbour, a scan does not pay
_BELOW_ALL = -8.0
_FLUSHED = 1e-30  # more than a sum loses where a processor takes the least numbers of float32 for zero


class Neighbours(NamedTuple):
    """The most similar images of a bank, best first, equals in the order of the bank."""

    similarities: Tensor  # (m, k) float32: cosines
    indices: Tensor  # (m, k) int64


def search(queries: Tensor, bank: Tensor, k: int, *, own: Tensor | None = None) -> Neighbours:
    """The k nearest of a bank (n, d) for queries (m, d), on the queries' device. With zeros every cosine is 0.

    own (m,): where a query itself stands in the bank, and is left out; -1 for one that does not stand there. Only that
    place is left out: another image with the same vector stays. OptionError if the bank has fewer than k others,
    UserError if a vector is not finite or the widths differ.
    """
    _check(queries, bank, k, own)
    return _nearest(_unit(queries, "query"), _unit(bank.to(queries.device), "bank"), k, own)


def search_together(queries: Tensor, bank: Tensor, k: int, *, own: Tensor | None = None) -> Neighbours:
    """As `search`, each process for its part of the queries; every process calls it alike and gets the whole."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return search(queries, bank, k, own=own)
    # All queries are checked by all, so that no process waits for one that has failed.
    _check(queries, bank, k, own)
    rank, world = distributed.get_rank(), distributed.get_world_size()
    part = _unit(queries, "query").tensor_split(world)[rank]
    of_part = None if own is None else own.tensor_split(world)[rank]
    answers = _nearest(part, _unit(bank.to(queries.device), "bank"), k, of_part)
    every: list[Any] = [None] * world
    distributed.all_gather_object(every, tuple(answer.cpu() for answer in answers))
    return Neighbours(*(torch.cat(column).to(queries.device) for column in zip(*every, strict=True)))


def _check(queries: Tensor, bank: Tensor, k: int, own: Tensor | None) -> None:
    whole("k", k)
    if queries.shape[1] != bank.shape[1]:
        raise UserError(f"the bank's features have width {bank.shape[1]}, but the queries' {queries.shape[1]}")
    others = len(bank) - (own is not None)
    if k > others:
        besides = " besides the query itself" if own is not None else ""
        raise OptionError("k", k, f"must be at most {others}, the images of the bank{besides}")


def _unit(features: Tensor, which: str) -> Tensor:
    """Vectors of length one, of multiples of 1 / _FINEST: (n, d) -> (n, d) float32. Those of zeros stay zeros."""
    unit = torch.empty_like(features, dtype=torch.float32, memory_format=torch.contiguous_format)
    start = 0
    for rows, into in zip(features.split(_CHUNK), unit.split(_CHUNK), strict=True):
        exact = rows.double()
        length = exact.square().sum(1, keepdim=True).sqrt()
        if not length.isfinite().all():
            row = start + (~length.isfinite()).nonzero()[0, 0].item()
            raise UserError(f"the features of {which} image {row} are not finite")
        scale = _FINEST / torch.where(length > 0, length, 1)
        into.copy_((exact * scale).round_().div_(_FINEST))
        start += len(rows)
    return unit


def _nearest(queries: Tensor, bank: Tensor, k: int, own: Tensor | None) -> Neighbours:
    """`search` of what `_unit` gives."""
    if not len(queries):
        return Neighbours(queries.new_empty(0, k), torch.empty(0, k, dtype=torch.int64, device=queries.device))
    wanted = k if own is None else k + 1
    scan = None
    # On a GPU float64 is fast enough, and how the faster formats are summed is a setting, so their error has no bound.
    if queries.device.type == "cpu" and len(queries) >= _SMALL and len(bank) >= _SMALL * wanted:
        scan = _Scan(bank, torch.bfloat16 if _multiplies_bfloat16() else torch.float32)
    size = max(1, min(_BLOCK, _SCORES // len(bank)))
    blocks = queries.tensor_split(-(-len(queries) // size))
    answers = []
    for block in blocks:
        exact = block.double()
        pairs = None if scan is None else scan.candidates(exact, wanted)
        answers.append(_among_all(exact, bank, wanted) if pairs is None else _among(*pairs, exact, bank, wanted))
    similarities, indices = map(torch.cat, zip(*answers, strict=True))
    if own is not None:
        itself = indices == own.to(indices.device)[:, None]
        kept = itself.to(torch.uint8).argsort(dim=1, stable=True)[:, :k]
        similarities, indices = similarities.gather(1, kept), indices.gather(1, kept)
    return Neighbours(similarities.float(), indices)


def _multiplies_bfloat16() -> bool:
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def _among_all(queries: Tensor, bank: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k nearest of queries (b, d) in float64: similarities and images, both (b, k)."""
    every = torch.cat([queries @ rows.double().T for rows in bank.split(16 * _CHUNK)], dim=1)
    least = every.topk(k).values[:, -1:]
    above, equal = every > least, every == least
    taken = above | (equal & (equal.cumsum(1, dtype=torch.int32) <= k - above.sum(1, keepdim=True)))
    image = taken.nonzero()[:, 1].view(-1, k)
    similarity = every.gather(1, image)
    order = similarity.argsort(dim=1, descending=True, stable=True)
    return similarity.gather(1, order), image.gather(1, order)


def _among(query: Tensor, image: Tensor, queries: Tensor, bank: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The same, when they are among pairs of a query and an image, both (p,), which stand in order."""
    counts = torch.bincount(query, minlength=len(queries))
    # Query by query, what is gathered stays in the processor's cache.
    similarity = [
        bank.index_select(0, rows).double() @ one
        for one, images in zip(queries, image.split(counts.tolist()), strict=True)
        for rows in images.split(_CHUNK)
    ]
    place = torch.arange(int(counts.max()))
    table = queries.new_full((len(queries), len(place)), -torch.inf)
    table[place < counts[:, None]] = torch.cat(similarity)
    order = table.argsort(dim=1, descending=True, stable=True)[:, :k]
    return table.gather(1, order), image[(counts.cumsum(0) - counts)[:, None] + order]


class _Scan:
    """Scores of a bank that order it as similarities do, but for an error that is bounded.

    With c the mean of the bank, q·b = (q - c)·(b - c) + c·(b - c) + c·q. The last term is the same for all the bank and
    is left out; the one before is two numbers an image, its leading and its following digits. Without c the numbers are
    smaller, and so are the errors: similarities of one encoder's features are often all near 1.
    """

    def __init__(self, bank: Tensor, dtype: torch.dtype) -> None:
        n, d = bank.shape
        self.n, self.dtype = n, dtype
        self.centre = sum(rows.double().sum(0) for rows in bank.split(_CHUNK)) / n
        self.groups = -(-n // _GROUP)
        self.rows = torch.zeros(_GROUP * self.groups, d + 2, dtype=dtype)
        self.rows[n:, d] = _BELOW_ALL
        length = rounding = torch.zeros((), dtype=torch.float64)
        rest = torch.tensor(_FLUSHED, dtype=torch.float64)
        for rows, into in zip(bank.split(_CHUNK), self.rows[:n].split(_CHUNK), strict=True):
            exact = rows.double() - self.centre
            offset = exact @ self.centre
            into[:, :d] = exact
            into[:, d] = offset
            into[:, d + 1] = offset - into[:, d].double()
            low = into.double()
            length = torch.maximum(length, low.norm(dim=1).max())
            rounding = torch.maximum(rounding, (exact - low[:, :d]).norm(dim=1).max())
            rest = torch.maximum(rest, (offset - low[:, d:].sum(1)).abs().max())
        self.length, self.rounding, self.rest = length, rounding, rest

    def candidates(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor] | None:
        """Pairs of a query and an image, in order, among which are the k nearest of each query (b, d).

        None if so many might be the nearest that a comparison with the whole bank is faster.
        """
        exact = queries - self.centre
        low = F.pad(exact.to(self.dtype), (0, 2), value=1.0)
        # A group's images stand g apart, so that the best of each is an elementwise maximum of long rows.
        scores = (low @ self.rows.T).view(len(queries), _GROUP, self.groups)
        best = scores.amax(1)
        # As many groups as k have an image of this score or more, so as many images have.
        least = best.topk(k).values[:, -1].double()
        least = least - self._doubt(exact, low.double(), least)
        query, group = (best >= least[:, None]).nonzero(as_tuple=True)
        if len(query) > best.numel() // 2:
            return None
        hit, place = (scores[query, :, group] >= least[query, None]).nonzero(as_tuple=True)
        pairs = (query[hit] * self.n + place * self.groups + group[hit]).sort().values
        return pairs // self.n, pairs % self.n

    def _doubt(self, exact: Tensor, low: Tensor, score: Tensor) -> Tensor:
        """By how much an image of the k nearest may score less than `score` (b,), which k images reach: (b,).

        Cauchy and Schwarz for what rounding to few digits has lost, of this query and of the worst image; float32 sums
        of d + 2 products in any order; and the rounding of the score itself. All twice: the score that is reached may
        be too high, and that of the image too low.
        """
        width = low.shape[1]
        error = (exact - low[:, :-2]).norm(dim=1) * (self.length + self.rounding)
        error += low[:, :-2].norm(dim=1) * self.rounding + self.rest
        error += width * torch.finfo(torch.float32).eps * low.norm(dim=1) * self.length
        rounded = torch.finfo(self.dtype).eps * (score.abs() + 2 * error)
        return 1.01 * (2 * error + rounded)
