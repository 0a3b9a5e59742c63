"""Crops, flips and resizing, and the changes of a training crop one after the other.

Images are uint8, or float32 in [0, 1] (written uint8 below), and stay of that type.
A crop is called with a list of images of differing sizes, each (c, h, w), or with one tensor (b, c, h, w), which is
worked on as a whole, on the device where it lies; and with slots (b,), a seed and a view, of which each image's
randomness is hashed. It returns (b, c, *size) uint8.

Letters: b images, c channels, h, w pixels, k taps of a resampling filter.
"""

import math
from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.transforms.v2.functional import center_crop_image

from ssvit.config.declaration import select
from ssvit.data.augment import crop_options, geometry
from ssvit.data.augment.changes import (
    ColorJitter,
    GaussianBlur,
    Grayscale,
    QuarterTurns,
    RandAugment,
    Rotation,
    Solarize,
    VerticalFlip,
)  # fmt: skip
from ssvit.options import UserError
from ssvit.randomness import uniform

_TRIES = 10
_CHUNK = 1 << 18  # values worked on at a time on a CPU: they stay in its cache
_LARGE = 3 << 18  # pixels of an image, 1024x768, from which it pays to decode it smaller
_TABLE = 1 << 18  # places of a table of filters, up to which keeping one is worth its memory


class Change(Protocol):
    """What changes images of one size: (b, c, h, w) uint8 -> the same."""

    def __call__(self, images: Tensor, slots: Tensor, seed: int, view: int = 0) -> Tensor: ...


class RandomCrop(crop_options.RandomCrop):
    """A crop for training, and the changes that its options ask for, one after the other."""

    def crop(self, images: Tensor | Sequence[Tensor], slots: Tensor, seed: int, view: int = 0) -> Tensor:
        """The crop and the flip from left to right alone."""
        raise NotImplementedError

    def __call__(self, images: Tensor | Sequence[Tensor], slots: Tensor, seed: int, view: int = 0) -> Tensor:
        out = self.crop(images, slots, seed, view)
        for change in self.changes:
            out = change(out, slots, seed, view)
        return out

    def crop_geometry(self, sides: Tensor, slots: Tensor, seed: int, view: int = 0) -> Tensor:
        """Return the maps of the crop and the flip from left to right alone, as `geometry`."""
        raise NotImplementedError

    def geometry(self, sides: Tensor, slots: Tensor, seed: int, view: int = 0) -> Tensor:
        """Return where the points of views lie in their images; see `ssvit.data.augment.geometry`.

        Args:
            sides: (b, 2), height and width of each image.

        Returns:
            The maps (b, 2, 3).
        """
        maps = self.crop_geometry(sides, slots, seed, view)
        for change in self.changes:
            if isinstance(change, VerticalFlip | QuarterTurns | Rotation | RandAugment):
                maps = geometry.composed(maps, change.geometry(self.size, slots, seed, view))
        return maps

    @cached_property
    def changes(self) -> tuple[Change, ...]:
        """Those whose option is not 0."""
        every: tuple[tuple[float, Change], ...] = (
            (self.vertical_flip, VerticalFlip(probability=self.vertical_flip)),
            (self.quarter_turns, QuarterTurns()),
            (self.rotation, Rotation(degrees=self.rotation)),
            (self.randaugment, RandAugment(operations=self.randaugment, magnitude=self.magnitude)),
            (self.jitter, select(ColorJitter, vars(self) | {"probability": self.jitter})),
            (self.grayscale, Grayscale(probability=self.grayscale)),
            (self.blur, GaussianBlur(probability=self.blur, sigma=self.sigma)),
            (self.solarize, Solarize(probability=self.solarize)),
        )
        return tuple(change for wanted, change in every if wanted)


