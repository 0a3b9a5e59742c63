"""Average precision of classes of which an image may have several, and what ignoring the images would give.

Letters: n images, k classes.
"""

import torch
from torch import Tensor

from ssvit.data.sources.base import is_multi_label
from ssvit.evaluation.statistics import chance

_HELD = 1 << 24  # numbers sorted at a time


def average_precisions(scores: Tensor, truth: Tensor) -> Tensor:
    """The area under each class's curve of precision by recall: (n, k) and (n, k) bool -> (k,) float64.

    AP = sum over images of the class of the precision at their score, over their number, as scikit-learn's
    `average_precision_score`: images of equal scores come together, so that a constant score has the class's share.
    NaN for a class without images. A score that is no number is the lowest.
    """
    size = max(1, _HELD // max(1, len(scores)))
    parts = zip(scores.split(size, 1), truth.split(size, 1), strict=True)
    return torch.cat([_average_precisions(score, of_class) for score, of_class in parts])


def _average_precisions(scores: Tensor, truth: Tensor) -> Tensor:
    ranked, order = scores.nan_to_num(nan=-torch.inf).sort(0, descending=True)
    hit = truth.gather(0, order)
    places = torch.arange(len(scores), device=scores.device)[:, None]
    is_last = torch.ones_like(hit)  # of equal scores
    is_last[:-1] = ranked[:-1] != ranked[1:]
    last = torch.where(is_last, places, len(scores)).flip(0).cummin(0).values.flip(0)
    precision = hit.cumsum(0).gather(0, last) / (last + 1).double()
    return (precision * hit).sum(0) / hit.sum(0)


def mean_average_precision(scores: Tensor, truth: Tensor) -> float:
    """The mean of `average_precisions` over the classes that have images; NaN if none has."""
    return average_precisions(scores, truth).nanmean().item()


def share_of_class(truth: Tensor) -> float:
    """The mAP of a constant score: the mean share of the classes that have images. (n, k) bool; NaN if none has."""
    shares = truth.double().mean(0)
    return shares[shares > 0].mean().item()


def chance_of(labels: Tensor) -> float:
    """The accuracy of always the most frequent class, (n,), or the mAP of a random order, (n, k)."""
    return share_of_class(labels) if is_multi_label(labels) else chance(labels.tolist())
