"""The common part of the linear probes: the held-out images, the scaling of features, and the scores of a layer.

Both choose on a held-out part of the training images; the test images are for the chosen layer alone. A layer is
(k, d + 1), its last column the bias, for which rows of features end in a 1. All is computed on the features' device and
in their precision.

Letters: n images, d width, k classes, r layers.
"""

import math
from collections.abc import Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ssvit.data.sources.base import is_multi_label
from ssvit.evaluation.features import Features, check
from ssvit.evaluation.precision import mean_average_precision
from ssvit.evaluation.probes import linear_options
from ssvit.evaluation.probes.base import Probe
from ssvit.options import OptionError, UserError
from ssvit.randomness import permutation

CHUNK = 1024  # rows at a time, few enough that what comes of them stays in a processor's cache


class Linear(linear_options.Linear, Probe):
    """A linear layer, chosen by its accuracy on the held-out images, as feature sets are; of equals, by its loss."""

    chosen_by: ClassVar[str] = "validation accuracy"  # or mAP, where an image may have several classes
    multi_label: ClassVar[bool] = True

    def check_classes(self, train_labels: Tensor, test_labels: Tensor, classes: Sequence[str]) -> None:
        """OptionError or UserError if no image can be held out, or a class is tested that is not trained.

        A class that an image may have beside others counts, trained or not: its average precision is that of no order.
        """
        if is_multi_label(train_labels):
            hold_out_by_class(train_labels, fraction=self.held_out, seed=self.seed)
            return
        untrained = sorted(set(test_labels.unique().tolist()) - set(train_labels.unique().tolist()))
        if untrained:
            named = f"{untrained[0]} ({classes[untrained[0]]})"
            raise UserError(f"class {named} has test images and no training image, so it cannot be learned")
        hold_out_by_class(train_labels, fraction=self.held_out, seed=self.seed)

    def split(self, train: Features, test: Features) -> tuple[Tensor, Tensor]:
        """The places of the images to train on and of those held out. UserError unless features and labels suffice."""
        check(train, test, "a linear probe")
        self.check_classes(train.known_labels, test.known_labels, train.classes)
        return hold_out_by_class(train.known_labels, fraction=self.held_out, seed=self.seed)


def hold_out_by_class(labels: Tensor, *, fraction: float, seed: int) -> tuple[Tensor, Tensor]:
    """Split the images into (train, held out), each class alike: labels (n,) -> places of both, ascending.

    Of each class the fraction is rounded, but at least one image is trained on and, of several, one held out. Where an
    image may have several classes, (n, k), they count as one. OptionError if nothing can be held out.
    """
    labels = labels.cpu()
    if is_multi_label(labels):
        labels = torch.zeros(len(labels), dtype=torch.int64)
    order = permutation(seed, "linear probe, held out", len(labels))
    order = order[labels[order].argsort(stable=True)]
    counts = torch.bincount(labels)
    of_class = counts[labels[order]]
    rank = torch.arange(len(labels)) - (counts.cumsum(0) - counts)[labels[order]]
    is_held_out = rank < (fraction * of_class.double()).round().clamp_min(1).minimum(of_class - 1)
    if not is_held_out.any():
        right = "no class has two training images, so none can be held out to choose the best probe by"
        raise OptionError("held_out", fraction, right)
    return order[~is_held_out].sort().values, order[is_held_out].sort().values


def is_right(logits: Tensor, labels: Tensor) -> Tensor:
    """Whether the highest logit is the label's, and all are finite: logits (r, k, b), labels (b,) -> (r, b)."""
    return (logits.argmax(1) == labels) & logits.isfinite().all(1)


def reported(layer: Tensor, rows: Tensor, labels: Tensor) -> tuple[float, Tensor | None]:
    """The figure of the chosen layer (k, d + 1) on rows (n, d + 1), and its `Result.per_image`: (n,) float64."""
    if is_multi_label(labels):
        (precision,), _ = score(layer[None], rows, labels)
        return precision, None
    parts = zip(rows.split(CHUNK), labels.split(CHUNK), strict=True)
    right = torch.cat([is_right((layer @ x.T)[None], y)[0] for x, y in parts]).double().cpu()
    return right.mean().item(), right


def score(layers: Tensor, rows: Tensor, labels: Tensor) -> tuple[list[float], list[float]]:
    """Accuracy and mean cross-entropy of each layer: layers (r, k, d + 1), rows (n, d + 1), labels (n,) -> r of each.

    An answer that is not finite is wrong, and the loss of a layer that gives one is infinite. With labels (n, k) bool:
    the mAP, and the binary cross-entropy summed over the classes.
    """
    if is_multi_label(labels):
        pairs = [score_several(rows @ layer.T, labels) for layer in layers]
        return [precision for precision, _ in pairs], [loss for _, loss in pairs]
    right = labels.new_zeros(len(layers))
    loss = rows.new_zeros(len(layers), dtype=torch.float64)
    for x, y in zip(rows.split(CHUNK), labels.split(CHUNK), strict=True):
        logits = (layers.flatten(0, 1) @ x.T).unflatten(0, layers.shape[:2])
        right += is_right(logits, y).sum(1)
        loss += F.cross_entropy(logits, y.expand(len(layers), -1), reduction="none").sum(1, dtype=torch.float64)
    losses = (loss / len(rows)).nan_to_num(nan=math.inf, posinf=math.inf)
    return (right.double() / len(rows)).tolist(), losses.tolist()


def score_several(logits: Tensor, labels: Tensor) -> tuple[float, float]:
    """mAP and loss of logits (n, k) for labels (n, k) bool, as `score`; 0 for an mAP of no class."""
    loss = F.binary_cross_entropy_with_logits(logits.double(), labels.double(), reduction="sum") / len(logits)
    finite = torch.where(logits.isfinite().all(1, keepdim=True), logits, -math.inf)
    precision = mean_average_precision(finite, labels)
    return (0.0 if math.isnan(precision) else precision), loss.nan_to_num(nan=math.inf, posinf=math.inf).item()


def best(accuracies: Sequence[float], losses: Sequence[float]) -> int:
    """The place of the highest accuracy; of equals, of the least loss; of these, the first."""
    return max(range(len(losses)), key=lambda place: (accuracies[place], -losses[place]))
