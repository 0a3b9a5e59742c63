"""The vote of the nearest training images as a probe of a run: DINO's, with one number of neighbours.

Letters: n training images, m test images, d width.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ssvit.evaluation import probing_rules as rules
from ssvit.evaluation.online import Answer, Probe
from ssvit.evaluation.probes.knn import knn
from ssvit.options import OptionError


class KnnProbe(Probe):
    """`ssvit.evaluation.probes.knn` by the protocol dino. Leave-one-out is the same vote on the training images."""

    def __init__(self, *, k: int = 20) -> None:
        rules.knn(k=k)
        self.k = k
        self.name, self.title = f"knn{k}", f"{k}-NN"

    def check(self, labels: Tensor, classes: Sequence[str]) -> None:
        """OptionError unless each image has k others to ask."""
        if len(labels) <= self.k:
            raise OptionError("k", self.k, f"must be below {len(labels)}, the training images")

    def measure(self, train: Tensor, train_labels: Tensor, test: Tensor, test_labels: Tensor, classes: int) -> Answer:
        """Top-1 on the test images, and on the training images, of which none votes for itself."""
        shared = {"classes": classes, "protocols": ["dino"], "k": [self.k]}
        found = knn(train, train_labels, test, test_labels, **shared)
        left_out = knn(train, train_labels, train, train_labels, own=torch.arange(len(train)), **shared)
        return Answer(found.scores[0].top1, (left_out.scores[0].top1,))
