"""Classify frozen features by the weighted vote of the k nearest neighbours.

Shapes use m test images, k neighbours, c classes.
"""

from collections.abc import Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ssvit.data.sources.base import is_multi_label
from ssvit.errors import OptionError
from ssvit.evaluation.features import Features
from ssvit.evaluation.neighbours import check_k, search
from ssvit.evaluation.options import Flat
from ssvit.evaluation.precision import mean_average_precision
from ssvit.evaluation.probes.base import Probe, Result
from ssvit.evaluation.probes.options import Knn as KnnOptions
from ssvit.evaluation.probes.scaler import standardized


class Knn(Probe):
    """Classify test images by the vote of the k nearest training images in cosine similarity.

    One distributed search serves each k. Feature sets are chosen by the leave-one-out accuracy on the training images,
    with the largest k.
    """

    options: KnnOptions
    chosen_by: ClassVar[str] = "leave-one-out accuracy on the training images, with the largest k"
    multi_label: ClassVar[bool] = True

    @property
    def name(self) -> str:
        """Return the name, such as knn20, with its variant."""
        return "_".join(filter(None, [f"knn{self.options.k[-1]}", self.variant]))

    @property
    def variant(self) -> str:
        """Return "standardized", the index if it is not exact, or both."""
        index = self.options.index
        approximate = "" if isinstance(index, Flat | None) else type(index).__name__.lower()
        return "_".join(filter(None, ["standardized" * self.options.standardize, approximate]))

    def check_classes(self, train_labels: Tensor, test_labels: Tensor, classes: Sequence[str]) -> None:
        """Raise OptionError unless the largest k is below the number of training images."""
        check_k(self.options.k[-1], len(train_labels), excludes=True)

    def __call__(self, train: Features, test: Features, *, choose: bool = False) -> Result:
        """Return one column for each k: the accuracy on the test images.

        For multi-label images, the column is the mAP of the weighted class frequencies among the neighbours.
        """
        scores, correct = self._measured(train, test)
        numbers = {"test": scores}
        if choose:
            numbers["leave_one_out"], _ = self._measured(train, train, torch.arange(len(train.values)))
        return Result(
            scores={f"{k}-NN": share for k, share in scores.items()},
            choice=(numbers["leave_one_out"][self.options.k[-1]],) if choose else None,
            choice_images=None if correct is None else len(train.values),
            numbers=numbers,
            per_image=correct,
        )

    def _measured(
        self, train: Features, test: Features, excluded: Tensor | None = None
    ) -> tuple[dict[int, float], Tensor | None]:
        """Return the accuracy or the mAP for each k, and `Result.per_image`.

        Args:
            train: Features of the images searched.
            test: Features of the queries.
            excluded: Index of each query in `train`, which is excluded from its neighbours; None for other images.
        """
        options = self.options
        queries, keys = standardized(test.values, train.values) if options.standardize else (test.values, train.values)
        nearest = search(queries, keys, options.k[-1], excluded=excluded, index=options.index)
        if (nearest.indices < 0).any():
            expected = "must be smaller: the index finds fewer neighbours; index=flat finds all"
            raise OptionError("k", options.k[-1], expected)
        labels, truth = train.known_labels.cpu(), test.known_labels.cpu()
        weights = vote_weights(nearest.similarities, options.temperature)
        if is_multi_label(labels):
            shares = (class_shares(nearest.indices[:, :k], weights[:, :k], labels) for k in options.k)
            return {k: mean_average_precision(of_k, truth) for k, of_k in zip(options.k, shares, strict=True)}, None
        voters = labels[nearest.indices]
        correct = [(vote(voters[:, :k], weights[:, :k], len(train.classes)) == truth).double() for k in options.k]
        return {k: of_k.mean().item() for k, of_k in zip(options.k, correct, strict=True)}, correct[-1]


def vote_weights(similarities: Tensor, temperature: float | None) -> Tensor:
    """Return the weights exp(cosine / temperature) of the neighbours, (m, k) float64, or 1 without a temperature.

    They are relative to the weight of the nearest neighbour, so that they cannot overflow.
    """
    below = similarities.double() - similarities[:, :1].double()
    return torch.ones_like(below) if temperature is None else (below / temperature).exp()


def vote(voters: Tensor, weights: Tensor, classes: int) -> Tensor:
    """Return the class with the largest sum of weights; ties are won by the class of the nearest of these neighbours.

    Args:
        voters: Class numbers of the neighbours, nearest first, (m, k).
        weights: Weights of the neighbours, (m, k).
        classes: Number of classes.

    Returns:
        Class numbers, (m,).
    """
    votes = weights.new_zeros(len(voters), classes).scatter_add(1, voters, weights)
    winner = votes.gather(1, voters).argmax(1, keepdim=True)  # the first of equal values
    return voters.gather(1, winner)[:, 0]


def class_shares(indices: Tensor, weights: Tensor, labels: Tensor) -> Tensor:
    """Return the weighted mean of the neighbours' labels.

    Args:
        indices: Indices of the neighbours, (m, k).
        weights: Weights of the neighbours, (m, k).
        labels: Class frequencies or multi-label targets of the images searched, (n, c).

    Returns:
        Frequencies in [0, 1], (m, c) float32; rounding to float32 keeps ties, which the mAP does not order.
    """
    shares = F.embedding_bag(indices, labels.to(weights.dtype), per_sample_weights=weights, mode="sum")
    return (shares / weights.sum(1, keepdim=True)).float()
