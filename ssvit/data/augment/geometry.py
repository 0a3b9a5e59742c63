"""Map the points of augmented views to their positions in the source image.

A map is a matrix (2, 3) of float64 that takes a point (x, y, 1) of the view to its position (x, y) in the image. Both
are in pixels from the top left corner, so the centre of the first pixel is (0.5, 0.5). An augmentation is a function of
(seed, slot, view), so its method `geometry` recomputes the maps on demand, at no cost for batches without masks and
boxes. Points in the padding of a crop are mapped outside the image. Rotations and RandAugment fill the corners of a
view with reflected or black pixels; if the crop is smaller than the image, their points may be mapped into the image
(see `valid_pixels`).

Letters: b images.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ssvit.data.sources.base import IGNORED


def identity(count: int, device: torch.device) -> Tensor:
    """Return identity maps, for views that equal their images, (count, 2, 3)."""
    return torch.eye(2, 3, dtype=torch.float64, device=device).repeat(count, 1, 1)


def cropped(boxes: Tensor, size: tuple[int, int]) -> Tensor:
    """Return the maps of resized crops.

    Args:
        boxes: (b, 4), top, left, height and width in pixels.
        size: Height and width of the view.

    Returns:
        (b, 2, 3).
    """
    top, left, height, width = boxes.double().unbind(1)
    zero = torch.zeros_like(top)
    return torch.stack((width / size[1], zero, left, zero, height / size[0], top), dim=1).view(-1, 2, 3)


def flipped(flips: Tensor, size: tuple[int, int], axis: int) -> Tensor:
    """Return the maps of flips of images of one size.

    Args:
        flips: (b,) bool, which images are flipped.
        size: Height and width in pixels.
        axis: 0 for left to right, 1 for top to bottom.

    Returns:
        (b, 2, 3).
    """
    maps = identity(len(flips), flips.device)
    maps[flips, axis, axis] = -1
    maps[flips, axis, 2] = size[1 - axis]
    return maps


def rotated(degrees: Tensor, size: tuple[int, int]) -> Tensor:
    """Return the maps of counter-clockwise rotations about the centre: degrees (b,) float64 -> (b, 2, 3)."""
    angle, (y, x) = degrees.double().deg2rad(), (side / 2 for side in size)
    cos, sin = angle.cos(), angle.sin()
    return torch.stack((cos, -sin, x - cos * x + sin * y, sin, cos, y - sin * x - cos * y), dim=1).view(-1, 2, 3)


def composed(first: Tensor, second: Tensor) -> Tensor:
    """Return the maps of an augmentation followed by a second one: (b, 2, 3) each -> (b, 2, 3)."""
    linear = first[:, :, :2] @ second
    return torch.cat((linear[:, :, :2], linear[:, :, 2:] + first[:, :, 2:]), dim=2)


def valid_pixels(operations: Sequence[Tensor], slots: Tensor, size: tuple[int, int]) -> Tensor:
    """Return which pixels of views show a pixel of the crops to which operations were applied.

    Each pixel is traced back through the operations, to the nearest pixel before each of them. If this is outside the
    crop, the pixel of the view is reflected or black.

    Args:
        operations: Map (b, 2, 3) of each operation, in the order of application.
        slots: (b,) int64.
        size: Height and width of the crops and the views.

    Returns:
        (b, *size) bool.
    """
    points = _centres(size, slots.device)
    valid = torch.ones(len(slots), points.shape[1], dtype=torch.bool, device=slots.device)
    for maps in reversed(operations):
        columns, rows = (maps @ points).floor().unbind(1)
        valid &= _inside(columns, rows, size)
        points = torch.stack((columns + 0.5, rows + 0.5, torch.ones_like(rows)), dim=1)
    return valid.view(-1, *size)


def warped(masks: Sequence[Tensor] | Tensor, maps: Tensor, size: tuple[int, int]) -> Tensor:
    """Return the masks of augmented views by nearest-neighbour interpolation.

    Args:
        masks: Mask of each image, (h, w) uint8.
        maps: Maps from views to images, (b, 2, 3).
        size: Height and width of the views.

    Returns:
        (b, *size) uint8, `IGNORED` for pixels that are not in the image.
    """
    views = []
    for mask, (columns, rows) in zip(masks, (maps @ _centres(size, maps.device)).floor().long(), strict=True):
        height, width = mask.shape
        pixels = mask[rows.clamp(0, height - 1), columns.clamp(0, width - 1)]
        views.append(pixels.where(_inside(columns, rows, mask.shape), IGNORED).view(size))
    return torch.stack(views)


def _centres(size: tuple[int, int], device: torch.device) -> Tensor:
    """Return the points (x, y, 1) of the pixels of an image, (3, height * width) float64."""
    y, x = torch.meshgrid(*(torch.arange(side, device=device) + 0.5 for side in size), indexing="ij")
    return torch.stack((x, y, torch.ones_like(x))).flatten(1).double()


def _inside(columns: Tensor, rows: Tensor, size: Sequence[int]) -> Tensor:
    return (rows >= 0) & (rows < size[0]) & (columns >= 0) & (columns < size[1])
