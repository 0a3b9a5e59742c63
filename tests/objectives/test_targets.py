"""Targets against plain loops over patches, cells and channels, in exact fractions where bytes allow them."""

import math
from fractions import Fraction

import pytest
import tiny
import torch
from scipy import stats

from ssvit.objectives.targets_options import Hog, MeanColor, Pixels

PARTS = (MeanColor(), MeanColor(grid=2, bits=1), Pixels(), Pixels(loss="l1"), Hog())
TARGETS = [part.build(encoder=tiny.patches(4)) for part in PARTS]


def images_of(b: int, c: int, h: int, w: int, seed: int = 0) -> torch.Tensor:
    """Bytes whose patches have many different means, black and white among them."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (b, c, h, w), generator=generator, dtype=torch.uint8)
    coarse = torch.randint(0, 256, (b, c, -(-h // 8), -(-w // 8)), generator=generator).float()
    smooth = torch.nn.functional.interpolate(coarse, size=(h, w), mode="nearest")
    images = ((images.float() - 128) / 4 + smooth).clamp(0, 255).to(torch.uint8)
    images[0, :, : h // 2], images[0, :, h // 2 :] = 0, 255
    return images


def class_of(means: list[Fraction], bits: int) -> int:
    """64 R + 8 G + B for three channels of three bits; the brightest value belongs to the last level."""
    levels, number = 2**bits, 0
    for mean in means:
        number = number * levels + min(math.floor(mean * levels), levels - 1)
    return number


def loop_labels(images: torch.Tensor, patch: tuple[int, int], grid: int, bits: int) -> list:
    """Labels by loops in exact arithmetic: of bytes as k / 255, of floats as the binary fractions that they are."""
    full = 255 if images.dtype == torch.uint8 else 1
    p, q = patch[0] // grid, patch[1] // grid
    labels = []
    for image in images.tolist():
        h, w = len(image[0]), len(image[0][0])
        rows = []
        for top in range(0, h, patch[0]):
            for left in range(0, w, patch[1]):
                cells = []
                for y in range(top, top + patch[0], p):
                    for x in range(left, left + patch[1], q):
                        sums = [sum(Fraction(v) for row in ch[y : y + p] for v in row[x : x + q]) for ch in image]
                        cells.append(class_of([value / (p * q * full) for value in sums], bits))
                rows.append(cells)
        labels.append(rows)
    return labels


@pytest.mark.parametrize("as_float", [False, True])
@pytest.mark.parametrize(
    ("channels", "size", "patch", "grid", "bits"),
    [
        (3, (16, 16), (4, 4), 1, 3), (3, (16, 24), (8, 4), 1, 3), (3, (16, 24), (8, 4), 2, 3),
        (3, (8, 16), (8, 8), 4, 3), (1, (12, 8), (4, 4), 2, 3), (4, (8, 8), (4, 4), 1, 3), (3, (8, 8), (4, 4), 1, 1),
        (3, (8, 8), (4, 4), 4, 2), (3, (8, 8), (2, 4), 2, 4), (3, (8, 8), (4, 4), 1, 5), (1, (6, 9), (3, 3), 3, 8),
    ],
)  # fmt: skip
def test_labels_equal_loops_in_exact_arithmetic(channels, size, patch, grid, bits, as_float):
    images = images_of(3, channels, *size)
    if as_float:
        images = images / 255
    target = MeanColor(grid=grid, bits=bits).build(encoder=tiny.patches(patch, channels))
    labels = target.labels(images)
    assert labels.dtype == torch.int64
    assert labels.tolist() == loop_labels(images, patch, grid, bits)
    assert target.classes == 2 ** (bits * channels)
    assert target.width == grid * grid * target.classes


def test_byte_sums_on_both_sides_of_each_boundary():
    # 16 bytes whose sum is s have mean s / (16 * 255), and 510 k is exactly the boundary k / 8.
    target = MeanColor().build(encoder=tiny.patches(4, 1))
    sums = [510 * k + d for k in range(9) for d in (-2, -1, 0, 1, 2) if 0 <= 510 * k + d <= 4080]
    images = torch.tensor([[s // 16 + (place < s % 16) for place in range(16)] for s in sums]).to(torch.uint8)
    assert images.long().sum(1).tolist() == sums
    assert target.labels(images.view(-1, 1, 4, 4)).flatten().tolist() == [min(s // 510, 7) for s in sums]


@pytest.mark.parametrize("patch", [4, 14, 16])
def test_floats_on_both_sides_of_each_boundary(patch):
    target = MeanColor().build(encoder=tiny.patches(patch, 1))
    edges = torch.arange(9, dtype=torch.float32) / 8
    below, above = (torch.nextafter(edges, torch.tensor(side)) for side in (-1.0, 2.0))
    for values, expected in ((edges, [*range(8), 7]), (below[1:], range(8)), (above[:8], range(8))):
        images = values.view(-1, 1, 1, 1).expand(-1, 1, patch, patch)
        assert target.labels(images).flatten().tolist() == list(expected)
    images = edges[1:].view(8, 1, 1, 1).repeat(1, 1, patch, patch)
    images[:, 0, 0, 0] = below[1:]  # one pixel a last bit below the boundary is enough
    assert target.labels(images).flatten().tolist() == list(range(8))


@pytest.mark.parametrize(
    ("color", "expected"),
    [((0, 0, 0), 0), ((1, 1, 1), 511), ((1, 0, 0), 448), ((0, 1, 0), 56), ((0, 0, 1), 7), ((0.5, 0.25, 0.126), 273),
     ((-0.2, -1e-9, 0), 0), ((1 + 1e-6, 1.3, 1), 511)],
)  # fmt: skip
def test_classes_are_64_r_8_g_b(color, expected):
    image = torch.tensor(color).view(1, 3, 1, 1).expand(1, 3, 8, 8)
    assert (MeanColor().build(encoder=tiny.patches(4)).labels(image) == expected).all()


@pytest.mark.parametrize("grid", [1, 2])
def test_cross_entropy_equals_a_loop(grid):
    torch.manual_seed(0)
    target = MeanColor(grid=grid, bits=2).build(encoder=tiny.patches(4, 2))
    logits, labels = torch.randn(2, 3, target.width) * 3, torch.randint(0, 16, (2, 3, grid * grid))
    losses = target.losses(logits, labels)
    guess, score = target.guess(logits), target.score(target.guess(logits), labels)
    assert losses.shape == score.shape == (2, 3)
    for image in range(2):
        for patch in range(3):
            cells = logits[image, patch].double().split(16)
            values = [
                math.log(sum(math.exp(v) for v in cell.tolist())) - cell[label].item()
                for cell, label in zip(cells, labels[image, patch].tolist(), strict=True)
            ]
            assert losses[image, patch].item() == pytest.approx(sum(values) / len(values), abs=1e-5)
            best = [max(range(16), key=cell.tolist().__getitem__) for cell in cells]
            assert guess[image, patch].tolist() == best
            right = sum(a == b for a, b in zip(best, labels[image, patch].tolist(), strict=True))
            assert score[image, patch].item() == right / len(cells)


def test_pixels_are_the_patches_from_minus_one_to_one():
    images, target = images_of(2, 3, 8, 12), Pixels().build(encoder=tiny.patches([4, 6]))
    labels = target.labels(images)
    assert labels.shape == (2, 4, 72)
    assert labels.dtype == torch.float32
    for image in range(2):
        for patch in range(4):
            top, left = patch // 2 * 4, patch % 2 * 6
            cut = images[image, :, top : top + 4, left : left + 6].flatten().tolist()
            expected = torch.tensor([2 * v / 255 - 1 for v in cut])
            torch.testing.assert_close(labels[image, patch], expected, atol=1e-6, rtol=0)
    torch.testing.assert_close(target.labels(images / 255), labels, atol=1e-6, rtol=0)
    every_byte = (
        Pixels().build(encoder=tiny.patches(16, 1)).labels(torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16))
    )
    assert every_byte.min() == -1
    assert every_byte.max() == 1


@pytest.mark.parametrize(("loss", "power"), [("l2", 2), ("l1", 1)])
def test_the_error_of_pixels_equals_a_loop(loss, power):
    torch.manual_seed(0)
    target = Pixels(loss=loss).build(encoder=tiny.patches(2))
    prediction, labels = torch.randn(2, 3, 12), torch.rand(2, 3, 12) * 2 - 1
    losses = target.losses(prediction.bfloat16(), labels)
    assert losses.dtype == torch.float32
    for image in range(2):
        for patch in range(3):
            pairs = zip(prediction[image, patch].bfloat16().tolist(), labels[image, patch].tolist(), strict=True)
            expected = sum(abs(a - b) ** power for a, b in pairs) / 12
            assert losses[image, patch].item() == pytest.approx(expected, abs=1e-5)
    assert torch.equal(target.score(target.guess(prediction), labels), target.losses(prediction, labels).double())


@pytest.mark.parametrize("grid", [1, 2])
def test_the_constant_of_classes_is_their_entropy_and_the_most_frequent(grid):
    target = MeanColor(grid=grid).build(encoder=tiny.patches(4))
    labels = target.labels(images_of(20, 3, 16, 16))
    loss, guess = target.constant(labels)
    cells = labels.flatten(0, 1).T
    entropies = [stats.entropy(torch.bincount(cell, minlength=512).numpy()) for cell in cells]
    assert loss == pytest.approx(sum(entropies) / len(entropies), abs=1e-9)
    assert guess.shape == (grid * grid,)
    for cell, best in zip(cells.tolist(), guess.tolist(), strict=True):
        assert cell.count(best) == max(cell.count(value) for value in cell)
    # No constant prediction has a lower loss: the one with it predicts the shares.
    shares = torch.stack([torch.bincount(cell, minlength=512) for cell in cells]).double() / cells.shape[1]
    logits = (shares + 1e-12).log().flatten().expand(*labels.shape[:2], -1)
    assert target.losses(logits, labels).mean().item() == pytest.approx(loss, abs=1e-4)


@pytest.mark.parametrize("loss", ["l2", "l1"])
def test_the_constant_of_pixels_is_their_mean_or_median(loss):
    target = Pixels(loss=loss).build(encoder=tiny.patches(4))
    labels = target.labels(images_of(10, 3, 8, 8))
    minimum, guess = target.constant(labels)
    columns = labels.flatten(0, 1).double().sort(0).values
    middles = columns.mean(0) if loss == "l2" else columns[(len(columns) - 1) // 2]
    assert guess.tolist() == pytest.approx(middles.tolist(), abs=1e-6)
    assert target.losses(guess.expand_as(labels), labels).mean().item() == pytest.approx(minimum, rel=1e-5)
    for shift in (-0.01, 0.01):
        assert target.losses((guess + shift).expand_as(labels), labels).mean().item() >= minimum - 1e-6


@pytest.mark.parametrize(
    ("patch", "channels", "grid", "bits"), [(4, 3, 1, 3), ((8, 4), 3, 2, 3), (4, 1, 4, 8), (4, 4, 1, 2), (6, 3, 3, 5)]
)
def test_painted_labels_have_those_labels(patch, channels, grid, bits):
    torch.manual_seed(0)
    target = MeanColor(grid=grid, bits=bits).build(encoder=tiny.patches(patch, channels))
    labels = torch.randint(0, target.classes, (5, 6, grid * grid))
    painted = target.paint(labels)
    p, q = target.patch_size
    assert painted.shape == (5, 6, channels, p, q)
    assert painted.min() > 0
    assert painted.max() < 1
    images = painted.view(5, 2, 3, channels, p, q).permute(0, 3, 1, 4, 2, 5).reshape(5, channels, 2 * p, 3 * q)
    assert torch.equal(target.labels(images), labels)


def test_painted_pixels_are_the_image():
    images, target = images_of(2, 3, 8, 12), Pixels().build(encoder=tiny.patches(4))
    painted = target.paint(target.labels(images))
    assert torch.equal(painted[0, 4, :, 1, 2].mul(255).round().to(torch.uint8), images[0, :, 5, 6])
    assert target.paint(torch.tensor([[-3.0] * 24 + [3.0] * 24])).unique().tolist() == [0, 1]


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: type(target).__name__)
def test_every_target_has_the_shapes_of_its_contract(target):
    images = images_of(2, 3, 8, 12)
    labels, prediction = target.labels(images), torch.randn(2, 6, target.width).bfloat16()
    assert labels.shape[:2] == target.losses(prediction, labels).shape == (2, 6)
    assert target.losses(prediction, labels).dtype == torch.float32
    assert target.guess(prediction).shape == labels.shape
    assert target.score(target.guess(prediction), labels).shape == (2, 6)
    assert target.paint(labels).shape == (2, 6, 3, 4, 4)
    perfect, poor = (target.score(guess, labels).mean() for guess in (labels, labels.flip(1)))
    assert (perfect > poor) == (target.score_name == "accuracy")
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(target.labels(images), labels)
