"""Evaluate image retrieval by nearest neighbours: recall, precision and mean average precision.

An image is relevant to a query if it has the class of the query or, for multi-label images, shares a class with it.

Shapes use m queries, n images searched, d width, r relevant images.
"""

import math
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ssvit.data.sources.base import is_multi_label
from ssvit.engine.randomness import permutation
from ssvit.errors import UserError
from ssvit.evaluation.features import Features
from ssvit.evaluation.neighbours import check_k
from ssvit.evaluation.probes.base import Probe, Result
from ssvit.evaluation.probes.options import Retrieval as RetrievalOptions
from ssvit.evaluation.probes.scaler import standardized

_BLOCK = 1 << 25  # maximum number of similarities in memory


class Retrieval(Probe):
    """Rank the training images by cosine similarity to a test image and score the ranking.

    Feature sets are chosen by the leave-one-out mAP of as many training images as queries.
    """

    options: RetrievalOptions
    chosen_by: ClassVar[str] = "leave-one-out mAP on the training images"
    is_accuracy: ClassVar[bool] = False
    multi_label: ClassVar[bool] = True

    @property
    def name(self) -> str:
        """Return the name, retrieval or retrieval_standardized."""
        return "_".join(filter(None, ["retrieval", self.variant]))

    @property
    def variant(self) -> str:
        """Return "standardized" or ""."""
        return "standardized" * self.options.standardize

    def check_classes(self, train_labels: Tensor, test_labels: Tensor, classes: Sequence[str]) -> None:
        """Raise OptionError unless the largest k is below the number of training images."""
        check_k(self.options.k[-1], len(train_labels), excludes=True)

    def __call__(self, train: Features, test: Features, *, choose: bool = False) -> Result:
        """Return recall@k and precision@k for each k, and the mAP, one column for each."""
        values = self._measured(train, test, leave_one_out=False)
        scores = {column: of_queries.mean().item() for column, of_queries in values.items()}
        left_out = self._measured(train, train, leave_one_out=True)["mAP"].mean().item() if choose else None
        return Result(
            scores=scores,
            choice=None if left_out is None else (left_out,),
            numbers={**scores, "queries": len(values["mAP"]), "leave_one_out": left_out},
            per_image=values["mAP"],
        )

    def _measured(self, train: Features, test: Features, *, leave_one_out: bool) -> dict[str, Tensor]:
        """Return recall@k, precision@k and average precision of each query that has a relevant training image.

        recall@k is 1 if one of the first k images is relevant. precision@k is the fraction of relevant images among
        them. The average precision is the sum over i of precision@i [the i-th is relevant] / r over the full ranking.
        All images are sorted for each query, which takes minutes for 10,000 queries and 50,000 images.

        Args:
            train: Features of the images searched.
            test: Features of the images among which the queries are.
            leave_one_out: Whether these are the same images, so that a query is not in its ranking.

        Returns:
            Values in [0, 1] for each measured query by column, float64.

        Raises:
            UserError: If no query has a relevant image.
        """
        sampled = permutation(0, "retrieval, queries", len(test.values))[: self.options.queries].sort().values
        queries, vectors = test.values[sampled], train.values
        if self.options.standardize:
            queries, vectors = standardized(queries, vectors)
        queries, vectors = F.normalize(queries), F.normalize(vectors)
        query_labels, labels = test.known_labels[sampled], train.known_labels
        rank = torch.arange(1, len(vectors) + 1)
        values: dict[str, list[Tensor]] = {}
        for rows in torch.arange(len(queries)).split(max(1, _BLOCK // len(vectors))):
            similarities = queries[rows] @ vectors.T
            if is_multi_label(labels):
                relevant = query_labels[rows].float() @ labels.float().T > 0
            else:
                relevant = query_labels[rows, None] == labels
            if leave_one_out:
                block = torch.arange(len(rows))
                similarities[block, sampled[rows]] = -math.inf
                relevant[block, sampled[rows]] = False
            hit = relevant.gather(1, descending(similarities))
            hit = hit[hit.any(1)].double()
            precision = hit.cumsum(1) / rank
            columns = {f"recall@{k}": hit[:, :k].amax(1) for k in self.options.k}
            columns |= {f"precision@{k}": precision[:, k - 1] for k in self.options.k}
            columns["mAP"] = (precision * hit).sum(1) / hit.sum(1)
            for column, of_block in columns.items():
                values.setdefault(column, []).append(of_block)
        joined = {column: torch.cat(blocks) for column, blocks in values.items()}
        if not len(joined["mAP"]):
            raise UserError(
                "retrieval cannot be measured: no query shares its class with another image that is searched"
            )
        return joined


def descending(similarities: Tensor) -> Tensor:
    """Return the stable order of each row by decreasing similarity: (m, n) float32 -> (m, n) int64.

    A similarity and its index form one integer, because NumPy sorts integers with vector instructions, in a fifth of
    the time of torch's stable argsort.
    """
    bits = (similarities + 0.0).view(torch.int32)  # -0.0 becomes 0.0
    ascending = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)  # integers in the order of the numbers
    keys = (~ascending).long() << 32 | torch.arange(similarities.shape[1])
    return torch.from_numpy(np.sort(keys.numpy(), axis=1)) & 0xFFFFFFFF
