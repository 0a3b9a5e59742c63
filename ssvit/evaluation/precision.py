"""Compute average precision for multi-label classification, and its chance level.

Shapes use n images, k classes.
"""

import torch
from torch import Tensor

from ssvit.data.sources.base import is_multi_label, members
from ssvit.evaluation.statistics import chance


def average_precisions(scores: Tensor, truth: Tensor) -> Tensor:
    """Return the average precision of each class, the area under its precision-recall curve.

    It is the mean, over the images of the class, of the precision at their score, as in scikit-learn's
    `average_precision_score`. Images of equal scores share one threshold, so that a constant score gives the frequency
    of the class.

    Args:
        scores: Scores, (n, k). NaN ranks last.
        truth: Multi-label targets, (n, k) bool.

    Returns:
        Average precision, (k,) float64, NaN for a class without images.
    """
    ranked, order = scores.nan_to_num(nan=-torch.inf).sort(0, descending=True)
    hit = truth.gather(0, order)
    places = torch.arange(len(scores), device=scores.device)[:, None]
    is_last = torch.ones_like(hit)  # last of equal scores
    is_last[:-1] = ranked[:-1] != ranked[1:]
    last = torch.where(is_last, places, len(scores)).flip(0).cummin(0).values.flip(0)
    precision = hit.cumsum(0).gather(0, last) / (last + 1).double()
    return (precision * hit).sum(0) / hit.sum(0)


def mean_average_precision(scores: Tensor, truth: Tensor) -> float:
    """Return the mean of `average_precisions` over the classes that have images; NaN if none has."""
    return average_precisions(scores, truth).nanmean().item()


def share_of_class(truth: Tensor) -> float:
    """Return the mAP of a constant score, the mean frequency of the classes that have images in targets (n, k) bool."""
    shares = truth.double().mean(0)
    return shares[shares > 0].mean().item()


def chance_of(labels: Tensor, classes: int, *, balanced: bool = False) -> float:
    """Return the score of a model that ignores the image.

    Args:
        labels: Class numbers, (n,), or multi-label targets, (n, k) bool, for which it is the mAP of a random order.
        classes: Number of classes, also of those that the labels lack.
        balanced: Whether the model guesses each class equally often, instead of always the most frequent class. This is
            also chance for the balanced accuracy.
    """
    if is_multi_label(labels):
        return share_of_class(labels)
    return 1 / classes if balanced else chance(labels.tolist())


def balanced_accuracy(correct: Tensor, labels: Tensor) -> float:
    """Return the mean recall over the classes of labels (n,), from whether each prediction is correct, (n,)."""
    return torch.stack([correct[of_class].mean() for of_class in members(labels)]).mean().item()
