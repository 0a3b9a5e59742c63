"""Images flipped and turned, whole batches at a time, for data without an up: satellites, aeroplanes, microscopes.

Each class is called with images (b, c, h, w), uint8 or float32 in [0, 1], and slots (b,), and gives the same. An
image's parameters are hashed from (seed, slot, view). `geometry` returns the maps (b, 2, 3) of images of one size.

Letters: b images, c channels, h, w pixels.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ssvit.data.augment import geometry, turn_options
from ssvit.randomness import uniform


class VerticalFlip(turn_options.VerticalFlip):
    """Top and bottom change places."""

    def __call__(self, images: Tensor, slots: Tensor, seed: int, view: int = 0) -> Tensor:
        chosen = self.sample(seed, slots, view)
        return images.flip(2).where(chosen[:, None, None, None], images)

    def sample(self, seed: int, slots: Tensor, view: int = 0) -> Tensor:
        """slots (b,) -> which images are flipped (b,) bool."""
        return uniform(seed, "vertical flip", slots, 1, view)[:, 0] < self.probability

    def geometry(self, size: tuple[int, int], slots: Tensor, seed: int, view: int = 0) -> Tensor:
        return geometry.flipped(self.sample(seed, slots, view), size, axis=1)


class QuarterTurns:
    """Square images turned by 0, 90, 180 or 270 degrees, each as likely."""

    def sample(self, seed: int, slots: Tensor, view: int = 0) -> Tensor:
        """slots (b,) -> quarters of a counter-clockwise turn (b,) int64, 0 to 3."""
        return (4 * uniform(seed, "quarter turns", slots, 1, view)[:, 0]).long()

    def __call__(self, images: Tensor, slots: Tensor, seed: int, view: int = 0) -> Tensor:
        quarters = self.sample(seed, slots, view)
        turned = images.clone()
        for quarter in (1, 2, 3):
            rows = (quarters == quarter).nonzero()[:, 0]
            turned[rows] = images[rows].rot90(quarter, (2, 3))
        return turned

    def geometry(self, size: tuple[int, int], slots: Tensor, seed: int, view: int = 0) -> Tensor:
        return geometry.turned(90 * self.sample(seed, slots, view), size)


class Rotation(turn_options.Rotation):
    """A turn by an angle from -degrees to degrees."""

    def sample(self, seed: int, slots: Tensor, view: int = 0) -> Tensor:
        """slots (b,) -> degrees, counter-clockwise (b,) float64."""
        return self.degrees * (2 * uniform(seed, "rotation", slots, 1, view)[:, 0] - 1)

    def __call__(self, images: Tensor, slots: Tensor, seed: int, view: int = 0) -> Tensor:
        return rotate(images, self.sample(seed, slots, view))

    def geometry(self, size: tuple[int, int], slots: Tensor, seed: int, view: int = 0) -> Tensor:
        return geometry.turned(self.sample(seed, slots, view), size)


def rotate(images: Tensor, degrees: Tensor) -> Tensor:
    """Turned counter-clockwise about the middle, bilinear: (b, c, h, w), degrees (b,) -> (b, c, h, w).

    Where the turned image ends it is continued by its reflection, so that no black corner tells the angle.
    """
    h, w = images.shape[2:]
    angle = degrees.deg2rad()[:, None, None]
    cos, sin = angle.cos().float(), angle.sin().float()
    x = torch.arange(w, dtype=torch.float32, device=images.device) - (w - 1) / 2
    y = torch.arange(h, dtype=torch.float32, device=images.device)[:, None] - (h - 1) / 2
    # Which point is shown at (y, x), in halves of the image's sides from its middle.
    shown = torch.stack(((cos * x - sin * y) * (2 / w), (sin * x + cos * y) * (2 / h)), dim=-1)
    turned = F.grid_sample(images.float(), shown, padding_mode="reflection", align_corners=False)
    return turned if images.is_floating_point() else turned.round_().to(torch.uint8)
