"""The geometry that augmentations return takes each pixel of a view to the place in its image that the pixel shows."""

from typing import Any

import pytest
import torch

from ssvit.data.augment.changes import OPERATIONS, QuarterTurns, RandAugment, Rotation, VerticalFlip
from ssvit.data.augment.geometry import composed, warped
from ssvit.data.augment.options import CenterCrop, InceptionCrop, ResizeCrop, ShiftCrop
from ssvit.data.augment.options import MultiCrop as MultiCropOptions
from ssvit.data.augment.views import MultiCrop
from ssvit.data.batch import masks_of_views
from ssvit.data.sources.base import IGNORED

COUNT = 64
SLOTS = torch.arange(COUNT) + 11
TURNS: dict[str, Any] = {"vertical_flip": 0.5, "quarter_turns": True}
WHOLE: dict[str, Any] = {"scale": (1.0, 1.0), "ratio": (1.0, 1.0)}


def places(height: int, width: int) -> torch.Tensor:
    """An image whose two channels are the place (x, y) of each pixel's middle, as a part of the sides: (2, h, w)."""
    x, y = ((torch.arange(side) + 0.5) / side for side in (width, height))
    return torch.stack((x.expand(height, width), y[:, None].expand(height, width)))


def predicted(maps: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Return the position of the centre of each pixel of views in their images: (b, 2, 3) -> (b, 2, h, w)."""
    x, y = torch.arange(width) + 0.5, torch.arange(height) + 0.5
    points = torch.stack((x.expand(height, width), y[:, None].expand(height, width), torch.ones(height, width)))
    return torch.einsum("bij,jhw->bihw", maps, points.double())


def assert_places(
    shown: torch.Tensor, maps: torch.Tensor, sides: torch.Tensor, valid: torch.Tensor | bool = True
) -> None:
    """Assert that views of `places` agree with the maps inside the image, within half a pixel at the ends of boxes."""
    assert maps.dtype == torch.float64
    found = predicted(maps, *shown.shape[2:])
    width_height = sides.flip(1)[:, :, None, None]
    inside = ((found > 0.5) & (found < width_height - 0.5)).all(1) & valid
    scale = maps[:, :, :2].square().sum(2).sqrt().clamp(min=1)[:, :, None, None]  # of a view's pixel, in the image's
    error = (shown * width_height - found) / scale
    assert inside.double().mean() > 0.5
    assert error.abs().amax(1)[inside].max() < 0.55
    assert error.abs().amax(1)[inside].median() < 0.06  # of the resampling filter
    assert error.movedim(1, 3)[inside].mean(0).abs().max() < 0.01


def masks_of_ramps(crop: Any, height: int, width: int, slots: torch.Tensor) -> torch.Tensor:
    """Return the classes of views in masks whose classes are the columns and the rows of pixels: (b, 2, h, w)."""
    rows, columns = torch.arange(height)[:, None].expand(height, width), torch.arange(width).expand(height, width)
    return torch.stack(
        [masks_of_views([mask.to(torch.uint8)] * len(slots), crop, slots, 5) for mask in (columns, rows)], dim=1
    ).int()


@pytest.mark.parametrize("sides", [(40, 40), (31, 47)])
@pytest.mark.parametrize(
    "options",
    [
        InceptionCrop(size=(24, 20)), InceptionCrop(size=24, **TURNS), InceptionCrop(size=(60, 70)),
        InceptionCrop(size=40, rotation=180, **TURNS, **WHOLE), ShiftCrop(size=(30, 28), padding=6),
        ShiftCrop(size=30, **TURNS), ShiftCrop(size=(60, 70)),
        ResizeCrop(size=(20, 24), resize=36), ResizeCrop(size=24, resize=30, **TURNS),
        CenterCrop(size=(24, 18)), CenterCrop(size=24, resize=40), CenterCrop(size=24, fit="squash"),
        CenterCrop(size=(24, 30), fit="pad"), CenterCrop(size=40),
    ],
    ids=lambda options: f"{type(options).__name__}-{options.size}",
)  # fmt: skip
def test_crops_show_the_pixels_that_their_geometry_names(options, sides):
    crop = options.build()
    image, many = places(*sides), torch.tensor([sides] * COUNT)
    for view in (0, 3):
        maps = crop.geometry(many, SLOTS, 5, view)
        for images in (image.expand(COUNT, -1, -1, -1), [image] * COUNT):
            valid = crop.valid_pixels(SLOTS, 5, view) if hasattr(crop, "valid_pixels") else True
            assert_places(crop(images, SLOTS, 5, view), maps, many, valid)
        part = slice(7, 19)
        assert crop.geometry(many[part], SLOTS[part], 5, view).equal(maps[part])


@pytest.mark.parametrize("size", [(32, 32), (21, 36)])
@pytest.mark.parametrize("step", [VerticalFlip(0.5), QuarterTurns(), Rotation(180)])
def test_turns_show_the_pixels_that_their_geometry_names(step, size):
    if isinstance(step, QuarterTurns) and size[0] != size[1]:
        pytest.skip("turns square images alone")
    images = places(*size).expand(COUNT, -1, -1, -1)
    (maps,) = step.geometry(size, SLOTS, 2, 1)
    assert_places(step(images, SLOTS, 2, 1), maps, torch.tensor([size] * COUNT))


@pytest.mark.parametrize(
    "options",
    [
        ShiftCrop(size=40, padding=0, rotation=45),
        ShiftCrop(size=(30, 44), padding=8, rotation=180, vertical_flip=0.5),
        InceptionCrop(size=(40, 32), rotation=45), InceptionCrop(size=40, rotation=90, **TURNS, **WHOLE),
        ResizeCrop(size=(40, 36), resize=50, rotation=45),
    ],
    ids=lambda options: f"{type(options).__name__}-{options.size}",
)  # fmt: skip
def test_masks_of_rotated_crops_label_the_pixels_that_are_shown(options):
    """The classes of the masks are the coordinates of pixels, and the images show them; a reflection shows others."""
    crop, (height, width) = options.build(), (60, 76)
    labels = masks_of_ramps(crop, height, width, SLOTS)
    shown = crop([places(height, width)] * COUNT, SLOTS, 5) * torch.tensor([width, height])[:, None, None]
    sides = torch.tensor([[height, width]] * COUNT)
    maps = crop.geometry(sides, SLOTS, 5)
    scale = maps[:, :, :2].square().sum(2).sqrt().clamp(min=1)[:, :, None, None]
    is_labelled = labels[:, 0] != IGNORED
    assert is_labelled.double().mean() > 0.6
    error = ((shown - labels - 0.5) / scale).abs().amax(1)
    assert error[is_labelled].max() < 1.1  # half a pixel of the mask, and of the resampling at the ends of boxes
    # No pixel is ignored that shows its place in the image, except next to the edge, where reflection moves it little.
    difference = ((shown - predicted(maps, *crop.size)) / scale).abs().amax(1)
    assert ((difference < 0.1) & ~is_labelled).double().mean() < 0.02


@pytest.mark.parametrize("rotation", [0, 30])
def test_masks_ignore_the_black_pixels_of_randaugment(rotation):
    crop = ShiftCrop(size=40, padding=0, randaugment=2, magnitude=15, rotation=rotation).build()
    slots, height, width = torch.arange(800), 60, 76
    slots = slots[(crop.changes[-1].sample(5, slots)[0] < 5).all(1)]  # which change no colour
    assert len(slots) > 60
    x, y = (places(height, width) * torch.tensor([width, height])[:, None, None]).to(torch.uint8)
    shown = crop([torch.stack((x, y, torch.full_like(x, 255)))] * len(slots), slots, 5)
    labels, is_black = masks_of_ramps(crop, height, width, slots), shown[:, 2] == 0
    assert is_black.double().mean() > 0.1
    is_labelled = labels[:, 0] != IGNORED
    assert not (is_labelled & is_black).any()
    # Each operation takes the nearest pixel, so that two of them may be off by a pixel and a half.
    assert ((shown[:, :2].int() - labels).abs().amax(1)[is_labelled] <= 2).all()
    if not rotation:  # which reflects
        assert (~is_labelled & ~is_black).double().mean() < 0.01


@pytest.mark.parametrize(
    "options",
    [
        InceptionCrop(size=24, **TURNS), ShiftCrop(size=30, padding=6, **TURNS),
        ShiftCrop(size=(40, 44), padding=0, rotation=180),
    ],
    ids=["turns", "turns of a padded crop", "rotation of the whole image"],
)  # fmt: skip
def test_masks_of_turns_and_of_whole_images_follow_the_maps_alone(options):
    crop, sides = options.build(), torch.tensor([(40, 44)] * COUNT)
    masks = torch.arange(40 * 44).remainder(251).view(40, 44).to(torch.uint8).expand(COUNT, -1, -1)
    expected = warped(masks, crop.geometry(sides, SLOTS, 5), crop.size)
    assert masks_of_views(masks, crop, SLOTS, 5).equal(expected)


@pytest.mark.parametrize("size", [(40, 40), (30, 50)])
def test_randaugment_shows_the_pixels_that_its_geometry_names(size):
    step, slots = RandAugment(2, 12), torch.arange(600)
    plain = torch.tensor([name == "identity" or place < 5 for place, name in enumerate(OPERATIONS)])
    slots = slots[plain[step.sample(4, slots)[0]].all(1)]  # which change no colour
    assert len(slots) > 60
    x, y = (places(*size) * torch.tensor(size[::-1])[:, None, None]).to(torch.uint8)
    image = torch.stack((x, y, torch.full_like(x, 255)))
    shown = step(image.expand(len(slots), -1, -1, -1), slots, 4)
    found = predicted(composed(*step.geometry(size, slots, 4)), *size)
    drawn = shown[:, 2] == 255  # others are black, outside of the image
    # Each operation takes the nearest pixel, so that two of them may be off by a pixel and a half.
    assert ((shown[:, :2] + 0.5 - found).abs().amax(1)[drawn] < 1.6).all()
    assert ((shown[:, :2] + 0.5 - found).abs().amax(1)[drawn] < 0.51).double().mean() > 0.5
    limit = torch.tensor(size[::-1])[:, None, None]
    far_inside = ((found > 2) & (found < limit - 2)).all(1)
    assert drawn[far_inside].double().mean() > 0.9


def test_each_view_has_a_geometry_of_its_own():
    options = MultiCropOptions(size=24, local_size=16, local_views=3, vertical_flip=0.5, jitter=0, grayscale=0,
                               blur=(0, 0, 0), solarize=(0, 0, 0))  # fmt: skip
    views, sides = MultiCrop(options), torch.tensor([(31 + i % 3, 40 + i % 5) for i in range(COUNT)])
    images = [places(*of_image) for of_image in sides.tolist()]
    maps, shown = views.geometry(sides, SLOTS, 3), views(images, SLOTS, 3)
    assert {name: tuple(of_group.shape) for name, of_group in maps.items()} == {
        "global": (COUNT, 2, 2, 3), "local": (COUNT, 3, 2, 3),
    }  # fmt: skip
    for name, of_group in maps.items():
        for view in range(of_group.shape[1]):
            assert_places(shown[name][:, view], of_group[:, view], sides)
        assert not of_group[:, 0].equal(of_group[:, 1])
