"""Evaluate image retrieval by nearest neighbours: recall, precision and mean average precision.

An image is relevant to a query if it has the class of the query or, for multi-label images, shares a class with it.

Shapes use m queries, n images searched, d width, k neighbours, r relevant images, b queries of a block.
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
from ssvit.options import UserError
from ssvit.randomness import permutation

_BLOCK = 1 << 25  # maximum number of similarities in memory


class Retrieval(retrieval_options.Retrieval, Probe):
    """Rank the training images by cosine similarity to a test image and score the ranking.

    Feature sets are chosen by the leave-one-out mAP of as many training images as queries.
    """

    chosen_by: ClassVar[str] = "leave-one-out mAP on the training images"
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
        numbers, precisions = self._measured(train, test, leave_one_out=False)
        columns = [f"{metric}@{k}" for metric in ("recall", "precision") for k in self.k]
        left_out = self._measured(train, train, leave_one_out=True)[1].mean().item() if choose else None
        return Result(
            scores={column: numbers[column] for column in (*columns, "mAP")},
            choice=None if left_out is None else (left_out,),
            numbers=numbers | {"leave_one_out": left_out},
            per_image=precisions,
        )

    def _measured(self, train: Features, test: Features, *, leave_one_out: bool) -> tuple[dict[str, float], Tensor]:
        """Return the metrics by name, and the average precision of each query."""
        rows = permutation(0, "retrieval, queries", len(test.values))[: self.queries].sort().values
        excluded = rows if leave_one_out else None
        queries, vectors = test.values[rows], train.values
        if self.standardize:
            queries, vectors = standardized(queries, vectors)
        queries, vectors = F.normalize(queries), F.normalize(vectors)
        query_labels, labels = test.known_labels[rows], train.known_labels
        nearest = search(queries, vectors, self.k[-1], excluded=excluded)
        numbers = measure(nearest, query_labels, labels, excluded=excluded, ks=self.k)
        precisions = average_precisions(queries, query_labels, vectors, labels, excluded=excluded)
        return numbers | {"mAP": precisions.mean().item()}, precisions


def measure(
    neighbours: Neighbours,
    query_labels: Tensor,
    labels: Tensor,
    *,
    excluded: Tensor | None = None,
    ks: Sequence[int] = (1, 5, 10),
) -> dict[str, float]:
    """Return recall@k, precision@k and map@k of neighbours, averaged over the queries.

    recall@k is 1 if one of the first k neighbours is relevant. precision@k is the fraction of relevant images among
    them. map@k is the mean of AP@k = sum over i <= k of precision@i [the i-th is relevant] / min(k, r). Queries without
    a class (-1) or without a relevant image are excluded.

    Args:
        neighbours: Neighbours of m queries; the index -1 is a missing neighbour.
        query_labels: Labels of the queries, (m,), or multi-label targets, (m, classes) bool.
        labels: Labels of the images searched, (n,), or multi-label targets, (n, classes) bool.
        excluded: Index of each query among the images searched, -1 if it is not among them; None if none is.
        ks: Numbers of neighbours, at most that of `neighbours`.

    Returns:
        The metrics in [0, 1] by name, and "queries", the number of queries measured.

    Raises:
        UserError: If no query can be measured.
    """
    hits, totals = [], []
    for rows, relevant in _relevant(query_labels, labels, excluded):
        indices = neighbours.indices[rows]
        hits.append(relevant.gather(1, indices.clamp(min=0)) & (indices >= 0))
        totals.append(relevant.sum(1))
    hit, total = torch.cat(hits).double(), torch.cat(totals)
    precision = hit.cumsum(1) / torch.arange(1, hit.shape[1] + 1)
    gain = (precision * hit).cumsum(1)
    results: dict[str, float] = {}
    for k in ks:
        results[f"recall@{k}"] = hit[:, :k].amax(1).mean().item()
        results[f"precision@{k}"] = precision[:, k - 1].mean().item()
        results[f"map@{k}"] = (gain[:, k - 1] / total.clamp(max=k)).mean().item()
    return results | {"queries": len(hit)}


def average_precisions(
    queries: Tensor, query_labels: Tensor, vectors: Tensor, labels: Tensor, *, excluded: Tensor | None = None
) -> Tensor:
    """Return the average precision over the full ranking for each query that `measure` counts.

    It is the sum over i of precision@i [the i-th is relevant] / r. All vectors are sorted for each query, which takes
    minutes for 10,000 queries and 50,000 images.

    Args:
        queries: Query vectors of length 1, (m, d).
        query_labels: Labels of the queries, see `measure`.
        vectors: Vectors of length 1 of the images searched, (n, d).
        labels: Labels of the images searched.
        excluded: Index of each query among the images searched, -1 if it is not among them; None if none is.
    """
    rank = torch.arange(1, len(vectors) + 1).double()
    precisions = []
    for rows, relevant in _relevant(query_labels, labels, excluded):
        similarities = queries[rows] @ vectors.T
        _exclude(similarities, rows, excluded, -math.inf)
        hit = relevant.gather(1, similarities.argsort(dim=1, descending=True, stable=True))
        precisions.append((hit.cumsum(1) / rank * hit).sum(1) / hit.sum(1))
    return torch.cat(precisions)


def _relevant(query_labels: Tensor, labels: Tensor, excluded: Tensor | None) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield blocks of queries that have relevant images.

    Args:
        query_labels: Labels of the queries, see `measure`.
        labels: Labels of the images searched.
        excluded: Index of each query among the images searched, which is not relevant to it, see `measure`.

    Yields:
        Indices of the queries, (b,), and which of the images searched are relevant to them, (b, n) bool.

    Raises:
        UserError: If no query has a relevant image.
    """
    is_empty = True
    for rows in torch.arange(len(query_labels)).split(max(1, _BLOCK // len(labels))):
        if is_multi_label(labels):
            relevant = query_labels[rows].float() @ labels.float().T > 0
        else:
            relevant = (query_labels[rows, None] == labels) & (labels >= 0)
        _exclude(relevant, rows, excluded, False)
        is_measured = relevant.any(1)
        if is_measured.any():
            is_empty = False
            yield rows[is_measured], relevant[is_measured]
    if is_empty:
        raise UserError("retrieval cannot be measured: no query shares its class with another image that is searched")


def _exclude(matrix: Tensor, rows: Tensor, excluded: Tensor | None, value: float) -> None:
    """Set the elements of a (b, n) matrix at which the queries `rows` are compared with themselves."""
    if excluded is not None:
        inside = excluded[rows] >= 0
        matrix[inside, excluded[rows][inside]] = value
