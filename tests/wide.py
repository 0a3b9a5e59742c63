"""Images of 12x16 pixels in 12 patches, and which of their patches a prediction depends on."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def pictures(count: int = 5) -> Tensor:
    """Smooth images, (count, 3, 12, 16) uint8."""
    coarse = torch.rand(count, 3, 3, 4, generator=torch.Generator().manual_seed(1))
    return (F.interpolate(coarse, size=(12, 16), mode="bilinear") * 255).to(torch.uint8)


def images_that_a_patch_changes(model: Any, images: Tensor, noise: Any) -> Iterator[Tensor]:
    """Yield for each of the 12 patches, (b,) bool, the images whose prediction changes with its pixels."""
    before = model.predict(images, noise)
    for place in range(12):
        changed, y, x = images.clone(), place // 4 * 4, place % 4 * 4
        changed[:, :, y : y + 4, x : x + 4] = 255 - changed[:, :, y : y + 4, x : x + 4]
        yield (model.predict(changed, noise) != before).flatten(1).any(1)
