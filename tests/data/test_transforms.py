"""Crops have torchvision's distribution and torchvision's pixels, a batch the same as its images one by one."""

import math
from typing import Any

import numpy as np
import pytest
import torch
import torchvision.transforms.v2.functional as tvf
from scipy.stats import ks_2samp
from torchvision.transforms import RandomResizedCrop, v2

from ssvit.data.augment import crop as crops
from ssvit.data.augment.crop import CenterCrop, InceptionCrop, ResizeCrop, ShiftCrop, resample
from ssvit.options import OptionError, UserError


def images(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def draws(crop: InceptionCrop, height: int, width: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    return crop.sample(0, torch.arange(count), torch.full((count,), height), torch.full((count,), width))


@pytest.mark.parametrize(("height", "width"), [(375, 500), (32, 32), (20, 90)])
def test_boxes_are_distributed_as_torchvision_draws_them(height: int, width: int) -> None:
    crop, count = InceptionCrop(size=8), 4000
    ours = draws(crop, height, width, count)[0].numpy()
    torch.manual_seed(0)
    blank = torch.zeros(3, height, width)
    theirs = np.array([RandomResizedCrop.get_params(blank, crop.scale, crop.ratio) for _ in range(count)])
    for side in range(4):
        assert ks_2samp(ours[:, side], theirs[:, side]).pvalue > 1e-3
    shares = [(boxes[:, 2] * boxes[:, 3] / (height * width), boxes[:, 3] / boxes[:, 2]) for boxes in (ours, theirs)]
    for a, b in zip(*shares, strict=True):
        assert ks_2samp(a, b).pvalue > 1e-3


@pytest.mark.parametrize(("height", "width"), [(1, 1), (1, 50), (50, 1), (7, 300), (33, 47)])
def test_boxes_lie_within_the_image(height: int, width: int) -> None:
    boxes, _ = draws(InceptionCrop(size=8), height, width, 2000)
    top, left, h, w = boxes.unbind(1)
    assert (boxes >= 0).all()
    assert (h > 0).all()
    assert (w > 0).all()
    assert (top + h <= height).all()
    assert (left + w <= width).all()


def test_where_no_try_fits_the_crop_is_torchvisions() -> None:
    for height, width in ((10, 100), (100, 10), (60, 60)):
        crop = InceptionCrop(size=8, scale=(1.0, 1.0), ratio=(0.5, 0.6))
        theirs = RandomResizedCrop.get_params(torch.zeros(3, height, width), [1.0, 1.0], [0.5, 0.6])
        assert draws(crop, height, width, 1)[0].tolist() == [list(theirs)]


def test_half_of_the_images_are_flipped() -> None:
    assert abs(draws(InceptionCrop(size=8), 9, 9, 10_000)[1].double().mean().item() - 0.5) < 0.02
    assert not draws(InceptionCrop(size=8, flip=0), 9, 9, 1000)[1].any()
    assert draws(InceptionCrop(size=8, flip=1), 9, 9, 1000)[1].all()


def reference(image: torch.Tensor, box: list[int], flip: bool, size: tuple[int, int]) -> torch.Tensor:
    top, left, h, w = box
    cropped = tvf.resized_crop(image, top, left, h, w, list(size), antialias=True)
    return tvf.horizontal_flip(cropped) if flip else cropped


@pytest.mark.parametrize("size", [32, (16, 48), (5, 7), (90, 100)])
@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 40, 70), (5, 21, 9)])
def test_crops_equal_torchvisions_within_one_grey_level(size: int | tuple[int, int], shape: tuple[int, ...]) -> None:
    crop, slots = InceptionCrop(size=size), torch.arange(40) + 1000
    batch = images(40, *shape)
    ours = crop(batch, slots, seed=3)
    one_by_one = crop(list(batch), slots, seed=3)
    heights, widths = (torch.full((40,), n) for n in shape[1:])
    boxes, flips = crop.sample(3, slots, heights, widths)
    assert flips.unique().numel() == 2
    for i, (box, flip) in enumerate(zip(boxes.tolist(), flips.tolist(), strict=True)):
        expected = reference(batch[i], box, flip, crop.size).int()
        assert (ours[i].int() - expected).abs().max() <= 1
        assert (one_by_one[i].int() - expected).abs().max() <= 1


def test_large_images_need_no_table_and_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    batch, boxes = images(4, 3, 50, 60), torch.tensor([[0, 0, 50, 60], [3, 5, 1, 1], [10, 20, 40, 40], [49, 59, 1, 1]])
    flips = torch.tensor([False, True, True, False])
    kept = resample(batch, boxes, flips, (33, 34))
    monkeypatch.setattr("ssvit.data.augment.crop._TABLE", 0)
    assert torch.equal(resample(batch, boxes, flips, (33, 34)), kept)


