"""Crops, flips and resizing, followed by the augmentations of a training crop.

Images are uint8, or float32 in [0, 1] (written uint8 below), and keep their dtype. A crop is called with a list of
images of different sizes, each (c, h, w), or with one tensor (b, c, h, w), which is processed as a batch on its device;
and with slots (b,), a seed and a view, from which the randomness of each image is hashed. It returns
(b, c, *size) uint8.

Letters: b images, c channels, h, w pixels, k taps of a resampling filter.
"""

import math
from collections.abc import Sequence
from functools import lru_cache, reduce

import torch
import torch.nn.functional as F
from torch import Tensor

from ssvit.data.augment import geometry
from ssvit.data.augment import options as crop_options
from ssvit.data.augment.changes import TRIES, enabled, first_fit
from ssvit.data.sources.base import IGNORED
from ssvit.engine.randomness import uniform
from ssvit.errors import UserError

_CHUNK = 1 << 18  # values processed at a time on a CPU, so that they stay in its cache
_TABLE = 1 << 18  # maximum number of entries of a cached table of filters


class RandomCrop:
    """A training crop followed by the augmentations that its options enable.

    Args:
        options: The options.

    Attributes:
        size: Height and width of a crop.
        bytes_per_image: Bytes of a crop.
        changes: Augmentations after the crop whose option is not 0.
    """

    def __init__(self, options: crop_options.RandomCrop) -> None:
        self.options, self.size, self.bytes_per_image = options, options.size, options.bytes_per_image
        self.changes = enabled(options)

    def crop(self, images: Tensor | Sequence[Tensor], slots: Tensor, seed: int, view: int = 0) -> Tensor:
        """Crop and flip images, without further augmentations.

        Args:
            images: (b, c, h, w), or a list of (c, h, w).
            slots: (b,) int64.
            seed: Seed of the run.
            view: Number of the view.

        Returns:
            (b, c, *size).
        """
        raise NotImplementedError

    def __call__(self, images: Tensor | Sequence[Tensor], slots: Tensor, seed: int, view: int = 0) -> Tensor:
        """Return one view of each image, (b, c, *size); arguments as for `crop`."""
        out = self.crop(images, slots, seed, view)
        for change in self.changes:
            out = change(out, slots, seed, view)
        return out

    def sample(self, seed: int, slots: Tensor, sides: Tensor, view: int = 0) -> tuple[Tensor, Tensor]:
        """Sample crop boxes and flips; arguments as for `geometry`.

        Returns:
            Boxes (b, 4) int64, top, left, height and width of each crop in pixels, and flips (b,) bool.
        """
        raise NotImplementedError

    def crop_geometry(self, sides: Tensor, slots: Tensor, seed: int, view: int = 0) -> Tensor:
        """Return the maps (b, 2, 3) of crop and flip, without further augmentations; arguments as for `geometry`."""
        boxes, flips = self.sample(seed, slots, sides, view)
        return geometry.composed(geometry.cropped(boxes, self.size), geometry.flipped(flips, self.size, axis=0))

    def geometry(self, sides: Tensor, slots: Tensor, seed: int, view: int = 0) -> Tensor:
        """Return the maps from views to their images; see `ssvit.data.augment.geometry`.

        Args:
            sides: (b, 2), height and width of each image.
            slots: (b,) int64.
            seed: Seed of the run.
            view: Number of the view.

        Returns:
            (b, 2, 3).
        """
        maps = self.crop_geometry(sides, slots, seed, view)
        return reduce(geometry.composed, self._operations(slots, seed, view), maps)

    def valid_pixels(self, slots: Tensor, seed: int, view: int = 0) -> Tensor:
        """Return which pixels of views show a pixel of the crop, instead of a reflected or black pixel.

        Args:
            slots: (b,) int64.
            seed: Seed of the run.
            view: Number of the view.

        Returns:
            (b, *size) bool.
        """
        return geometry.valid_pixels(self._operations(slots, seed, view), slots, self.size)

    def _operations(self, slots: Tensor, seed: int, view: int) -> list[Tensor]:
        """Return the maps (b, 2, 3) of each operation after the crop."""
        return [maps for change in self.changes for maps in change.geometry(self.size, slots, seed, view)]