class InceptionCrop(crop_options.InceptionCrop, RandomCrop):
    """A crop of random area and aspect ratio, resized and flipped: torchvision's RandomResizedCrop within a grey level.

    The authors' code takes TensorFlow's crop (vit_jax: input_pipeline.py): it samples a side and the ratio evenly, and
    not the area and the ratio's logarithm; where nothing fits, it takes the whole image; it does not antialias.
    """

    def sample(self, seed: int, slots: Tensor, heights: Tensor, widths: Tensor, view: int = 0) -> tuple[Tensor, Tensor]:
        """slots, heights, widths (b,) -> boxes (b, 4) int64: top, left, height and width of each crop; flips (b,) bool.

        A box is the first of ten tries that fits into the image, else the largest centred crop of an allowed ratio.
        """
        numbers = uniform(seed, "inception crop", slots, 2 * _TRIES + 3, view)
        heights, widths = heights.double(), widths.double()
        low, high = self.scale
        area = (heights * widths)[:, None] * (low + (high - low) * numbers[:, :_TRIES])
        low, high = self.ratio
        ratio = torch.exp(math.log(low) + (math.log(high) - math.log(low)) * numbers[:, _TRIES : 2 * _TRIES])
        tried_w, tried_h = (area * ratio).sqrt().round(), (area / ratio).sqrt().round()
        fits = (tried_w > 0) & (tried_h > 0) & (tried_w <= widths[:, None]) & (tried_h <= heights[:, None])
        first = fits.byte().argmax(dim=1, keepdim=True)
        fits = fits.gather(1, first)[:, 0]
        h = tried_h.gather(1, first)[:, 0].where(fits, torch.minimum(heights, (widths / low).round()))
        w = tried_w.gather(1, first)[:, 0].where(fits, torch.minimum(widths, (heights * high).round()))
        free = torch.stack((heights - h, widths - w), dim=1)
        start = (numbers[:, -3:-1] * (free + 1)).where(fits[:, None], free / 2).floor()
        return torch.cat((start, h[:, None], w[:, None]), dim=1).long(), numbers[:, -1] < self.flip

    def crop_geometry(self, sides: Tensor, slots: Tensor, seed: int, view: int = 0) -> Tensor:
        boxes, flips = self.sample(seed, slots, sides[:, 0], sides[:, 1], view)
        return geometry.composed(geometry.cropped(boxes, self.size), geometry.flipped(flips, self.size, axis=0))

    def reduction(self, height: int, width: int, *, slot: int, seed: int) -> int:
        """By what an image may be decoded smaller, 1, 4 or 8: its crop keeps `size` pixels, but for rounding.

        By 2, and where an image is not large, it does not pay (docs/performance.md).
        """
        if height * width < _LARGE or height < 4 * self.size[0] or width < 4 * self.size[1]:
            return 1  # without the time that sampling takes
        sides = torch.tensor([height]), torch.tensor([width])
        boxes, _ = self.sample(seed, torch.tensor([slot]), *sides)
        _, _, h, w = boxes[0].tolist()
        return next((n for n in (8, 4) if h // n >= self.size[0] and w // n >= self.size[1]), 1)

    def crop(self, images: Tensor | Sequence[Tensor], slots: Tensor, seed: int, view: int = 0) -> Tensor:
        shapes = [images.shape[2:]] if isinstance(images, Tensor) else [image.shape[1:] for image in images]
        heights, widths = torch.tensor(shapes, device=slots.device).expand(len(images), 2).unbind(1)
        boxes, flips = self.sample(seed, slots, heights, widths, view)
        if isinstance(images, Tensor):
            return resample(images, boxes, flips, self.size)
        cropped = []
        for image, (top, left, h, w), flip in zip(images, boxes.tolist(), flips.tolist(), strict=True):
            resized = resize(image[None, :, top : top + h, left : left + w], self.size)[0]
            cropped.append(resized.flip(-1) if flip else resized)
        return torch.stack(cropped)


class ShiftCrop(crop_options.ShiftCrop, RandomCrop):
    """A random crop of the image widened by `padding` reflected pixels on each side, and a flip: usual for CIFAR."""

    def crop(self, images: Tensor | Sequence[Tensor], slots: Tensor, seed: int, view: int = 0) -> Tensor:
        """UserError if an image is smaller than the crop and its padding need."""
        if not isinstance(images, Tensor):
            return torch.cat([self.crop(image[None], slots[i : i + 1], seed, view) for i, image in enumerate(images)])
        b, c, h, w = images.shape
        free_h, free_w = (n + 2 * self.padding - crop for n, crop in zip((h, w), self.size, strict=True))
        if min(free_h, free_w) < 0 or self.padding >= min(h, w):
            crop = f"{self.size[1]}x{self.size[0]}"
            raise UserError(f"an image of {w}x{h} pixels is too small for a crop of {crop} with padding={self.padding}")
        top, left, flips = self._sample(torch.tensor([[h, w]], device=slots.device), slots, seed, view)
        rows, columns = self._places(top, self.size[0], h), self._places(left, self.size[1], w)
        columns = columns.flip(1).where(flips[:, None], columns)
        taken = images.reshape(b * c * h, w).index_select(0, _rows(rows[:, :, None], c, h).flatten())
        return taken.view(b, c, -1, w).gather(3, columns[:, None, None].expand(-1, c, rows.shape[1], -1))

    def _sample(self, sides: Tensor, slots: Tensor, seed: int, view: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the top and the left of crops in their images (b,) int64, and which are flipped (b,) bool."""
        numbers = uniform(seed, "shift crop", slots, 3, view)
        free = sides + 2 * self.padding - torch.tensor(self.size, device=slots.device)
        top, left = ((numbers[:, :2] * (free + 1)).long() - self.padding).unbind(1)
        return top, left, numbers[:, 2] < self.flip

    def crop_geometry(self, sides: Tensor, slots: Tensor, seed: int, view: int = 0) -> Tensor:
        top, left, flips = self._sample(sides, slots, seed, view)
        boxes = torch.stack((top, left, *(torch.full_like(top, side) for side in self.size)), dim=1)
        return geometry.composed(geometry.cropped(boxes, self.size), geometry.flipped(flips, self.size, axis=0))

    @staticmethod
    def _places(start: Tensor, crop: int, n: int) -> Tensor:
        """Which of n pixels each pixel of the crop shows, in one direction: (b,) -> (b, crop)."""
        place = start[:, None] + torch.arange(crop, device=start.device)
        return (n - 1) - ((n - 1) - place.abs()).abs()


class ResizeCrop(crop_options.ResizeCrop, RandomCrop):
    """A random crop of the image resized to a square, and a flip: as for VTAB in Kolesnikov et al. 2020 (BiT), 2.2."""

    def crop(self, images: Tensor | Sequence[Tensor], slots: Tensor, seed: int, view: int = 0) -> Tensor:
        square = (self.resize, self.resize)
        if isinstance(images, Tensor):
            images = resize(images, square)
        else:
            images = torch.cat([resize(image[None], square) for image in images])
        return self._shift.crop(images, slots, seed, view)

    @property
    def _shift(self) -> ShiftCrop:
        return ShiftCrop(size=self.size, padding=0, flip=self.flip)

    def crop_geometry(self, sides: Tensor, slots: Tensor, seed: int, view: int = 0) -> Tensor:
        whole = torch.cat((torch.zeros_like(sides), sides), dim=1)
        square = torch.full_like(sides, self.resize)
        of_square = self._shift.crop_geometry(square, slots, seed, view)
        return geometry.composed(geometry.cropped(whole, (self.resize, self.resize)), of_square)


class CenterCrop(crop_options.CenterCrop):
    """What evaluation sees of an image: no randomness."""

    def __call__(
        self, images: Tensor | Sequence[Tensor], slots: Tensor | None = None, seed: int = 0, view: int = 0
    ) -> Tensor:
        if not isinstance(images, Tensor):
            return torch.cat([self(image[None]) for image in images])
        if images.shape[2:] == self.size:
            return images
        size = self._fitted(*images.shape[2:])
        out = images.new_empty(*images.shape[:2], *self.size)
        for part, target in zip(images.split(_chunk(images)), out.split(_chunk(images)), strict=True):
            target.copy_(center_crop_image(resize(part, size), self.size))
        return out

    def mask(self, mask: Tensor) -> Tensor:
        """The class numbers of the pixels that the crop of an image shows, the nearest: (h, w) -> (*size) uint8."""
        if mask.shape == self.size:
            return mask
        resized = F.interpolate(mask[None, None], size=self._fitted(*mask.shape), mode="nearest-exact")
        return center_crop_image(resized, self.size)[0, 0]

    def geometry(self, sides: Tensor, slots: Tensor | None = None, seed: int = 0, view: int = 0) -> Tensor:
        """Return where the points of views lie in their images: sides (b, 2) -> (b, 2, 3)."""
        boxes = []
        for h, w in sides.tolist():
            fitted = self.size if (h, w) == self.size else self._fitted(h, w)
            scales = h / fitted[0], w / fitted[1]
            start = (round((n - m) / 2) * scale for n, m, scale in zip(fitted, self.size, scales, strict=True))
            boxes.append([*start, *(m * scale for m, scale in zip(self.size, scales, strict=True))])
        return geometry.cropped(torch.tensor(boxes, dtype=torch.float64, device=sides.device), self.size)

    def _fitted(self, h: int, w: int) -> tuple[int, int]:
        """The size to resize to; to cover, sides in proportion, the longer one rounded down as torchvision does."""
        if self.fit == "squash":
            return self.size
        if self.resize is not None:
            short = self.resize
            size = (short, int(short * w / h)) if h <= w else (int(short * h / w), short)
            if size[0] >= self.size[0] and size[1] >= self.size[1]:
                return size
        factor = max(self.size[0] / h, self.size[1] / w)
        return max(self.size[0], int(h * factor)), max(self.size[1], int(w * factor))


def resize(images: Tensor, size: tuple[int, int]) -> Tensor:
    """Bilinear with antialiasing: (b, c, h, w) uint8 -> (b, c, *size) uint8."""
    if images.shape[2:] == size:
        return images
    if images.device.type == "cpu" or images.is_floating_point():
        return F.interpolate(images, size=size, mode="bilinear", antialias=True)
    return F.interpolate(images.float(), size=size, mode="bilinear", antialias=True).round_().to(torch.uint8)


def resample(images: Tensor, boxes: Tensor, flips: Tensor, size: tuple[int, int]) -> Tensor:
    """Each image's box resized to `size`, and flipped or not, the whole batch at once.

    images (b, c, h, w) uint8, boxes (b, 4): top, left, height, width, flips (b,) bool -> (b, c, *size) uint8. Rows
    are gathered and weighted by their few taps; columns, which lie apart in memory, go through a matrix product.
    """
    b, c, h, w = images.shape
    top, left, box_h, box_w = boxes.unbind(1)
    rows, row_weights = _taps(top, box_h, torch.zeros_like(flips), h, size[0])
    columns, column_weights = _taps(left, box_w, flips, w, size[1])
    out = images.new_empty(b, c, *size)
    tensors = (images, rows, row_weights, columns, column_weights, out)
    for pixels, at, weights, to, matrix, target in zip(*(t.split(_chunk(images)) for t in tensors), strict=True):
        bags = _rows(at, c, h).flatten(0, 2)
        weights = weights[:, None].expand(-1, c, -1, -1).flatten(0, 2)
        x = F.embedding_bag(bags, pixels.reshape(-1, w).float(), mode="sum", per_sample_weights=weights)
        matrix = x.new_zeros(len(at), size[1], w).scatter_(2, to, matrix)
        x = torch.bmm(x.view(-1, c * size[0], w), matrix.mT)
        x = x.view_as(target)
        # CPUs convert to and from int16 many at once.
        target.copy_(x if out.is_floating_point() else x.round_().to(torch.int16))
    return out


def _taps(start: Tensor, length: Tensor, reverse: Tensor, n: int, out: int) -> tuple[Tensor, Tensor]:
    """Pixels and weights of a triangle filter that resizes [start, start + length) of n pixels to `out`.

    start, length, reverse (b,) -> places (b, out, k) int64, all different, and weights (b, out, k) float32. The filter
    is as wide as an output pixel, but never narrower than two input pixels, and cut off at the ends of the box.
    """
    if n * n * out > _TABLE:
        return _filter(start, length, reverse, n, out)
    places, weights = _table(n, out, start.device)
    box = (reverse * n + start) * n + length - 1
    return places.index_select(0, box), weights.index_select(0, box)


@lru_cache(maxsize=8)
def _table(n: int, out: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The filters of every box in n pixels: (2 * n * n, out, k), by direction, start and length."""
    ends = torch.arange(n, device=device)
    reverse = torch.tensor([False, True], device=device)
    reverse, start, length = torch.cartesian_prod(reverse.long(), ends, ends + 1).unbind(1)
    return _filter(start, torch.minimum(length, n - start), reverse.bool(), n, out)


def _filter(start: Tensor, length: Tensor, reverse: Tensor, n: int, out: int) -> tuple[Tensor, Tensor]:
    """What `_taps` returns, worked out."""
    k = min(math.ceil(2 * max(n / out, 1)), n)
    start, length = start[:, None].float(), length[:, None].float()
    place = torch.arange(out, dtype=torch.float32, device=start.device)
    place = (out - 1 - place).where(reverse[:, None], place)
    scale = length / out
    reach = scale.clamp(min=1)
    center = start + (place + 0.5) * scale
    first = (center - reach + 0.5).floor().clamp(min=0, max=n - k)
    taps = first[:, :, None] + torch.arange(k, device=start.device)
    weights = (1 - (taps + 0.5 - center[:, :, None]).abs() / reach[:, :, None]).clamp_(min=0)
    weights *= (taps >= start[:, :, None]) & (taps < (start + length)[:, :, None])
    return taps.long(), weights / weights.sum(2, keepdim=True)


def _rows(rows: Tensor, c: int, h: int) -> Tensor:
    """Rows of each image (b, r, k) to rows of the batch's (b * c * h, w) matrix, for every channel: (b, c, r, k)."""
    start = torch.arange(len(rows) * c, device=rows.device).view(-1, c, 1, 1) * h
    return rows[:, None] + start


def _chunk(images: Tensor) -> int:
    """How many images to work on at a time: all, or what fits into a CPU's cache."""
    return max(1, len(images) if images.device.type != "cpu" else _CHUNK // images[0].numel())