@pytest.mark.parametrize(
    "crop",
    [
        InceptionCrop(size=(20, 24)),
        ShiftCrop(size=(30, 32)),
        ResizeCrop(size=(16, 20), resize=24),
        CenterCrop(size=20),
        CenterCrop(size=20, fit="squash"),
    ],
)
def test_an_image_is_the_same_in_any_batch(crop: InceptionCrop | ShiftCrop | ResizeCrop | CenterCrop) -> None:
    batch, slots = images(300, 3, 32, 32), torch.arange(300) * 7
    whole = crop(batch, slots, 5)
    for part in (slice(0, 1), slice(13, 40), slice(299, 300)):
        assert torch.equal(crop(batch[part], slots[part], 5), whole[part])
    turned = torch.arange(299, -1, -1)
    assert torch.equal(crop(batch[turned], slots[turned], 5), whole[turned])


def test_another_seed_or_slot_is_another_crop() -> None:
    batch, slots = images(64, 3, 32, 32), torch.arange(64)
    for crop in (InceptionCrop(size=32), ShiftCrop(size=32), ResizeCrop(size=24, resize=30)):
        first = crop(batch, slots, 0)
        assert not torch.equal(first, crop(batch, slots, 1))
        assert not torch.equal(first, crop(batch, slots + 64, 0))


def test_files_of_differing_sizes_make_one_batch() -> None:
    sizes = [(40, 60), (33, 20), (100, 31)]
    out = InceptionCrop(size=(24, 32))([images(3, h, w) for h, w in sizes], torch.arange(3), 0)
    assert out.shape == (3, 3, 24, 32)
    assert out.dtype == torch.uint8


def test_shift_crops_are_windows_of_the_reflected_image() -> None:
    batch = images(200, 2, 12, 10)
    crop = ShiftCrop(size=(12, 10), padding=3)
    out = crop(batch, torch.arange(200), 0)
    padded = np.pad(batch.numpy(), ((0, 0), (0, 0), (3, 3), (3, 3)), mode="reflect")
    found = set()
    for i in range(200):
        for top in range(7):
            for left in range(7):
                window = padded[i, :, top : top + 12, left : left + 10]
                found |= {(top, left, flip) for flip in (1, -1) if (window[:, :, ::flip] == out[i].numpy()).all()}
    matched = {(top, left) for top, left, _ in found}
    assert len(found) >= 80  # of 98 places and flips, drawn 200 times
    assert {top for top, _ in matched} == {left for _, left in matched} == set(range(7))


def test_every_shift_crop_is_a_window() -> None:
    image = torch.arange(100, dtype=torch.uint8).view(1, 1, 10, 10)
    out = ShiftCrop(size=10, padding=2, flip=0)(image.expand(500, -1, -1, -1), torch.arange(500), 0)
    padded = np.pad(image[0, 0].numpy(), 2, mode="reflect")
    windows = {padded[t : t + 10, s : s + 10].tobytes(): (t, s) for t in range(5) for s in range(5)}
    counts = np.zeros((5, 5))
    for crop in out:
        counts[windows[crop[0].numpy().tobytes()]] += 1
    assert counts.min() >= 5  # 20 expected of each


def test_shift_crop_of_a_small_image_is_refused() -> None:
    with pytest.raises(UserError, match="an image of 10x8 pixels is too small for a crop of 20x20 with padding=4"):
        ShiftCrop(size=20)(images(1, 3, 8, 10), torch.arange(1), 0)


@pytest.mark.parametrize(("height", "width"), [(60, 90), (90, 60), (300, 47), (64, 64)])
def test_center_crop_equals_torchvisions(height: int, width: int) -> None:
    image = images(3, height, width)
    expected = v2.Compose([v2.Resize(40, antialias=True), v2.CenterCrop(32)])(image)
    assert torch.equal(CenterCrop(size=32, resize=40)([image])[0], expected)
    assert torch.equal(CenterCrop(size=32, resize=40)(image[None].repeat(5, 1, 1, 1))[4], expected)


def test_center_crop_covers_the_size_it_must_fill() -> None:
    for height, width in ((10, 50), (50, 10), (31, 33)):
        out = CenterCrop(size=(24, 32))(torch.full((2, 1, height, width), 9, dtype=torch.uint8))
        assert out.shape == (2, 1, 24, 32)
        assert (out == 9).all()