class InceptionCrop(RandomCrop):
    """A resized, flipped crop of random area and aspect ratio: torchvision's RandomResizedCrop up to one grey level.

    The authors' code uses TensorFlow's crop (vit_jax: input_pipeline.py): it samples a side and the aspect ratio
    uniformly, instead of the area and the logarithm of the ratio; it falls back to the entire image; and it does not
    antialias.
    """

    options: crop_options.InceptionCrop

    def sample(self, seed: int, slots: Tensor, sides: Tensor, view: int = 0) -> tuple[Tensor, Tensor]:
        """Sample boxes: the first of ten attempts that fits into the image, else the largest centred one of a ratio."""
        numbers, sides = uniform(seed, "inception crop", slots, 2 * TRIES + 3, view), sides.double()
        h, w, fits = first_fit(numbers, sides, sides, self.options.scale, self.options.ratio)
        (heights, widths), (low, high) = sides.unbind(1), self.options.ratio
        h = h.where(fits, torch.minimum(heights, (widths / low).round()))
        w = w.where(fits, torch.minimum(widths, (heights * high).round()))
        free = torch.stack((heights - h, widths - w), dim=1)
        start = (numbers[:, -3:-1] * (free + 1)).where(fits[:, None], free / 2).floor()
        return torch.cat((start, h[:, None], w[:, None]), dim=1).long(), numbers[:, -1] < self.options.flip

    def crop(self, images: Tensor | Sequence[Tensor], slots: Tensor, seed: int, view: int = 0) -> Tensor:
        """Crop, resize and flip images."""
        shapes = [images.shape[2:]] if isinstance(images, Tensor) else [image.shape[1:] for image in images]
        sides = torch.tensor(shapes, device=slots.device).expand(len(images), 2)
        boxes, flips = self.sample(seed, slots, sides, view)
        if isinstance(images, Tensor):
            return resample(images, boxes, flips, self.size)
        cropped = []
        for image, (top, left, h, w), flip in zip(images, boxes.tolist(), flips.tolist(), strict=True):
            resized = resize(image[None, :, top : top + h, left : left + w], self.size)[0]
            cropped.append(resized.flip(-1) if flip else resized)
        return torch.stack(cropped)


class ShiftCrop(RandomCrop):
    """A random crop of the image with reflection padding of `padding` pixels, and a flip: usual for CIFAR.

    If a crop is larger than the padded image, the largest crop of its shape that the image contains is enlarged.
    """

    options: crop_options.ShiftCrop

    def crop(self, images: Tensor | Sequence[Tensor], slots: Tensor, seed: int, view: int = 0) -> Tensor:
        """Crop and flip images.

        Args:
            images: (b, c, h, w), or a list of (c, h, w).
            slots: (b,) int64.
            seed: Seed of the run.
            view: Number of the view.

        Raises:
            UserError: An image is too small for its padding.
        """
        if not isinstance(images, Tensor):
            return torch.cat([self.crop(image[None], slots[i : i + 1], seed, view) for i, image in enumerate(images)])
        b, c, h, w = images.shape
        padding = self.options.padding
        if padding >= min(h, w):
            raise UserError(f"an image of {w}x{h} pixels is too small for padding={padding}")
        boxes, flips = self.sample(seed, slots, torch.tensor([[h, w]], device=slots.device), view)
        size = boxes[0, 2:].tolist()
        rows, columns = (self._positions(boxes[:, axis], size[axis], side) for axis, side in enumerate((h, w)))
        columns = columns.flip(1).where(flips[:, None], columns)
        taken = images.reshape(b * c * h, w).index_select(0, _flat_rows(rows[:, :, None], c, h).flatten())
        taken = taken.view(b, c, -1, w).gather(3, columns[:, None, None].expand(-1, c, rows.shape[1], -1))
        return resize(taken, self.size)

    def sample(self, seed: int, slots: Tensor, sides: Tensor, view: int = 0) -> tuple[Tensor, Tensor]:
        """Sample boxes, whose top and left may be in the padding."""
        numbers = uniform(seed, "shift crop", slots, 3, view)
        size, padded = torch.tensor(self.size, device=slots.device), sides + 2 * self.options.padding
        largest = (size * (sides / size).amin(1, keepdim=True)).round().long().clamp(min=1)
        box = largest.where((padded < size).any(1, keepdim=True), size)
        start = (numbers[:, :2] * (padded - box + 1)).long() - self.options.padding
        return torch.cat((start, box.expand_as(start)), dim=1), numbers[:, 2] < self.options.flip

    @staticmethod
    def _positions(start: Tensor, crop: int, n: int) -> Tensor:
        """Return the source pixel, of n with reflection, of each pixel of a crop along an axis: (b,) -> (b, crop)."""
        position = start[:, None] + torch.arange(crop, device=start.device)
        return (n - 1) - ((n - 1) - position.abs()).abs()


