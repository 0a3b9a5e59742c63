"""Accuracy of the vote of the nearest training images; nothing is fitted to the features.

Letters: m test images, b of them at a time, k neighbours, c classes.
"""

from collections.abc import Iterator, Sequence
from typing import ClassVar, NamedTuple

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

_VOTES = 1 << 22  # votes held at a time
_NEVER = 1 << 30  # the rank of a class without a vote


class Knn(knn_options.Knn, Probe):
    """The vote of the k nearest training images by cosine. One search, shared by processes, serves every k.

    The vote on the training images, of which none votes for itself, chooses among feature sets, by the best k.
    """

    chosen_by: ClassVar[str] = "leave-one-out on the training images"
    multi_label: ClassVar[bool] = True

    @property
    def name(self) -> str:
        """knn20; with the protocol's name where it is not DINO's, and the index's where it is not exact."""
        parts = [f"knn{self.k[-1]}", self.protocol * (self.protocol != "dino"), "standardized" * self.standardize]
        if not isinstance(self.index, Flat | None):
            parts.append(type(self.index).__name__.lower())
        return "_".join(filter(None, parts))

    def check_classes(self, train_labels: Tensor, test_labels: Tensor, classes: Sequence[str]) -> None:
        """OptionError unless each training image has so many others."""
        check_others(self.k[-1], len(train_labels))

    def __call__(self, train: Features, test: Features, *, choose: bool = False) -> Result:
        """A column for each k: the share of test images whose class has most votes.

        Where an image may have several classes: the mAP of the classes' shares among the neighbours, weighted as votes.
        """
        numbers: dict[str, dict[int, float]]
        left_out = (train, train, torch.arange(len(train.values)))
        if is_multi_label(train.known_labels):
            numbers = {"mAP": self._precisions(train, test)}
            if choose:
                numbers["leave_one_out"] = self._precisions(*left_out)
            figures, per_image = numbers["mAP"], None
        else:
            found = self._scores(train, test)
            numbers = {which: {k: getattr(one, which) for k, one in found.items()} for which in ("top1", "top5")}
            if choose:
                numbers["leave_one_out"] = {k: one.top1 for k, one in self._scores(*left_out).items()}
            figures, per_image = numbers["top1"], found[self.k[-1]].is_among(1).double()
        return Result(
            scores={f"{k}-NN": share for k, share in figures.items()},
            choice=(max(numbers["leave_one_out"].values()),) if choose else None,
            choice_images=len(train.values) if per_image is not None else None,
            numbers=numbers,
            per_image=per_image,
        )

    def _nearest(self, train: Features, test: Features, own: Tensor | None) -> Neighbours:
        check(train, test, "a k-NN vote")
        queries, keys = test.values, train.values
        if self.standardize:
            queries, keys = standardized(queries, keys)
        kind = None if self.index is None else self.index.build()
        nearest = search_together(queries, keys, self.k[-1], own=own, kind=kind)
        if (nearest.indices < 0).any():
            raise OptionError("k", self.k[-1], "the index finds fewer neighbours of an image; index=flat finds all")
        return nearest

    def _scores(self, train: Features, test: Features, own: Tensor | None = None) -> dict[int, "Score"]:
        """The score of each k."""
        nearest = self._nearest(train, test, own)
        temperature, classes = knn_options.KNN_PROTOCOLS[self.protocol].temperature, len(train.classes)
        labels = (train.known_labels.cpu(), test.known_labels.cpu())
        return dict(
            zip(self.k, vote(nearest, *labels, classes=classes, temperature=temperature, k=self.k), strict=True)
        )

    def _precisions(self, train: Features, test: Features, own: Tensor | None = None) -> dict[int, float]:
        """By k, the mAP of images that may have several classes."""
        nearest = self._nearest(train, test, own)
        truth, labels = test.known_labels.cpu(), train.known_labels.cpu()
        temperature = knn_options.KNN_PROTOCOLS[self.protocol].temperature
        shares = class_shares(nearest, labels, temperature=temperature, k=self.k)
        return {k: mean_average_precision(of_k, truth) for k, of_k in zip(self.k, shares, strict=True)}


def class_shares(nearest: Neighbours, labels: Tensor, *, temperature: float | None, k: Sequence[int]) -> Tensor:
    """The share of each class among the k nearest, weighted as votes, for each k: labels (n, c) bool -> (len(k), m, c).

    On the CPU, in float64 and then rounded to float32, so that equal shares stay equal, of which mAP makes no order.
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


class Score(NamedTuple):
    """How many classes have more votes than that of each test image: (m,)."""

    ranks: Tensor

    def is_among(self, count: int) -> Tensor:
        """Whether the class of a test image is among the `count` that have most votes: (m,) bool."""
        return self.ranks < count

    @property
    def top1(self) -> float:
        """Share of the test images whose class has most votes."""
        return self.is_among(1).double().mean().item()

    @property
    def top5(self) -> float:
        """Share of the test images whose class is among the five that have most."""
        return self.is_among(5).double().mean().item()


def vote(
    nearest: Neighbours,
    train_labels: Tensor,
    test_labels: Tensor,
    *,
    classes: int,
    temperature: float | None,
    k: Sequence[int],
) -> Iterator[Score]:
    """The scores for each k, rising, of at least as many neighbours as the largest. On the CPU.

    Of classes with equal votes the one with the nearest image comes first. A class without a neighbour is never right,
    so for k < 5 the five are fewer.
    """
    size = max(1, _VOTES // max(classes, nearest.indices.shape[1]))
    columns = (nearest.similarities, train_labels[nearest.indices], test_labels)
    parts = zip(*(column.split(size) for column in columns), strict=True)
    ranks = torch.cat(
        [_ranks(similar, voters, truth, classes, temperature, k) for similar, voters, truth in parts], dim=1
    )
    yield from map(Score, ranks)


def _weights(similarities: Tensor, temperature: float | None) -> Tensor:
    """Of the neighbours' votes, (b, k) float64."""
    # As the nearest has the weight 1, none is too large for float64; a common factor changes no order.
    below = similarities.double() - similarities[:, :1].double()
    return torch.ones_like(below) if temperature is None else (below / temperature).exp()


def _ranks(
    similarities: Tensor, voters: Tensor, truth: Tensor, classes: int, temperature: float | None, ks: Sequence[int]
) -> Tensor:
    """How many classes come before the true one, for each k: (b, k) twice and (b,) -> (len(ks), b)."""
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
