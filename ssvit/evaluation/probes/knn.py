"""Accuracy of the vote of the nearest training images: what frozen features are worth with nothing fitted to them.

One search for the most neighbours serves every protocol and every number of them.

Letters: n training images, m test images, b test images of a chunk, d width, k neighbours, c classes.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ssvit.evaluation import knn_rules as rules
from ssvit.evaluation.features import check_labels
from ssvit.evaluation.knn_rules import KnnProtocol
from ssvit.evaluation.neighbours import Neighbours, search_together
from ssvit.options import whole

_VOTES = 1 << 22  # votes held at a time
_NEVER = 1 << 30  # the rank of a class without a vote


@dataclass(frozen=True)
class Score:
    """Share of the test images whose class has most votes, and whose class is among the five that have most."""

    protocol: str
    k: int
    top1: float
    top5: float


@dataclass(frozen=True)
class Knn:
    """The scores, by protocol and then by k."""

    scores: tuple[Score, ...]


def knn(
    train: Tensor,
    train_labels: Tensor | None,
    test: Tensor,
    test_labels: Tensor | None,
    *,
    classes: int,
    protocols: Sequence[str] = tuple(rules.PROTOCOLS),
    k: Sequence[int] = rules.NEIGHBOURS,
    own: Tensor | None = None,
) -> Knn:
    """Accuracy on the test set of the vote of the k nearest training images by cosine, for each protocol and each k.

    train (n, d) and test (m, d): features, finite; their labels in [0, classes). own (m,): where a test image itself
    stands in the training set, to be left out; -1 if it does not. All processes call it alike, share the search, and
    get the same. UserError if a k is more than there are training images, or features or labels are amiss.
    """
    chosen, ks = rules.knn(protocols, k)
    whole("classes", classes)
    for which, features, labels in (("training", train, train_labels), ("test", test, test_labels)):
        check_labels(which, features, labels, classes, measure="a k-NN vote")
    nearest = search_together(test, train, ks[-1], own=own)
    nearest = Neighbours(*(column.cpu() for column in nearest))
    scores = vote(nearest, train_labels.cpu(), test_labels.cpu(), classes=classes, protocols=chosen, k=ks)
    return Knn(tuple(scores))


def vote(
    nearest: Neighbours,
    train_labels: Tensor,
    test_labels: Tensor,
    *,
    classes: int,
    protocols: Mapping[str, KnnProtocol],
    k: Sequence[int],
) -> Iterator[Score]:
    """The scores of neighbours that have been found, at least as many as the largest k; k rises. All on the CPU.

    Of classes with equal votes the one with the nearest image comes first. A class without a neighbour is never right,
    so for k < 5 the five are fewer.
    """
    size = max(1, _VOTES // max(classes, nearest.indices.shape[1]))
    labels = train_labels[nearest.indices]
    for name, protocol in protocols.items():
        ranks = [
            _ranks(similarities, voters, truth, classes, protocol.temperature, k)
            for similarities, voters, truth in zip(
                nearest.similarities.split(size), labels.split(size), test_labels.split(size), strict=True
            )
        ]
        for count, rank in zip(k, torch.cat(ranks, dim=1), strict=True):
            yield Score(name, count, *((rank < best).double().mean().item() for best in (1, 5)))


def _ranks(
    similarities: Tensor, voters: Tensor, truth: Tensor, classes: int, temperature: float | None, ks: Sequence[int]
) -> Tensor:
    """How many classes come before the true one, for each k: (b, k) twice and (b,) -> (len(ks), b)."""
    b, most = voters.shape
    if temperature is None:
        weights = torch.ones(b, most, dtype=torch.float64)
    else:
        # As the nearest has the weight 1, none is too large for float64; a common factor changes no order.
        weights = ((similarities.double() - similarities[:, :1].double()) / temperature).exp()
    place = torch.arange(most).expand(b, most)
    first = torch.full((b, classes), most).scatter_reduce(1, voters, place, "amin")
    of_truth = first.gather(1, truth[:, None])
    votes = torch.zeros(b, classes, dtype=torch.float64)
    ranks, counted = [], 0
    for k in ks:
        votes.scatter_add_(1, voters[:, counted:k], weights[:, counted:k])
        counted = k
        own = votes.gather(1, truth[:, None])
        before = (votes > own) | ((votes == own) & (first < of_truth))
        ranks.append(before.sum(1).masked_fill(of_truth[:, 0] >= k, _NEVER))
    return torch.stack(ranks)
