"""Histograms of oriented gradients: by loops in float64, of any cells and windows, and as a target that trains."""

import math

import pytest
import tiny
import torch
import torch.nn.functional as F

from ssvit.objectives import targets
from ssvit.objectives.targets_options import Hog

KINDS = [
    {"patch_size": 8, "cell": 4, "window": None},
    {"patch_size": 4, "cell": 4, "window": 12},
    {"patch_size": 4, "cell": 4, "window": 8},
    {"patch_size": 4, "cell": 3, "window": 6},
    {"patch_size": (8, 4), "cell": (4, 2), "window": (12, 8)},
    {"patch_size": 8, "cell": 8, "window": None, "channels": 1},
]


def images_of(b: int = 2, c: int = 3, h: int = 16, w: int = 24) -> torch.Tensor:
    """Noise on smooth colours, and in the first image a part without any gradient and stripes."""
    generator = torch.Generator().manual_seed(0)
    smooth = F.interpolate(torch.rand(b, c, 3, 4, generator=generator), size=(h, w), mode="bilinear") * 200
    images = (smooth + torch.rand(b, c, h, w, generator=generator) * 50).to(torch.uint8)
    images[0, :, :8, :12] = 90
    images[0, :, 8:, ::4] = 200
    return images


def histogram(channel: list[list[int]], rows: range, columns: range) -> list[float]:
    """Compute the histogram of one cell in float64; pixels beyond the edge are mirrored and have no gradient."""
    h, w = len(channel), len(channel[0])

    def at(y: int, x: int) -> int:
        y, x = abs(y), abs(x)
        return channel[2 * (h - 1) - y if y >= h else y][2 * (w - 1) - x if x >= w else x]

    bins = [0.0] * 9
    for y in rows:
        for x in columns:
            if not (0 <= y < h and 0 <= x < w):
                continue
            weights = ((-1, 1), (0, 2), (1, 1))
            dx = sum(k * (at(y + i, x + 1) - at(y + i, x - 1)) for i, k in weights)
            dy = sum(k * (at(y + 1, x + i) - at(y - 1, x + i)) for i, k in weights)
            angle = math.atan2(-dx, -dy) % math.pi if dx or dy else 0.0
            bins[int(angle / math.pi * 9) % 9] += math.hypot(dx, dy)
    length = math.hypot(*bins)
    return [value / length if length else 0.0 for value in bins]


def built(patch_size=4, channels: int = 3, **options) -> tuple[Hog, targets.Hog]:
    """Options, and the target of patches of a size."""
    return Hog(**options), Hog(**options).build(encoder=tiny.patches(patch_size, channels))


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_labels_equal_loops(kind):
    options, target = built(**kind)
    images = images_of(c=target.channels)
    labels = target.labels(images)
    (p, q), (height, width), (tall, wide) = target.patch_size, target.cell, options.window_size(target.patch_size)
    assert labels.shape == (2, 16 // p * (24 // q), target.width)
    assert target.width == target.channels * 9 * (tall // height) * (wide // width)
    for image in range(2):
        for place in range(labels.shape[1]):
            top = place // (24 // q) * p - (tall - p) // 2
            left = place % (24 // q) * q - (wide - q) // 2
            found = labels[image, place].view(target.channels, 9, tall // height, wide // width)
            for c, channel in enumerate(images[image].tolist()):
                for i in range(tall // height):
                    for j in range(wide // width):
                        y, x = top + i * height, left + j * width
                        expected = histogram(channel, range(y, y + height), range(x, x + width))
                        assert found[c, :, i, j].tolist() == pytest.approx(expected, abs=1e-5)


def test_fractions_and_brightness_change_nothing():
    images, target = images_of(), Hog(cell=4, window=12).build(encoder=tiny.patches(4))
    assert torch.equal(target.labels(images / 255), target.labels(images))
    # Half of the light has the same histograms, except for rounding.
    bright = images // 2 * 2
    assert torch.allclose(target.labels(bright), target.labels(bright // 2), atol=1e-5)


def test_a_cell_without_gradient_is_zero():
    target = Hog(cell=4, window=12).build(encoder=tiny.patches(4))
    assert not target.labels(torch.full((1, 3, 16, 24), 77, dtype=torch.uint8)).any()


@pytest.mark.parametrize("kind", [KINDS[0], KINDS[1]], ids=str)
def test_painted_strokes_lie_along_the_edges(kind):
    _, target = built(**kind)
    y, x = torch.arange(16)[:, None], torch.arange(24)
    for pattern, along in (
        (y * 10 + 0 * x, (0, 1)), (x * 10 + 0 * y, (1, 0)), ((x + y) * 6, (-1, 1)), ((x - y) * 6 + 90, (1, 1)),
    ):  # fmt: skip
        labels = target.labels(pattern.to(torch.uint8).expand(1, 3, 16, 24))
        painted = target.paint(labels)
        p, q = target.patch_size
        assert painted.shape == (1, 16 // p * (24 // q), 3, p, q)
        assert painted.min() >= 0
        assert painted.max() <= 1
        side = target.cell[0]
        inner = painted[0, 24 // q + 1, 0, :side, :side]
        row, column = torch.arange(side)[:, None] - (side - 1) / 2, torch.arange(side) - (side - 1) / 2
        off = (row * along[1] - column * along[0]).abs() / math.hypot(*along)  # pixels from the line along the edge
        assert inner[off < 0.8].mean() > 5 * inner[off > 1.4].mean()
