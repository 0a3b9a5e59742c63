"""Accuracy of the vote of the nearest training images; nothing is fitted to the features.

Letters: m test images, b of them at a time, k neighbours, c classes.
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
        """Return top1 and top5, or mAP, by k, and `Result.per_image`; own: places of the test images in train."""
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


def vote(
    nearest: Neighbours,
    train_labels: Tensor,
    test_labels: Tensor,
    *,
    classes: int,
    temperature: float | None,
    k: Sequence[int],
) -> Tensor:
    """Return how many classes have more votes than that of each test image, for each k, rising: (len(k), m).

    Of classes with equal votes the one with the nearest image comes first. A class without a neighbour is never right,
    so for k < 5 the five are fewer.
    """
    size = max(1, _VOTES // max(classes, nearest.indices.shape[1]))
    columns = (nearest.similarities, train_labels[nearest.indices], test_labels)
    parts = zip(*(column.split(size) for column in columns), strict=True)
    ranks = [_ranks(similar, voters, of_part, classes, temperature, k) for similar, voters, of_part in parts]
    return torch.cat(ranks, dim=1)


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
