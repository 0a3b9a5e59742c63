"""Several views of an image: each a function of (seed, slot, view), whatever the batch and however images come."""

from typing import Any

import pytest
import torch

from ssvit.data.augment import views_options
from ssvit.data.augment.color import ColorJitter, GaussianBlur, Grayscale, Solarize
from ssvit.data.augment.crop import CenterCrop, InceptionCrop, ResizeCrop, ShiftCrop
from ssvit.data.augment.views import MultiCrop, Views
from ssvit.data.batch import Batch
from ssvit.options import OptionError, UserError

SMALL = {"size": 16, "local_size": (8, 10), "local_views": 3, "sigma": [0.1, 0.5]}


def images(count: int, side: int = 20) -> torch.Tensor:
    return torch.randint(0, 256, (count, 3, side, side), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def test_dinos_views_are_its_steps_one_after_the_other() -> None:
    pictures, slots = images(40), torch.arange(40) + 7
    found = MultiCrop(views_options.MultiCrop(**SMALL))(pictures, slots, 5)
    assert {name: views.shape for name, views in found.items()} == {
        "global": (40, 2, 3, 16, 16),
        "local": (40, 3, 3, 8, 10),
    }
    every = [*found["global"].unbind(1), *found["local"].unbind(1)]
    blurs, inverted = [1.0, 0.1, 0.5, 0.5, 0.5], [0.0, 0.2, 0.0, 0.0, 0.0]
    for number, (view, blur, solarize) in enumerate(zip(every, blurs, inverted, strict=True)):
        size, scale = (16, (0.4, 1.0)) if number < 2 else ((8, 10), (0.05, 0.4))
        for i in range(40):
            slot = slots[i : i + 1]
            x = InceptionCrop(size=size, scale=scale)([pictures[i]], slot, 5, number)
            x = ColorJitter(brightness=0.4, contrast=0.4, saturation=0.2, hue=0.1, probability=0.8)(x, slot, 5, number)
            x = Grayscale(probability=0.2)(x, slot, 5, number)
            x = GaussianBlur(probability=blur, sigma=(0.1, 0.5))(x, slot, 5, number)
            x = Solarize(probability=solarize)(x, slot, 5, number)
            assert torch.equal(view[i], x[0])


def test_views_do_not_depend_on_the_batch_or_on_how_images_come() -> None:
    pictures, slots, augment = images(30), torch.arange(30), MultiCrop(views_options.MultiCrop(**SMALL))
    whole = augment(pictures, slots, 0)
    for part in (torch.tensor([7]), torch.arange(3, 20), torch.arange(29, -1, -1)):
        for given in (pictures[part], list(pictures[part])):
            found = augment(given, slots[part], 0)
            assert all(torch.equal(found[name], views[part]) for name, views in whole.items())


def test_views_of_an_image_differ() -> None:
    pictures, slots = images(20), torch.arange(20)
    first, second = MultiCrop(views_options.MultiCrop(**SMALL))(pictures, slots, 0)["global"].unbind(1)
    other = MultiCrop(views_options.MultiCrop(**SMALL))(pictures, slots, 1)["global"][:, 0]
    assert (first != second).flatten(1).any(1).all()
    assert (first != other).flatten(1).any(1).all()


@pytest.mark.parametrize("crop", [InceptionCrop(size=8), ShiftCrop(size=20), ResizeCrop(size=8, resize=12)])
def test_crops_have_views(crop: InceptionCrop | ShiftCrop | ResizeCrop) -> None:
    pictures, slots = images(10), torch.arange(10)
    for given in (pictures, list(pictures)):
        views = [crop(given, slots, 0, view) for view in range(3)]
        assert torch.equal(views[0], crop(given, slots, 0))
        assert all(not torch.equal(views[i], views[j]) for i in range(3) for j in range(i))


def test_groups_are_the_users_own() -> None:
    plain, turned = CenterCrop(size=20), ShiftCrop(size=20, padding=0, flip=0, vertical_flip=1)
    augment = Views({"clean": [plain], "pair": [turned, plain]})
    pictures = images(4)
    found = augment(pictures, torch.arange(4), 0)
    assert torch.equal(found["clean"], pictures[:, None])
    assert torch.equal(found["pair"], torch.stack((pictures.flip(2), pictures), dim=1))
    assert augment.bytes_per_image == 3 * 3 * 20 * 20


def test_several_views_are_not_taken_for_one() -> None:
    batch = Batch(MultiCrop(views_options.MultiCrop(**SMALL))(images(2), torch.arange(2), 0), None, torch.arange(2))
    with pytest.raises(UserError, match="gives the views global and local, and what is trained takes one view"):
        _ = batch.images


def test_the_bytes_of_all_views_are_counted() -> None:
    augment = MultiCrop(views_options.MultiCrop(**SMALL))
    assert augment.bytes_per_image == sum(view[0].numel() for view in augment(images(1), torch.arange(1), 0).values())
    assert set(MultiCrop(views_options.MultiCrop(**{**SMALL, "local_views": 0}))(images(2), torch.arange(2), 0)) == {
        "global"
    }


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"local_size": 0}, "local_size=0: must be a whole number of pixels"),
        ({"local_scale": [0.5, 2]}, r"local_scale=\[0.5,2\]: must be two numbers above 0 and at most 1"),
        ({"scale": [0.5, 0.2]}, "scale=.*the first is larger"),
        ({"local_views": -1}, "local_views=-1: must be a whole number, 0 or more"),
        ({"jitter": 2}, "jitter=2: must be a number, 0 or more and at most 1"),
        ({"hue": 1}, "hue=1: must be a number, 0 or more and at most 0.5"),
        ({"grayscale": -1}, "grayscale=-1: must be a number"),
        ({"blur": 0.5}, "blur=0.5: must be three probabilities"),
        ({"solarize": [0, 0, 2]}, r"solarize=\[0,0,2\]: must be three probabilities"),
        ({"quarter_turns": True}, "quarter_turns=true: needs square crops; rotation=180 turns others"),
        ({"sigma": [0.1, 4.0]}, r"sigma=\[0.1,4.0\]: its filter needs images of more than 8 pixels, not 8"),
    ],
)
def test_wrong_options_are_named(given: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        MultiCrop(views_options.MultiCrop(**{**SMALL, **given}))
