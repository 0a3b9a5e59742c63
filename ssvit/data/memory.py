"""Images of one size, held in memory as one tensor.

Letters: n images, c channels, h, w pixels.
"""

import hashlib
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ssvit.data.source import checked_labels


class Memory:
    """Images of one size held as one tensor: images (n, c, h, w) uint8, labels (n,). UserError for a label amiss."""

    def __init__(self, images: Tensor, labels: Any = None, classes: Sequence[str] = ()) -> None:
        if images.ndim != 4 or images.dtype != torch.uint8:
            raise ValueError(f"images must be (n, c, h, w) uint8, not {tuple(images.shape)} {images.dtype}")
        self.images = images.contiguous()
        self.labels = checked_labels(labels, len(images), classes)
        self.classes = tuple(classes)

    def __len__(self) -> int:
        return len(self.images)

    @cached_property
    def fingerprint(self) -> str:
        """sha256 of the shape and the pixels."""
        digest = hashlib.sha256(str(tuple(self.images.shape)).encode())
        digest.update(self.images.numpy())
        return digest.hexdigest()

    def take(self, indices: Tensor) -> "Memory":
        """The set of the images at `indices`, in that order."""
        labels = None if self.labels is None else self.labels[indices]
        return Memory(self.images[indices], labels, self.classes)
