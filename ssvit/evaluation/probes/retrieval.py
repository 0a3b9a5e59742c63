"""Evaluate image retrieval by nearest neighbours: recall, precision and mean average precision.

Shapes use m queries, n images searched, d width, k neighbours, r relevant images (images searched of the query's
class).
"""

import math
from collections.abc import Iterator, Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ssvit.data.sources.base import is_multi_label
from ssvit.evaluation.features import Features, check
from ssvit.evaluation.neighbours import Neighbours, search
from ssvit.evaluation.probes import retrieval_options
from ssvit.evaluation.probes.base import Probe, Result, check_others
from ssvit.evaluation.probes.standard import standardized
from ssvit.options import OptionError, UserError, whole
from ssvit.randomness import permutation

_NONE = -1  # label of an image without a class; index of a missing neighbour
_BLOCK = 1 << 25  # maximum number of similarities in memory


class Retrieval(retrieval_options.Retrieval, Probe):
    """Rank the training images by cosine similarity to a test image and score the ranking.

    A training image is relevant if it has the class of the query or, for multi-label images, shares a class with it.
    Feature sets are chosen by the leave-one-out mAP of as many training images as queries.
    """

    chosen_by: ClassVar[str] = "the mAP of training images, each left out"
    is_accuracy: ClassVar[bool] = False
    multi_label: ClassVar[bool] = True

    @property
    def name(self) -> str:
        """Return the name, retrieval or retrieval_standardized."""
        return "retrieval" + "_standardized" * self.standardize

    def check_classes(self, train_labels: Tensor, test_labels: Tensor, classes: Sequence[str]) -> None:
        """Raise OptionError unless the largest k is below the number of training images."""
        check_others(self.k[-1], len(train_labels))

    def __call__(self, train: Features, test: Features, *, choose: bool = False) -> Result:
        """Return recall@k and precision@k for each k, and the mAP, one column for each."""
        check(train, test, "retrieval")
        measures, per_image = self._measures(train, test, leave_one_out=False)
        left_out = self._measures(train, train, leave_one_out=True)[0] if choose else None
        columns = (*(f"recall@{k}" for k in self.k), *(f"precision@{k}" for k in self.k), "mAP")
        return Result(
            scores={column: measures[column] for column in columns},
            choice=None if left_out is None else (left_out["mAP"],),
            numbers=measures if left_out is None else {**measures, "leave_one_out": left_out},
            per_image=per_image,
        )

    def _measures(self, train: Features, test: Features, *, leave_one_out: bool) -> tuple[dict[str, float], Tensor]:
        rows = permutation(0, "retrieval, queries", len(test.values))[: self.queries].sort().values
        own = rows if leave_one_out else None
        queries, vectors = test.values[rows], train.values
        if self.standardize:
            queries, vectors = standardized(queries, vectors)
        queries, vectors = F.normalize(queries), F.normalize(vectors)
        query_labels, labels = test.known_labels[rows], train.known_labels
        nearest = search(queries, vectors, self.k[-1], own=own)
        measures = measure(nearest, query_labels, labels, own=own, ks=self.k)
        precisions = average_precisions(queries, query_labels, vectors, labels, own=own)
        return measures | {"mAP": precisions.mean().item()}, precisions


def measure(
    neighbours: Neighbours,
    query_labels: Tensor,
    labels: Tensor,
    *,
    own: Tensor | None = None,
    ks: Sequence[int] = (1, 5, 10),
) -> dict[str, float]:
    """Return recall@k, precision@k and map@k of neighbours, averaged over the queries.

    recall@k is 1 if one of the first k neighbours is relevant. precision@k is the fraction of relevant images among
    them. map@k is the mean of AP@k = sum over i <= k of precision@i [the i-th is relevant] / min(k, r). Queries without
    a class (-1) or without a relevant image are excluded.

    Args:
        neighbours: Neighbours of m queries.
        query_labels: Labels of the queries, (m,), or multi-label targets, (m, classes) bool.
        labels: Labels of the images searched, (n,), or multi-label targets, (n, classes) bool.
        own: Index of each query among the images searched, -1 if it is not among them; None if none is.
        ks: Numbers of neighbours.

    Returns:
        The metrics in [0, 1] by name, and "queries", the number of queries measured.

    Raises:
        OptionError: If a k exceeds the number of neighbours searched for.
        UserError: If no query can be measured.
    """
    width = neighbours.indices.shape[1]
    for k in ks:
        whole("k", k)
        if k > width:
            raise OptionError("k", k, f"must be at most {width}, the neighbours that were searched for")
    answerable, total = _answerable(query_labels, labels, own)
    hit = _hits(neighbours.indices, query_labels, labels)[answerable].double()
    total = total[answerable]
    precision = hit.cumsum(1) / torch.arange(1, width + 1)
    gain = (precision * hit).cumsum(1)
    results: dict[str, float] = {}
    for k in ks:
        results[f"recall@{k}"] = hit[:, :k].amax(1).mean().item()
        results[f"precision@{k}"] = precision[:, k - 1].mean().item()
        results[f"map@{k}"] = (gain[:, k - 1] / total.clamp(max=k)).mean().item()
    return results | {"queries": len(hit)}


