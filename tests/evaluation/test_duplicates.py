"""Near-duplicates between test and training images: which are detected, and which are not."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from ssvit.evaluation.alignment import SIDE, align, details, partial_correlation
from ssvit.evaluation.duplicates import Grey, Pair, Thumbnails, duplicates, without
from ssvit.figures.contact_sheet import PAIRS, pair_sheet


def pictures(count, seed):
    """Pictures with coarse and fine structure, as photographs have: (n, 3, 64, 64) uint8."""
    generator = torch.Generator().manual_seed(seed)
    layers = (
        F.interpolate(torch.rand(count, 3, side, side, generator=generator), size=64, mode="bicubic")
        for side in (6, 20)
    )
    return (sum(layers) * 128).clamp(0, 255).to(torch.uint8)


def of_one_kind(count, seed):
    """Pictures that look alike: the same object at slightly different positions, with scratches and noise."""
    generator = torch.Generator().manual_seed(seed)
    shifts = torch.randint(0, 3, (count, 2), generator=generator).tolist()
    objects = torch.stack([pictures(1, 77)[0].roll((y, x), (1, 2)) for y, x in shifts]).float()
    scratches = F.interpolate(torch.randn(count, 3, 32, 32, generator=generator), size=64, mode="bilinear")
    return (objects + 12 * scratches).clamp(0, 255).to(torch.uint8)


def found(train, test):
    images = {"train": train, "test": test}
    thumbnails = (Thumbnails()(images)["thumbnails"] for images in (train, test))
    return duplicates(*thumbnails, lambda which, rows: Grey()(images[which][rows])["grey"])


def resized(images, size):
    return F.interpolate(images.float(), size=size, mode="bilinear", antialias=True).round().clamp(0, 255)


NOISE = torch.randn(3, 3, 64, 64, generator=torch.Generator().manual_seed(9))
CHANGES = {
    "none": lambda images: images,
    "brightness": lambda images: (images.float() * 0.8 + 30).to(torch.uint8),
    "noise": lambda images: (images + 6 * NOISE).clamp(0, 255).to(torch.uint8),
    "size": lambda images: resized(resized(images, 40), 64).to(torch.uint8),
    "a pixel aside": lambda images: images.roll(1, 3),
    "cropped": lambda images: resized(images[:, :, 2:62, 3:63], 64).to(torch.uint8),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_changed_copies_are_found_and_others_are_not(change):
    train, test = pictures(200, 0), pictures(60, 1)
    test[[5, 17, 40]] = CHANGES[change](train[[3, 150, 3]])
    pairs = found(train, test)
    assert {(pair.test, pair.train) for pair in pairs} == {(5, 3), (17, 150), (40, 3)}
    assert [pair.correlation for pair in pairs] == sorted((pair.correlation for pair in pairs), reverse=True)


def test_of_images_of_one_kind_only_copies_are_found():
    train, test = of_one_kind(200, 0), of_one_kind(60, 1)
    assert found(train, test) == []
    test[[5, 17]] = CHANGES["brightness"](train[[3, 150]])
    assert {(pair.test, pair.train) for pair in found(train, test)} == {(5, 3), (17, 150)}


def test_a_copy_of_several_copies_is_found():
    train, test = pictures(50, 0), pictures(10, 1)
    train[20:23] = train[7]
    test[4] = train[7]
    assert found(train, test) == [Pair(4, 7, pytest.approx(1, abs=1e-4))]


@pytest.mark.parametrize("versions", [3, 10])
def test_a_copy_of_an_image_with_many_versions_is_found(versions):
    """Bursts and augmented sets: the nearest training images are all versions of the test image."""
    originals = pictures(60, 0).float()
    factors = torch.linspace(0.85, 1.15, versions)
    train = torch.cat([(originals * factor).clamp(0, 255) for factor in factors]).to(torch.uint8)
    test = pictures(30, 1)
    test[[4, 20]] = (originals[[7, 50]] * 1.02).clamp(0, 255).to(torch.uint8)
    assert {(pair.test, pair.train % 60) for pair in found(train, test)} == {(4, 7), (20, 50)}


def test_pictures_of_one_colour_are_copies_if_they_are_equal_and_one_image_has_no_second():
    train, test = pictures(20, 0), pictures(5, 1)
    train[3:5] = 0
    test[2] = 0
    assert found(train, test) == [Pair(2, 3, 1)]
    test[2] = 9
    assert found(train, test) == []
    assert found(train[:1], train[:1]) == []
    assert [(pair.test, pair.train) for pair in found(train[:2], train[:2])] == [(0, 0), (1, 1)]


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("margins", [(0, 0, 64), (3, 1, 58), (6, 4, 54)])
def test_a_part_of_a_picture_is_aligned_with_it(margins, swapped):
    y, x, side = margins
    whole = Grey()(pictures(4, 0))["grey"]
    part = F.interpolate(whole[:, None, y : y + side, x : x + side], size=SIDE, mode="bicubic")[:, 0]
    first, second = (details(images) for images in ((whole, part) if swapped else (part, whole)))
    aligned = align(first, second)
    assert aligned.correlation.min() > 0.95
    assert align(first, second.roll(1, 0)).correlation.abs().max() < 0.5


def test_the_partial_correlation_is_that_of_the_residuals():
    generator = torch.Generator().manual_seed(0)
    common, *rest = torch.randn(4, 3, SIDE, SIDE, generator=generator)
    fixed, moving, other = (common + scale * part for scale, part in zip((0.5, 0.4, 0.3), rest, strict=True))
    inside = (torch.rand(3, SIDE, SIDE, generator=generator) > 0.3).float()

    def aligned(values):
        return align(fixed, fixed)._replace(values=values, inside=inside)

    correlations = partial_correlation(fixed, aligned(moving), [aligned(other)])
    for pair in range(3):
        rows = inside[pair].bool()
        known = np.stack([np.ones(int(rows.sum())), other[pair][rows].double().numpy()], 1)
        residuals = []
        for picture in (fixed, moving):
            values = picture[pair][rows].double().numpy()
            residuals.append(values - known @ np.linalg.lstsq(known, values, rcond=None)[0])
        assert correlations[pair].item() == pytest.approx(np.corrcoef(*residuals)[0, 1], abs=1e-3)
    assert partial_correlation(fixed, aligned(moving), []).min() > correlations.max()


def test_images_of_any_size_have_thumbnails_and_grey_values():
    for size in ((7, 9), (64, 48)):
        images = torch.rand(2, 3, *size)
        thumbnails = Thumbnails()(images)["thumbnails"]
        assert thumbnails.shape == (2, 3 * 16 * 16)
        assert thumbnails.mean(1).abs().max() < 1e-6
        assert Grey()(images)["grey"].shape == (2, SIDE, SIDE)


def test_a_score_without_them_is_the_mean_of_the_others():
    values = torch.tensor([1.0, 0, 1, 1])
    assert without(values, [Pair(0, 3, 1.0), Pair(2, 1, 1.0)]) == 0.5


def test_a_sheet_shows_both_images_of_each_pair():
    images = pictures(2, 0)
    for count in (1, 7, 30):
        shown = [picture for row in pair_sheet([(images[0], images[1], 0.98)] * count).rows for picture in row]
        assert len(shown) == 2 * min(count, PAIRS)
        assert [picture.captions for picture in shown[::2]] == [("0.98",)] * min(count, PAIRS)
