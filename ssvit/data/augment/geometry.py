"""The geometry of augmentations: where the points of a view lie in its image.

A map is a matrix (2, 3) of float64 that takes a point (x, y, 1) of the view to its place (x, y) in the image. Both are
in pixels from the top left corner, so that the middle of the first pixel is (0.5, 0.5). What an augmentation does to an
image is a function of (seed, slot, view). Its method `geometry` therefore computes the maps of what it did when they
are needed, at no cost for batches without masks and boxes. Where a view shows reflected pixels, the point lies outside
the image.

Letters: b images.
"""

import torch
from torch import Tensor


def cropped(boxes: Tensor, size: tuple[int, int]) -> Tensor:
    """Return the maps of crops: boxes (b, 4) of top, left, height and width, resized to `size` -> (b, 2, 3)."""
    top, left, height, width = boxes.double().unbind(1)
    zero = torch.zeros_like(top)
    return torch.stack((width / size[1], zero, left, zero, height / size[0], top), dim=1).view(-1, 2, 3)


def flipped(flips: Tensor, size: tuple[int, int], axis: int) -> Tensor:
    """Return the maps of flips of images of one size, from left to right (axis 0) or from top to bottom (axis 1).

    Args:
        flips: (b,) bool, which images are flipped.
    """
    maps = torch.eye(2, 3, dtype=torch.float64, device=flips.device).repeat(len(flips), 1, 1)
    maps[flips, axis, axis] = -1
    maps[flips, axis, 2] = size[1 - axis]
    return maps


def turned(degrees: Tensor, size: tuple[int, int]) -> Tensor:
    """Return the maps of counter-clockwise turns about the middle of images of one size: (b,) float64 -> (b, 2, 3)."""
    angle, (y, x) = degrees.double().deg2rad(), (side / 2 for side in size)
    cos, sin = angle.cos(), angle.sin()
    return torch.stack((cos, -sin, x - cos * x + sin * y, sin, cos, y - sin * x - cos * y), dim=1).view(-1, 2, 3)


def composed(first: Tensor, second: Tensor) -> Tensor:
    """Return the maps of one change of an image and then another: (b, 2, 3) each -> (b, 2, 3)."""
    linear = first[:, :, :2] @ second
    return torch.cat((linear[:, :, :2], linear[:, :, 2:] + first[:, :, 2:]), dim=2)
