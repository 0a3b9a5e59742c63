"""Classify frozen features by the weighted vote of the k nearest neighbours.

Shapes use m test images, b of them at a time, k neighbours, c classes.
"""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from ssvit.data.sources.base import is_multi_label
from ssvit.evaluation.features import Features, check
from ssvit.evaluation.neighbours import Neighbours, search_together
from ssvit.evaluation.neighbours_options import Flat
from ssvit.evaluation.precision import mean_average_precision
from ssvit.evaluation.probes import knn_options
from ssvit.evaluation.probes.base import Probe, Result, check_others
from ssvit.evaluation.probes.standard import standardized
from ssvit.options import OptionError

_VOTES = 1 << 22  # maximum number of votes in memory
_NEVER = 1 << 30  # the rank of a class without a vote


class Knn(knn_options.Knn, Probe):
    """Classify test images by the vote of the k nearest training images in cosine similarity.

    One distributed search serves each k. Feature sets are chosen by the leave-one-out accuracy on the training images,
    with the best k.
    """

    chosen_by: ClassVar[str] = "leave-one-out on the training images"
    multi_label: ClassVar[bool] = True

    @property
    def name(self) -> str:
        """Return the name, such as knn20, with the protocol if it is not DINO's and the index if it is not exact."""
        parts = [f"knn{self.k[-1]}", self.protocol * (self.protocol != "dino"), "standardized" * self.standardize]
        if not isinstance(self.index, Flat | None):
            parts.append(type(self.index).__name__.lower())
        return "_".join(filter(None, parts))

    def check_classes(self, train_labels: Tensor, test_labels: Tensor, classes: Sequence[str]) -> None:
        """Raise OptionError unless the largest k is below the number of training images."""
        check_others(self.k[-1], len(train_labels))

    def __call__(self, train: Features, test: Features, *, choose: bool = False) -> Result:
        """Return one column for each k: the top-1 accuracy on the test images.

        For multi-label images, the column is the mAP of the weighted class frequencies among the neighbours.
        """
        check(train, test, "a k-NN vote")
        numbers, per_image = self._measured(train, test)
        scores = next(iter(numbers.values()))
        if choose:
            left_out, _ = self._measured(train, train, torch.arange(len(train.values)))
            numbers["leave_one_out"] = next(iter(left_out.values()))
        return Result(
            scores={f"{k}-NN": share for k, share in scores.items()},
            choice=(max(numbers["leave_one_out"].values()),) if choose else None,
            choice_images=None if per_image is None else len(train.values),
            numbers=numbers,
            per_image=per_image,
        )

    def _measured(
        self, train: Features, test: Features, own: Tensor | None = None
    ) -> tuple[dict[str, dict[int, float]], Tensor | None]:
        """Return the top-1 and top-5 accuracy, or the mAP, for each k, and `Result.per_image`.

        Args:
            train: Features of the images searched.
            test: Features of the queries.
            own: Index of each query in `train`, which is excluded from its neighbours; None if the sets are disjoint.
        """
        queries, keys = standardized(test.values, train.values) if self.standardize else (test.values, train.values)
        kind = None if self.index is None else self.index.build()
        nearest = search_together(queries, keys, self.k[-1], own=own, kind=kind)
        if (nearest.indices < 0).any():
            raise OptionError("k", self.k[-1], "the index finds fewer neighbours of an image; index=flat finds all")
        temperature = knn_options.KNN_TEMPERATURES[self.protocol]
        labels, truth = train.known_labels.cpu(), test.known_labels.cpu()
        if is_multi_label(labels):
            shares = zip(self.k, class_shares(nearest, labels, temperature=temperature, k=self.k), strict=True)
            return {"mAP": {k: mean_average_precision(of_k, truth) for k, of_k in shares}}, None
        ranks = vote(nearest, labels, truth, classes=len(train.classes), temperature=temperature, k=self.k)
        tops = {f"top{n}": (ranks < n).double().mean(1).tolist() for n in (1, 5)}
        numbers = {name: dict(zip(self.k, values, strict=True)) for name, values in tops.items()}
        return numbers, (ranks[-1] < 1).double()