class ResizeCrop(RandomCrop):
    """A random crop, with a flip, of the image resized to a square: VTAB in Kolesnikov et al. 2020 (BiT), 2.2."""

    def __init__(self, options: crop_options.ResizeCrop) -> None:
        super().__init__(options)
        self._square = (options.resize, options.resize)
        self._shift = ShiftCrop(crop_options.ShiftCrop(size=options.size, padding=0, flip=options.flip))

    def crop(self, images: Tensor | Sequence[Tensor], slots: Tensor, seed: int, view: int = 0) -> Tensor:
        """Resize images to a square, then crop and flip them."""
        if isinstance(images, Tensor):
            images = resize(images, self._square)
        else:
            images = torch.cat([resize(image[None], self._square) for image in images])
        return self._shift.crop(images, slots, seed, view)

    def crop_geometry(self, sides: Tensor, slots: Tensor, seed: int, view: int = 0) -> Tensor:
        """Return the maps (b, 2, 3) of resize, crop and flip."""
        whole = torch.cat((torch.zeros_like(sides), sides), dim=1)
        square = sides.new_tensor(self._square).expand_as(sides)
        of_square = self._shift.crop_geometry(square, slots, seed, view)
        return geometry.composed(geometry.cropped(whole, self._square), of_square)


class CenterCrop:
    """The deterministic resize and centre crop of evaluation.

    Args:
        options: The options.

    Attributes:
        size: Height and width of a crop.
        bytes_per_image: Bytes of a crop.
    """

    def __init__(self, options: crop_options.CenterCrop) -> None:
        self.options, self.size, self.bytes_per_image = options, options.size, options.bytes_per_image

    def __str__(self) -> str:
        """Return the options, by which files of features identify the transform."""
        return str(self.options)

    def __call__(
        self, images: Tensor | Sequence[Tensor], slots: Tensor | None = None, seed: int = 0, view: int = 0
    ) -> Tensor:
        """Return the images resized and cropped, (b, c, *size); slots, seed and view have no effect."""
        if not isinstance(images, Tensor):
            return torch.cat([self(image[None]) for image in images])
        if images.shape[2:] == self.size:
            return images
        size = self.fitted(*images.shape[2:])
        out = images.new_empty(*images.shape[:2], *self.size)
        for part, target in zip(images.split(_chunk(images)), out.split(_chunk(images)), strict=True):
            target.copy_(_center(resize(part, size), self.size))
        return out

    def mask(self, mask: Tensor) -> Tensor:
        """Resize and crop the mask of an image, with nearest-neighbour interpolation: (h, w) -> (*size) uint8."""
        if mask.shape == self.size:
            return mask
        resized = F.interpolate(mask[None, None], size=self.fitted(*mask.shape), mode="nearest-exact")
        return IGNORED - _center(IGNORED - resized, self.size)[0, 0]  # padding is 0 before the subtraction

    def geometry(self, sides: Tensor, slots: Tensor | None = None, seed: int = 0, view: int = 0) -> Tensor:
        """Return the maps from views to their images: sides (b, 2) -> (b, 2, 3)."""
        boxes = []
        for h, w in sides.tolist():
            fitted = self.size if (h, w) == self.size else self.fitted(h, w)
            scales = h / fitted[0], w / fitted[1]
            offsets = (round(max(n - m, 0) / 2) - max(m - n, 0) // 2 for n, m in zip(fitted, self.size, strict=True))
            start = (offset * scale for offset, scale in zip(offsets, scales, strict=True))
            boxes.append([*start, *(m * scale for m, scale in zip(self.size, scales, strict=True))])
        return geometry.cropped(torch.tensor(boxes, dtype=torch.float64, device=sides.device), self.size)

    def fitted(self, h: int, w: int) -> tuple[int, int]:
        """Return the size before crop or padding; to cover, the longer side is rounded down as in torchvision."""
        if self.options.fit == "squash":
            return self.size
        if self.options.fit == "pad":
            factor = min(self.size[0] / h, self.size[1] / w)
            return max(1, round(h * factor)), max(1, round(w * factor))
        if self.options.resize is not None:
            short = self.options.resize
            size = (short, int(short * w / h)) if h <= w else (int(short * h / w), short)
            if size[0] >= self.size[0] and size[1] >= self.size[1]:
                return size
        if self.size[0] * w >= self.size[1] * h:
            return self.size[0], self.size[0] * w // h
        return self.size[1] * h // w, self.size[1]


def resize(images: Tensor, size: tuple[int, int]) -> Tensor:
    """Resize images with antialiased bilinear interpolation: (b, c, h, w) uint8 -> (b, c, *size) uint8."""
    if images.shape[2:] == size:
        return images
    if images.device.type == "cpu" or images.is_floating_point():
        return F.interpolate(images, size=size, mode="bilinear", antialias=True)
    return F.interpolate(images.float(), size=size, mode="bilinear", antialias=True).round_().to(torch.uint8)


def resample(images: Tensor, boxes: Tensor, flips: Tensor, size: tuple[int, int]) -> Tensor:
    """Crop, resize and flip all images of a batch in one pass.

    Rows are gathered and weighted by their few taps; columns, which are not contiguous in memory, use a matrix product.

    Args:
        images: (b, c, h, w) uint8.
        boxes: (b, 4), top, left, height and width in pixels.
        flips: (b,) bool.
        size: Height and width of the result.

    Returns:
        (b, c, *size) uint8.
    """
    b, c, h, w = images.shape
    top, left, box_h, box_w = boxes.unbind(1)
    rows, row_weights = _taps(top, box_h, torch.zeros_like(flips), h, size[0])
    columns, column_weights = _taps(left, box_w, flips, w, size[1])
    out = images.new_empty(b, c, *size)
    tensors = (images, rows, row_weights, columns, column_weights, out)
    for pixels, at, weights, to, matrix, target in zip(*(t.split(_chunk(images)) for t in tensors), strict=True):
        bags = _flat_rows(at, c, h).flatten(0, 2)
        weights = weights[:, None].expand(-1, c, -1, -1).flatten(0, 2)
        x = F.embedding_bag(bags, pixels.reshape(-1, w).float(), mode="sum", per_sample_weights=weights)
        matrix = x.new_zeros(len(at), size[1], w).scatter_(2, to, matrix)
        x = torch.bmm(x.view(-1, c * size[0], w), matrix.mT)
        x = x.view_as(target)
        # CPUs vectorise conversions to and from int16.
        target.copy_(x if out.is_floating_point() else x.round_().to(torch.int16))
    return out


def _taps(start: Tensor, length: Tensor, reverse: Tensor, n: int, out: int) -> tuple[Tensor, Tensor]:
    """Return pixels and weights of a triangle filter that resizes [start, start + length) of n pixels to `out`.

    The filter has the width of an output pixel, at least two input pixels, and is truncated at the ends of the box.

    Args:
        start: First pixel of the box, (b,).
        length: Length of the box in pixels, (b,).
        reverse: Whether to flip the output, (b,) bool.
        n: Number of input pixels.
        out: Number of output pixels.

    Returns:
        Positions (b, out, k) int64, distinct per output pixel, and weights (b, out, k) float32.
    """
    if n * n * out > _TABLE:
        return _filter(start, length, reverse, n, out)
    pixels, weights = _table(n, out, start.device)
    box = (reverse * n + start) * n + length - 1
    return pixels.index_select(0, box), weights.index_select(0, box)


@lru_cache(maxsize=8)
def _table(n: int, out: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the filters of all boxes in n pixels, (2 * n * n, out, k), ordered by direction, start and length."""
    ends = torch.arange(n, device=device)
    reverse = torch.tensor([False, True], device=device)
    reverse, start, length = torch.cartesian_prod(reverse.long(), ends, ends + 1).unbind(1)
    return _filter(start, torch.minimum(length, n - start), reverse.bool(), n, out)


def _filter(start: Tensor, length: Tensor, reverse: Tensor, n: int, out: int) -> tuple[Tensor, Tensor]:
    """Compute the filters of `_taps` without a table."""
    k = min(math.ceil(2 * max(n / out, 1)), n)
    start, length = start[:, None].float(), length[:, None].float()
    position = torch.arange(out, dtype=torch.float32, device=start.device)
    position = (out - 1 - position).where(reverse[:, None], position)
    scale = length / out
    reach = scale.clamp(min=1)
    center = start + (position + 0.5) * scale
    first = (center - reach + 0.5).floor().clamp(min=0, max=n - k)
    taps = first[:, :, None] + torch.arange(k, device=start.device)
    weights = (1 - (taps + 0.5 - center[:, :, None]).abs() / reach[:, :, None]).clamp_(min=0)
    weights *= (taps >= start[:, :, None]) & (taps < (start + length)[:, :, None])
    return taps.long(), weights / weights.sum(2, keepdim=True)


def _flat_rows(rows: Tensor, c: int, h: int) -> Tensor:
    """Convert rows of each image, (b, r, k), to rows of the batch as a matrix (b * c * h, w): (b, c, r, k)."""
    start = torch.arange(len(rows) * c, device=rows.device).view(-1, c, 1, 1) * h
    return rows[:, None] + start


def _center(images: Tensor, size: tuple[int, int]) -> Tensor:
    """Crop the centre of images, (..., h, w) -> (..., *size), after padding with 0 as torchvision does."""
    (h, w), (height, width) = images.shape[-2:], size
    rows, columns = max(height - h, 0), max(width - w, 0)
    if rows or columns:
        images = F.pad(images, (columns // 2, columns - columns // 2, rows // 2, rows - rows // 2))
    top, left = (round((side - cropped) / 2) for side, cropped in zip(images.shape[-2:], size, strict=True))
    return images[..., top : top + height, left : left + width]


def _chunk(images: Tensor) -> int:
    """Return the number of images per chunk: all on a GPU, or as many as fit into a CPU's cache."""
    return max(1, len(images) if images.device.type != "cpu" else _CHUNK // images[0].numel())
