"""Detect near-duplicates of training images among test images: crops, changes of colour, compression and size.

They are detected by thumbnails without their mean brightness. On CIFAR-10, where such pairs were annotated by hand
(Barz and Denzler 2020), thumbnails detect twice as many as the features of an encoder at the same rate of false alarms,
and the two thresholds below flag 3.1 % of the test images; see docs/evaluation.md.

Shapes use b images, c channels, h, w pixels, n training images, m test images.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ssvit.evaluation.features import scaled
from ssvit.evaluation.neighbours import search

_SIDE = 16  # pixels of a thumbnail
# The nearest training image is a near-duplicate if the ratio of its distance to that of the second nearest is low (Lowe
# 2004, section 7.1), a criterion that suits images of any kind, or if its cosine is high: both may then be copies.
RATIO, COSINE = 0.7, 0.95


class Thumbnails:
    """Extract images of 16 x 16 pixels without their mean, (b, c 16 16)."""

    identities: Mapping[str, str] = {"thumbnails": f"thumbnails of {_SIDE} x {_SIDE} without their mean"}

    def __call__(self, images: Tensor) -> dict[str, Tensor]:
        """Return the thumbnails of images (b, c, h, w), uint8 or in [0, 1]; smaller images are enlarged."""
        small = F.adaptive_avg_pool2d(scaled(images), _SIDE).flatten(1)
        return {"thumbnails": small - small.mean(1, keepdim=True)}


class Pair(NamedTuple):
    """Store the rows of a test image and of the training image that it nearly duplicates, and their cosine."""

    test: int
    train: int
    cosine: float


def duplicates(train: Tensor, test: Tensor) -> list[Pair]:
    """Return the near-duplicates among thumbnails (n, d) and (m, d), one for each test image, most similar first."""
    if len(train) < 2:
        return []
    nearest = search(test, train, 2)
    cosines = nearest.similarities.double()
    first, second = (2 - 2 * cosines).clamp_min(0).sqrt().unbind(1)
    rows = ((first < RATIO * second) | (cosines[:, 0] > COSINE)).nonzero()[:, 0]
    pairs = [Pair(row, int(nearest.indices[row, 0]), float(cosines[row, 0])) for row in rows.tolist()]
    return sorted(pairs, key=lambda pair: -pair.cosine)


def without(values: Tensor, pairs: Sequence[Pair]) -> float:
    """Return the mean of values of test images, (m,), without the images of the pairs; NaN if none remains."""
    kept = torch.ones(len(values), dtype=torch.bool)
    kept[[pair.test for pair in pairs]] = False
    return values[kept].mean().item()
