"""Banks: frozen features of the training and of the test images, read once for every measure, beside baselines.

Letters: n images of a bank, d width, p pairs of a test and a training image, c channels, h, w pixels.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ssvit.data.loader import evaluation_batches
from ssvit.data.source import Source
from ssvit.evaluation import significance
from ssvit.evaluation.features import Features
from ssvit.options import UserError


@dataclass(frozen=True)
class Bank(Features):
    """Features (n, d) of labelled images by several functions, and the images: a source, seen through a view."""

    labels: Tensor
    source: Source
    view: Any

    @classmethod
    def of(cls, read: Iterable[Features], source: Source, view: Any) -> "Bank":
        """The features of several functions side by side. UserError unless they are of the same pictures."""
        first, *others = read
        values = dict(first.values)
        for other in others:
            if not (torch.equal(other.places, first.places) and torch.equal(other.digests, first.digests)):
                raise UserError("the images have changed since features of them were kept: delete the folder cache=…")
            values |= other.values
        return cls(values, first.labels, first.places, first.digests, source, view)

    def __len__(self) -> int:
        return len(self.labels)

    def images(self, rows: Tensor) -> Tensor:
        """The pictures at some rows as the functions saw them: (b,) -> (b, c, h, w) uint8."""
        batches = evaluation_batches(self.source.take(self.places[rows]), self.view, batch_size=len(rows))
        return torch.cat([batch.images for batch in batches])

    def name(self, row: int) -> str:
        """What to call a picture: the path of its file, or its number among those that were measured."""
        return self.source.name(int(self.places[row]))


@dataclass(frozen=True)
class Banks:
    """Both banks, of the same feature sets; own: those of the encoder, in the order of layers; the others: baselines.

    part: what the images measured on are, test or validation.
    """

    own: tuple[str, ...]
    classes: tuple[str, ...]
    train: Bank
    test: Bank
    part: str = "test"

    @property
    def chance(self) -> float:
        """The share of the most frequent class of the images measured on."""
        return significance.chance(self.test.labels.tolist())

    def copies(self) -> list[tuple[int, int]]:
        """Test images that stand among the training images too, pixel for pixel: rows of both, the first of equals."""
        place: dict[tuple[int, ...], int] = {}
        for row, digest in enumerate(map(tuple, self.train.digests.tolist())):
            place.setdefault(digest, row)
        tested = enumerate(map(tuple, self.test.digests.tolist()))
        return [(row, place[digest]) for row, digest in tested if digest in place]
