"""Test images that are nearly the same as a training image: crops, other colours, other compression, other sizes.

They are found by thumbnails without their mean brightness. On CIFAR-10, where people have listed such pairs (Barz and
Denzler 2020), thumbnails find twice as many as the features of an encoder at the same rate of false alarms, and the two
thresholds below flag 3.1 % of the test images; docs/evaluation.md has the figures.

Letters: b images, c channels, h, w pixels, n training images, m test images.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ssvit.evaluation.neighbours import search

_SIDE = 16  # pixels of a thumbnail
# The nearest training image is a near-duplicate if it is much nearer than the second (Lowe 2004, section 7.1), which
# holds for images of any kind; or if it is so near that the second may be a copy too.
RATIO, COSINE = 0.7, 0.95


class Thumbnails:
    """Images of 16 x 16 pixels without their mean, (b, c 16 16)."""

    identity = f"thumbnails of {_SIDE} x {_SIDE} without their mean"
    identities: Mapping[str, str] = {"thumbnails": identity}

    def __call__(self, images: Tensor) -> dict[str, Tensor]:
        """(b, c, h, w), uint8 or in [0, 1]; smaller ones are enlarged."""
        images = images.float() / (255 if images.dtype == torch.uint8 else 1)
        small = F.adaptive_avg_pool2d(images, _SIDE).flatten(1)
        return {"thumbnails": small - small.mean(1, keepdim=True)}


class Pair(NamedTuple):
    """The rows of a test image and of the training image that it is nearly the same as, and the cosine of both."""

    test: int
    train: int
    cosine: float


def duplicates(train: Tensor, test: Tensor) -> list[Pair]:
    """The pairs among thumbnails (n, d) and (m, d), the most alike first; each test image is there once or not."""
    if len(train) < 2:
        return []
    nearest = search(test, train, 2)
    cosines = nearest.similarities.double()
    first, second = (2 - 2 * cosines).clamp_min(0).sqrt().unbind(1)
    found = ((first < RATIO * second) | (cosines[:, 0] > COSINE)).nonzero()[:, 0]
    pairs = [Pair(row, int(nearest.indices[row, 0]), float(cosines[row, 0])) for row in found.tolist()]
    return sorted(pairs, key=lambda pair: -pair.cosine)


def without(values: Tensor, pairs: Sequence[Pair]) -> float:
    """The mean of values of test images, (m,), without those of the pairs; not a number if these are all."""
    kept = torch.ones(len(values), dtype=torch.bool)
    kept[[pair.test for pair in pairs]] = False
    return values[kept].mean().item()
