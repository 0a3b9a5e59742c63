"""Images of one size, held in memory as one tensor.

Letters: n images, c channels, h, w pixels.
"""

import hashlib
from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from ssvit.data.sources.base import Labels, Source, checked_labels


class Memory(Source):
    """Images in memory.

    Args:
        images: (n, c, h, w) uint8, or float32 in [0, 1].
        labels: (n,) class indices, (n, k) bool, or None.
        classes: Class names.
        masks: (n, h, w) uint8, or None.
        mask_classes: Names of the classes of the masks.

    Raises:
        UserError: A label is out of range.
        ValueError: The images have another shape or dtype.
    """

    in_memory: Tensor

    def __init__(
        self, images: Tensor, labels: Labels = None, classes: Sequence[str] = (), *, masks: Tensor | None = None,
        mask_classes: Sequence[str] = (),
    ) -> None:  # fmt: skip
        if images.ndim != 4 or images.dtype not in (torch.uint8, torch.float32):
            expected = "images must be (n, c, h, w), uint8 or float32"
            raise ValueError(f"{expected}, not {tuple(images.shape)} {images.dtype}")
        self.in_memory = images.contiguous()
        self.labels = checked_labels(labels, len(images), classes)
        self.classes, self.masks, self.mask_classes = tuple(classes), masks, tuple(mask_classes)

    def __len__(self) -> int:
        return len(self.in_memory)

    def read(self, index: int) -> Tensor:
        """Return one image, (c, h, w)."""
        return self.in_memory[index]

    def mask(self, index: int) -> Tensor | None:
        """Return the mask of an image, (h, w) uint8, or None without masks."""
        return None if self.masks is None else self.masks[index]

    def content(self, index: int) -> str:
        """Return a checksum of the pixels of an image."""
        return hashlib.sha256(self.in_memory[index].numpy().data).hexdigest()[:32]

    @cached_property
    def fingerprint(self) -> str:
        """Return the sha256 of the shape and the pixels."""
        digest = hashlib.sha256(str(tuple(self.in_memory.shape)).encode())
        digest.update(self.in_memory.numpy().data)
        return digest.hexdigest()

    def take(self, indices: Tensor) -> "Memory":
        """Return the source of the images at `indices`, in that order."""
        labels, masks = (None if values is None else values[indices] for values in (self.labels, self.masks))
        return Memory(self.in_memory[indices], labels, self.classes, masks=masks, mask_classes=self.mask_classes)
