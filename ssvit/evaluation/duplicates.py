"""Detect near-duplicates of training images among test images: compressed, resized, cropped or brighter copies.

The nearest training images of each test image by thumbnails are candidates. A candidate is confirmed by details: both
images are aligned, and the correlation of their details is computed that other images of the set do not explain
(`ssvit.evaluation.alignment`). The threshold is calibrated on the second candidates of the same set, so that images of
one kind, which all look alike, are not reported as copies. docs/evaluation.md has precision and recall.

Shapes use b images, c channels, h, w pixels, n training images, m test images, p pairs.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ssvit.evaluation.alignment import SIDE, Aligned, align, details, partial_correlation
from ssvit.evaluation.neighbours import search
from ssvit.models.encoder import scaled

_SIDE = 16  # pixels of a thumbnail
# Candidates: the nearest training image is similar, or clearly nearer than the second (ratio of the distances).
_COSINE, _RATIO = 0.85, 0.93
# Ranks of the training images that show what is typical of the set; duplicates are nearer. Further versions of a test
# image would explain all of its details, so the second ranks also replace those of the first that show such versions.
_OTHERS, _FARTHER = (9, 7, 5), (90, 70, 50)
_VERSION = 0.9  # correlation of such versions
_RAW, _LEAST, _MOST = 0.5, 0.7, 0.98  # minimum correlation, and limits of the minimum partial correlation
_QUANTILE, _ABOVE = 0.98, 0.2  # minimum correlation: a quantile of the second candidates, plus a margin
_SAMPLE = 500  # second candidates
_PAIRS = 256  # pairs that are aligned together


class Thumbnails:
    """Extract images of 16 x 16 pixels without their mean, (b, c 16 16)."""

    identities: Mapping[str, str] = {"thumbnails": f"thumbnails of {_SIDE} x {_SIDE} without their mean"}

    def __call__(self, images: Tensor) -> dict[str, Tensor]:
        """Return the thumbnails of images (b, c, h, w), uint8 or in [0, 1]; smaller images are enlarged."""
        small = F.adaptive_avg_pool2d(scaled(images), _SIDE).flatten(1)
        return {"thumbnails": small - small.mean(1, keepdim=True)}


class Grey:
    """Extract grey values of 64 x 64 pixels, (b, 64, 64) float32 in [0, 1]."""

    identities: Mapping[str, str] = {"grey": f"grey values of {SIDE} x {SIDE} pixels"}

    def __call__(self, images: Tensor) -> dict[str, Tensor]:
        """Return the grey values of images (b, c, h, w), uint8 or in [0, 1]."""
        grey = scaled(images).mean(1, keepdim=True)
        return {"grey": F.interpolate(grey, size=(SIDE, SIDE), mode="bicubic", antialias=True)[:, 0].clamp(0, 1)}


class Pair(NamedTuple):
    """Store the rows of a test image and of the training image that it nearly duplicates, and their correlation."""

    test: int
    train: int
    correlation: float


def duplicates(train: Tensor, test: Tensor, grey: Callable[[str, Tensor], Tensor]) -> list[Pair]:
    """Return the near-duplicates, at most one for each test image, most similar first.

    Args:
        train: Thumbnails of the training images, (n, d).
        test: Thumbnails of the test images, (m, d).
        grey: Returns the grey values, (b, 64, 64), of "train" or "test" images at rows (b,).
    """
    if len(train) < 2:
        return []
    train, test = F.normalize(train), F.normalize(test)
    typical = train.mean(0)
    nearest = search(test - typical, train - typical, min(len(train), max(_FARTHER) + 1))
    distances = (2 - 2 * nearest.similarities[:, :2].double()).clamp_min(0).sqrt()
    is_candidate = (nearest.similarities[:, 0] > _COSINE) | (distances[:, 0] < _RATIO * distances[:, 1])
    sample = torch.arange(0, len(test), -(-len(test) // _SAMPLE))
    rows = torch.cat([is_candidate.nonzero()[:, 0], sample]).unique()
    last = nearest.indices.shape[1] - 1
    ranks = [0, 1, *(min(rank, last) for rank in (*_OTHERS, *_FARTHER) if last >= min(_OTHERS))]
    shown, columns = nearest.indices[rows][:, ranks].unique(return_inverse=True)
    of_test, of_train = grey("test", rows), grey("train", shown)
    sampled, others = torch.isin(rows, sample), columns[:, 2:]
    second = _correlations(of_test[sampled], of_train, torch.cat([columns[:, 1:2], others], 1)[sampled])
    first = _correlations(of_test, of_train, torch.cat([columns[:, :1], others], 1))
    first[(of_test == of_train[columns[:, 0]]).flatten(1).all(1)] = 1  # also without details, in one colour
    minimum = (second.quantile(_QUANTILE, dim=0) + _ABOVE).clamp(_LEAST, _MOST)
    pairs = [
        Pair(int(rows[pair]), int(shown[columns[pair, 0]]), float(first[pair].max()))
        for pair in (is_candidate[rows] & (first > minimum).any(1)).nonzero()[:, 0].tolist()
    ]
    return sorted(pairs, key=lambda pair: -pair.correlation)


def _correlations(of_test: Tensor, of_train: Tensor, indices: Tensor) -> Tensor:
    """Return the partial correlations of pairs, (p, 2), given near and given farther images; 0 for a low correlation.

    Args:
        of_test: Grey values of the test images, (p, 64, 64).
        of_train: Grey values of training images, (n, 64, 64).
        indices: Training images of each pair, (p, 1 + 2 k): the candidate, and k near and k farther ones that are
            regressed out. A near one that is no version of the test image stands for the farther one.
    """
    correlations = torch.zeros(len(indices), 2)
    for part in torch.arange(len(indices)).split(_PAIRS):
        fixed = details(of_test[part])
        candidate = align(fixed, details(of_train[indices[part, 0]]))
        likely = (candidate.correlation > _RAW).nonzero()[:, 0]
        if len(likely):
            fixed, pairs = fixed[likely], part[likely]
            near, farther = indices[pairs, 1:].chunk(2, 1)
            others = [align(fixed, details(of_train[column])) for column in near.T]
            candidate = Aligned(*(values[likely] for values in candidate))
            correlations[pairs] = partial_correlation(fixed, candidate, others)[:, None]
            for other, column in zip(others, farther.T, strict=True):
                versions = other.correlation > _VERSION
                replaced = align(fixed[versions], details(of_train[column[versions]]))
                for values, new in zip(other, replaced, strict=True):
                    values[versions] = new
            correlations[pairs, 1] = partial_correlation(fixed, candidate, others)
    return correlations


def without(values: Tensor, pairs: Sequence[Pair]) -> float:
    """Return the mean of values of test images, (m,), without the images of the pairs; NaN if none remains."""
    kept = torch.ones(len(values), dtype=torch.bool)
    kept[[pair.test for pair in pairs]] = False
    return values[kept].mean().item()