def class_shares(nearest: Neighbours, labels: Tensor, *, temperature: float | None, k: Sequence[int]) -> Tensor:
    """Return the weighted frequency of each class among the k nearest neighbours.

    It is computed on the CPU in float64 and rounded to float32, so that ties stay ties, which the mAP does not order.

    Args:
        nearest: Neighbours of m queries.
        labels: Multi-label targets of the images searched, (n, c) bool.
        temperature: Temperature of the weights exp(cosine / temperature); None for equal weights.
        k: Numbers of neighbours.

    Returns:
        Frequencies in [0, 1], (len(k), m, c).
    """
    size = max(1, _VOTES // (labels.shape[1] * nearest.indices.shape[1]))
    parts = zip(nearest.similarities.split(size), nearest.indices.split(size), strict=True)
    shares = []
    for similarities, indices in parts:
        weights, voters = _weights(similarities, temperature), labels[indices].double()
        of_ks = [
            (weights[:, None, :count] @ voters[:, :count])[:, 0] / weights[:, :count].sum(1)[:, None] for count in k
        ]
        shares.append(torch.stack(of_ks).float())
    return torch.cat(shares, dim=1)


def vote(
    nearest: Neighbours,
    train_labels: Tensor,
    test_labels: Tensor,
    *,
    classes: int,
    temperature: float | None,
    k: Sequence[int],
) -> Tensor:
    """Return the rank of the true class of each test image by votes, counted from 0.

    Ties are broken in favour of the class of the nearest image. A class without a vote never counts as correct, so that
    for k < 5 top-5 accuracy considers fewer than five classes.

    Args:
        nearest: Neighbours of m test images.
        train_labels: Class numbers of the training images, (n,).
        test_labels: Class numbers of the test images, (m,).
        classes: Number of classes.
        temperature: Temperature of the weights exp(cosine / temperature); None for equal weights.
        k: Numbers of neighbours, ascending.

    Returns:
        Number of classes ranked above the true one, (len(k), m).
    """
    size = max(1, _VOTES // max(classes, nearest.indices.shape[1]))
    columns = (nearest.similarities, train_labels[nearest.indices], test_labels)
    parts = zip(*(column.split(size) for column in columns), strict=True)
    ranks = [_ranks(similar, voters, of_part, classes, temperature, k) for similar, voters, of_part in parts]
    return torch.cat(ranks, dim=1)


def _weights(similarities: Tensor, temperature: float | None) -> Tensor:
    """Return the weights of the neighbours' votes, (b, k) float64."""
    # Weights relative to that of the nearest neighbour cannot overflow; a common factor does not change the ranking.
    below = similarities.double() - similarities[:, :1].double()
    return torch.ones_like(below) if temperature is None else (below / temperature).exp()


def _ranks(
    similarities: Tensor, voters: Tensor, truth: Tensor, classes: int, temperature: float | None, ks: Sequence[int]
) -> Tensor:
    """Return the number of classes ranked above the true one for each k: (b, k) twice and (b,) -> (len(ks), b)."""
    b, most = voters.shape
    weights = _weights(similarities, temperature)
    place = torch.arange(most).expand(b, most)
    first = torch.full((b, classes), most).scatter_reduce(1, voters, place, "amin")
    of_truth = first.gather(1, truth[:, None])
    votes = torch.zeros(b, classes, dtype=torch.float64)
    ranks, counted = [], 0
    for k in ks:
        votes.scatter_add_(1, voters[:, counted:k], weights[:, counted:k])
        counted = k
        true = votes.gather(1, truth[:, None])
        before = (votes > true) | ((votes == true) & (first < of_truth))
        ranks.append(before.sum(1).masked_fill(of_truth[:, 0] >= k, _NEVER))
    return torch.stack(ranks)
