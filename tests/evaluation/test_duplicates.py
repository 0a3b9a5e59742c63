"""Near-duplicates between test and training images: which are detected, and which are not."""

import pytest
import torch
import torch.nn.functional as F

from ssvit.evaluation.duplicates import Pair, Thumbnails, duplicates, without
from ssvit.figures.contact_sheet import PAIRS, pair_sheet


def pictures(count, seed):
    """Smooth pictures, as photographs are: (n, 3, 32, 32) uint8."""
    coarse = torch.rand(count, 3, 6, 6, generator=torch.Generator().manual_seed(seed))
    return (F.interpolate(coarse, size=32, mode="bicubic").clamp(0, 1) * 255).to(torch.uint8)


def found(train, test):
    thumbnails = (Thumbnails()(images)["thumbnails"] for images in (train, test))
    return duplicates(*thumbnails)


NOISE = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(9))
CHANGES = {
    "none": lambda images: images,
    "brightness": lambda images: (images.float() * 0.8 + 30).to(torch.uint8),
    "noise": lambda images: (images + 12 * NOISE).clamp(0, 255).to(torch.uint8),
    "size": lambda images: F.interpolate(F.interpolate(images.float(), size=20), size=32).to(torch.uint8),
    "a pixel aside": lambda images: images.roll(1, 3),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_changed_copies_are_found_and_others_are_not(change):
    train, test = pictures(200, 0), pictures(60, 1)
    test[[5, 17, 40]] = CHANGES[change](train[[3, 150, 3]])
    pairs = found(train, test)
    assert {(pair.test, pair.train) for pair in pairs} == {(5, 3), (17, 150), (40, 3)}
    assert [pair.cosine for pair in pairs] == sorted((pair.cosine for pair in pairs), reverse=True)


def test_a_copy_of_several_copies_is_found():
    train, test = pictures(50, 0), pictures(10, 1)
    train[20:23] = train[7]
    test[4] = train[7]
    assert found(train, test) == [Pair(4, 7, pytest.approx(1, abs=1e-5))]


def test_pictures_of_one_colour_are_no_copies_and_one_image_has_no_second():
    train, test = pictures(20, 0), pictures(5, 1)
    train[3:5] = 0
    test[2] = 0
    assert found(train, test) == []
    assert found(train[:1], train[:1]) == []


def test_images_of_any_size_have_thumbnails():
    for size in ((7, 9), (64, 48)):
        thumbnails = Thumbnails()(torch.rand(2, 3, *size))["thumbnails"]
        assert thumbnails.shape == (2, 3 * 16 * 16)
        assert thumbnails.mean(1).abs().max() < 1e-6


def test_a_score_without_them_is_the_mean_of_the_others():
    values = torch.tensor([1.0, 0, 1, 1])
    assert without(values, [Pair(0, 3, 1.0), Pair(2, 1, 1.0)]) == 0.5


def test_a_sheet_shows_both_images_of_each_pair():
    images = pictures(2, 0)
    for count in (1, 7, 30):
        shown = [picture for row in pair_sheet([(images[0], images[1], 0.98)] * count).rows for picture in row]
        assert len(shown) == 2 * min(count, PAIRS)
        assert [picture.captions for picture in shown[::2]] == [("0.980",)] * min(count, PAIRS)