def average_precisions(
    queries: Tensor, query_labels: Tensor, vectors: Tensor, labels: Tensor, *, own: Tensor | None = None
) -> Tensor:
    """Return the average precision over the full ranking for each query that `measure` counts.

    It is the sum over i of precision@i [the i-th is relevant] / r. All vectors are sorted for each query, which takes
    minutes for 10,000 queries and 50,000 images.

    Args:
        queries: Query vectors of length 1, (m, d).
        query_labels: Labels of the queries, see `measure`.
        vectors: Vectors of length 1 of the images searched, (n, d).
        labels: Labels of the images searched.
        own: Index of each query among the images searched, -1 if it is not among them; None if none is.
    """
    answerable, total = _answerable(query_labels, labels, own)
    own = torch.full((len(queries),), _NONE) if own is None else own
    rank = torch.arange(1, len(vectors) + 1)
    precisions = []
    for part in answerable.nonzero()[:, 0].split(_rows(vectors)):
        similarities = queries[part] @ vectors.T
        inside = own[part] >= 0
        similarities[inside, own[part][inside]] = -math.inf
        order = similarities.argsort(dim=1, descending=True, stable=True)
        hit = _hits(order, query_labels[part], labels) & (order != own[part, None])
        precisions.append((hit.cumsum(1) / rank.double() * hit).sum(1) / total[part])
    return torch.cat(precisions)


def _answerable(query_labels: Tensor, labels: Tensor, own: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return which queries have relevant images, (m,) bool, and their number r, (m,) int64; UserError if none has."""
    if is_multi_label(labels):
        total = torch.cat([part.sum(1) for part in _shared(query_labels, labels)])
        if own is not None:
            total -= ((own >= 0) & query_labels.any(1)).long()
        return _checked(total > 0), total
    counts = torch.bincount(labels[labels != _NONE], minlength=max(1, int(query_labels.max()) + 1))
    total = counts[query_labels.clamp(min=0)]
    if own is not None:
        inside = own >= 0
        total[inside] -= (labels[own[inside]] == query_labels[inside]).long()
    return _checked((query_labels != _NONE) & (total > 0)), total


def _checked(answerable: Tensor) -> Tensor:
    if not answerable.any():
        raise UserError("no query has a class that another of the images searched has, so there is nothing to measure")
    return answerable


def _shared(query_labels: Tensor, labels: Tensor) -> Iterator[Tensor]:
    """Yield chunks of the (m, n) bool matrix of queries and images that share a class, from (m, k) and (n, k)."""
    searched = labels.float().T
    for part in query_labels.split(_rows(labels)):
        yield part.float() @ searched > 0


def _rows(labels: Tensor) -> int:
    """Return the number of queries of a chunk."""
    return max(1, _BLOCK // len(labels))


def _hits(indices: Tensor, query_labels: Tensor, labels: Tensor) -> Tensor:
    """Return whether each neighbour is relevant, (m, k) bool; the index -1 is a missing neighbour."""
    if is_multi_label(labels):
        parts = zip(_shared(query_labels, labels), indices.split(_rows(labels)), strict=True)
        return torch.cat([shared.gather(1, own.clamp(min=0)) & (own >= 0) for shared, own in parts])
    known = (indices >= 0) & (query_labels != _NONE)[:, None]
    return known & (labels[indices.clamp(min=0)] == query_labels[:, None])