@pytest.mark.parametrize("size", [32, (24, 40)])
@pytest.mark.parametrize(("height", "width"), [(60, 90), (90, 60), (300, 47), (10, 12)])
def test_squashed_images_are_the_whole_image_as_torchvision_resizes_it(height: int, width: int, size: object) -> None:
    image = images(3, height, width)
    expected = tvf.resize(image, [32, 32] if size == 32 else list(size), antialias=True)
    squash = CenterCrop(size=size, fit="squash")
    assert torch.equal(squash([image])[0], expected)
    assert torch.equal(squash(image[None].repeat(5, 1, 1, 1))[4], expected)


def test_resize_crops_are_windows_of_the_squashed_image() -> None:
    picture, slots = images(3, 17, 31), torch.arange(300)
    crop = ResizeCrop(size=(9, 10), resize=12)
    out = crop([picture] * 300, slots, 0)
    assert torch.equal(out, crop(picture.expand(300, -1, -1, -1), slots, 0))
    square = tvf.resize(picture, [12, 12], antialias=True)
    windows = {
        square[:, top : top + 9, left : left + 10].flip(-1) if flip else square[:, top : top + 9, left : left + 10]: (
            top, left, flip
        )
        for top in range(4) for left in range(3) for flip in (False, True)
    }  # fmt: skip
    matches = [[place for window, place in windows.items() if torch.equal(window, one)] for one in out]
    assert all(len(found) == 1 for found in matches)
    assert {found[0] for found in matches} == set(windows.values())


def test_center_crop_leaves_an_image_of_its_size_alone() -> None:
    batch = images(4, 3, 20, 30)
    assert torch.equal(CenterCrop(size=(20, 30), resize=25)(batch), batch)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: InceptionCrop(size=0), "size"),
        (lambda: InceptionCrop(size=8, scale=(0.5, 0.2)), "scale"),
        (lambda: InceptionCrop(size=8, scale=(0.5, 1.2)), "scale"),
        (lambda: InceptionCrop(size=8, ratio=1.0), "ratio"),
        (lambda: InceptionCrop(size=8, flip=2), "flip"),
        (lambda: ShiftCrop(size=8, padding=-1), "padding"),
        (lambda: CenterCrop(size=8, resize=0.5), "resize"),
        (lambda: CenterCrop(size=8, fit="stretch"), "fit"),
        (lambda: CenterCrop(size=8, resize=9, fit="squash"), "resize"),
        (lambda: ResizeCrop(size=(8, 10), resize=9), "resize"),
    ],
)
def test_wrong_options_are_named(make: object, name: str) -> None:
    with pytest.raises(OptionError) as caught:
        make()
    assert caught.value.name == name


@pytest.mark.parametrize("shape", [(13, 40), (40, 13), (24, 16), (50, 60), (5, 3)])
@pytest.mark.parametrize("options", [{}, {"resize": 30}, {"fit": "squash"}])
def test_masks_are_cropped_as_images_are(shape: tuple[int, int], options: dict[str, Any]) -> None:
    crop = CenterCrop(size=(24, 16), **options)
    h, w = shape
    # An image that tells its pixels' places, and a mask of four quarters.
    mask = torch.zeros(h, w, dtype=torch.uint8)
    mask[h // 2 :] += 1
    mask[:, w // 2 :] += 2
    found = crop.mask(mask)
    # The same quarters as images, smoothed by the resizing: where one of them is all that is seen, the mask tells it.
    quarters = crop(torch.stack([(mask == value) * 255 for value in range(4)])[:, None].to(torch.uint8))[:, 0]
    for value, quarter in enumerate(quarters):
        assert (found[quarter == 255] == value).all()
    fitted = shape if shape == (24, 16) else crop._fitted(h, w)
    top, left = (round((n - size) / 2) for n, size in zip(fitted, (24, 16), strict=True))
    for row in range(24):
        for column in range(16):
            place = math.floor((row + top + 0.5) * h / fitted[0]), math.floor((column + left + 0.5) * w / fitted[1])
            assert found[row, column] == mask[place]


def test_a_crop_does_not_depend_on_how_many_are_made_together(monkeypatch):
    images, slots = torch.randint(256, (90, 3, 32, 32), dtype=torch.uint8), torch.arange(90)
    for given in (images, images / 255):
        found = []
        for values in (1 << 12, 1 << 17, 1 << 18):
            monkeypatch.setattr(crops, "_CHUNK", values)
            found.append(InceptionCrop(size=32)(given, slots, seed=0))
        assert found[0].equal(found[1])
        assert found[1].equal(found[2])
