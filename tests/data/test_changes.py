"""Flips, turns and RandAugment: torchvision's operations on the sampled parameters, and every crop can have each."""

import itertools
from typing import Any

import pytest
import torch
import torchvision.transforms.v2.functional as tvf
from scipy.stats import chisquare, kstest
from torchvision.transforms import v2

from ssvit.config.declaration import Run
from ssvit.data.augment import crop as crops
from ssvit.data.augment import views_options
from ssvit.data.augment.color import ColorJitter, GaussianBlur, Grayscale, Solarize
from ssvit.data.augment.crop import InceptionCrop, RandomCrop, ResizeCrop, ShiftCrop
from ssvit.data.augment.randaugment import OPERATIONS, RandAugment
from ssvit.data.augment.turn import QuarterTurns, Rotation, VerticalFlip, rotate
from ssvit.data.augment.views import MultiCrop
from ssvit.models.vit_options import ViT
from ssvit.options import OptionError
from ssvit.training.options import Training

COUNT = 4000
SLOTS = torch.arange(COUNT)
EVERY = {
    "vertical_flip": 0.5, "quarter_turns": True, "rotation": 30, "randaugment": 2, "jitter": 0.8, "grayscale": 0.3,
    "blur": 0.5, "sigma": [0.1, 1.0], "solarize": 0.3,
}  # fmt: skip
SQUARE = QuarterTurns()
STEPS = (
    VerticalFlip(probability=0.5),
    Rotation(degrees=180),
    RandAugment(operations=3, magnitude=20),
    ColorJitter(probability=0.8),
    Grayscale(probability=0.5),
    GaussianBlur(probability=0.5),
    Solarize(probability=0.5),
)


def images(count: int, h: int = 20, w: int = 20) -> torch.Tensor:
    """Noise and smooth colours."""
    made = torch.Generator().manual_seed(0)
    noise = torch.randint(0, 256, (count, 3, h, w), dtype=torch.uint8, generator=made)
    smooth = torch.nn.functional.interpolate(torch.rand(count, 3, 3, 3, generator=made), size=(h, w), mode="bilinear")
    noise[1::2] = (smooth * 255).to(torch.uint8)[1::2]
    return noise


def differing(ours: torch.Tensor, theirs: torch.Tensor, levels: int = 0) -> float:
    """The part of the values that differ by more than some grey levels."""
    assert ours.dtype == theirs.dtype == torch.uint8
    return ((ours.int() - theirs.int()).abs() > levels).double().mean().item()


def test_vertical_flips_have_their_probability() -> None:
    pictures = images(COUNT, 4, 3)
    out = VerticalFlip(probability=0.3)(pictures, SLOTS, 0)
    flipped = (out == tvf.vertical_flip(pictures)).flatten(1).all(1)
    assert (flipped | (out == pictures).flatten(1).all(1)).all()
    assert abs(flipped.double().mean() - 0.3) < 4 * (0.21 / COUNT) ** 0.5


def test_quarter_turns_are_torchvisions_and_each_as_likely() -> None:
    pictures = images(COUNT, 5, 5)
    quarters = QuarterTurns().sample(1, SLOTS, 2)
    assert chisquare(quarters.bincount()).pvalue > 1e-3
    out = QuarterTurns()(pictures, SLOTS, 1, 2)
    for i in range(60):
        assert torch.equal(out[i], tvf.rotate(pictures[i], 90 * quarters[i].item()))


@pytest.mark.parametrize("size", [(20, 20), (17, 24), (24, 17)])
def test_rotations_are_torchvisions_of_the_reflected_image(size: tuple[int, int]) -> None:
    pictures, step = images(60, *size), Rotation(degrees=180)
    degrees = step.sample(0, SLOTS[:60])
    out = step(pictures, SLOTS[:60], 0)
    for i, angle in enumerate(degrees.tolist()):
        wide = tvf.pad(pictures[i], [15], padding_mode="symmetric")
        turned = tvf.rotate(wide, angle, interpolation=tvf.InterpolationMode.BILINEAR)
        expected = tvf.center_crop(turned, list(size))
        assert differing(out[i], expected, levels=1) == 0
        assert differing(out[i], expected) < 0.01
    assert torch.equal(rotate(pictures, torch.zeros(60, dtype=torch.float64)), pictures)


def test_angles_are_uniform() -> None:
    degrees = Rotation(degrees=20).sample(0, SLOTS)
    assert kstest(degrees.numpy(), "uniform", (-20, 40)).pvalue > 1e-3


THEIR_NAMES = {name.replace("_", ""): name for name in OPERATIONS} | {"color": "saturation"}


@pytest.mark.parametrize("name", list(v2.RandAugment._AUGMENTATION_SPACE))
@pytest.mark.parametrize("magnitude", [0, 9, 23, 30])
def test_operations_of_randaugment_are_torchvisions(name: str, magnitude: int) -> None:
    strengths, signed = v2.RandAugment._AUGMENTATION_SPACE[name]
    ours = OPERATIONS[THEIR_NAMES[name.lower()]]
    assert signed == (THEIR_NAMES[name.lower()] in list(OPERATIONS)[:9])
    pictures, peer = images(12, 20, 31), v2.RandAugment()
    every = strengths(31, 20, 31)
    for sign in (1, -1) if signed else (1,):
        strength = 0.0 if every is None else sign * float(every[magnitude])
        found = ours(pictures, sign * magnitude / 30)
        how = {"interpolation": peer.interpolation, "fill": peer._fill}
        theirs = [peer._apply_image_or_video_transform(one, name, strength, **how) for one in pictures]
        assert differing(found, torch.stack(theirs)) < 0.01  # their strengths are float32
        assert differing(found, torch.stack(theirs), levels=1) == 0


def test_operations_and_signs_are_as_likely_as_torchvisions() -> None:
    which, strengths = RandAugment(operations=2, magnitude=9).sample(0, SLOTS)
    assert set(OPERATIONS) == set(THEIR_NAMES.values())
    for turn in range(2):
        assert chisquare(which[:, turn].bincount(minlength=14)).pvalue > 1e-3
    assert torch.equal(strengths.abs(), torch.full_like(strengths, 0.3))
    negative = strengths < 0
    assert not negative[which >= 9].any()
    signed = (which < 9).sum().item()
    assert abs(negative.sum().item() / signed - 0.5) < 4 * (0.25 / signed) ** 0.5
    pairs = (14 * which[:, 0] + which[:, 1]).bincount(minlength=196)
    assert chisquare(pairs).pvalue > 1e-3  # the second does not depend on the first


def test_randaugment_is_its_operations_one_after_the_other() -> None:
    pictures, step = images(80), RandAugment(operations=3, magnitude=15)
    which, strengths = step.sample(4, SLOTS[:80], 1)
    out = step(pictures, SLOTS[:80], 4, 1)
    for i in range(80):
        expected = pictures[i : i + 1]
        for place, strength in zip(which[i].tolist(), strengths[i].tolist(), strict=True):
            expected = list(OPERATIONS.values())[place](expected, strength)
        assert torch.equal(out[i], expected[0])


@pytest.mark.parametrize(
    ("step", "size"),
    [*itertools.product(STEPS, [(20, 17), (5, 7), (32, 32)]), (SQUARE, (5, 5)), (SQUARE, (32, 32))],
    ids=lambda value: str(value) if isinstance(value, tuple) else type(value).__name__,
)
def test_an_image_does_not_depend_on_its_batch(step: Any, size: tuple[int, int]) -> None:
    pictures, slots = images(50, *size), torch.arange(50) + 1000
    before = pictures.clone()
    whole = step(pictures, slots, 3, 1)
    assert torch.equal(pictures, before)
    for part in (torch.tensor([7]), torch.arange(3, 20), torch.arange(49, -1, -1)):
        assert torch.equal(step(pictures[part], slots[part], 3, 1), whole[part])
    assert not torch.equal(step(pictures, slots, 3, 0), whole)
    assert not torch.equal(step(pictures, slots, 4, 1), whole)


CROPS = (
    InceptionCrop(size=16, **EVERY),
    ShiftCrop(size=20, **EVERY),
    ResizeCrop(size=16, resize=20, **EVERY),
)


@pytest.mark.parametrize("crop", CROPS, ids=lambda crop: type(crop).__name__)
def test_every_crop_has_all_changes_one_after_the_other(crop: RandomCrop) -> None:
    pictures, slots = images(40), torch.arange(40) + 7
    plain = type(crop)(**{name: value for name, value in vars(crop).items() if name not in (*EVERY, "changes")})
    for view in (0, 2):
        expected = plain(pictures, slots, 5, view)
        for step in (
            VerticalFlip(probability=0.5), QuarterTurns(), Rotation(degrees=30), RandAugment(operations=2, magnitude=9),
            ColorJitter(probability=0.8), Grayscale(probability=0.3),
            GaussianBlur(probability=0.5, sigma=(0.1, 1.0)), Solarize(probability=0.3),
        ):  # fmt: skip
            expected = step(expected, slots, 5, view)
        found = crop(pictures, slots, 5, view)
        assert torch.equal(found, expected)
        assert torch.equal(crop(pictures[9:11], slots[9:11], 5, view), found[9:11])
    assert plain.changes == ()


def test_views_of_several_sizes_have_them_too() -> None:
    pictures, slots = images(30), torch.arange(30)
    small = {"size": 16, "local_size": 8, "local_views": 2, "sigma": [0.1, 0.5]}
    plain = {**small, "jitter": 0, "grayscale": 0, "blur": [0, 0, 0], "solarize": [0, 0, 0]}
    upright = MultiCrop(views_options.MultiCrop(**plain))(pictures, slots, 0)
    turned = MultiCrop(views_options.MultiCrop(**plain, vertical_flip=1.0))(pictures, slots, 0)
    assert all(torch.equal(turned[name], views.flip(3)) for name, views in upright.items())


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"vertical_flip": 2}, "vertical_flip=2: must be a number, 0 or more and at most 1"),
        ({"quarter_turns": 0.5}, "quarter_turns=0.5: must be true or false"),
        ({"quarter_turns": True, "size": (8, 10)}, "quarter_turns=true: needs square crops; rotation=180 turns others"),
        ({"rotation": 200}, "rotation=200: must be a number, 0 or more and at most 180"),
        ({"randaugment": 1.5}, "randaugment=1.5: must be a whole number, 0 or more"),
        ({"magnitude": 31}, "magnitude=31: must be a whole number, 0 or more and at most 30"),
        ({"jitter": -1}, "jitter=-1: must be a number, 0 or more and at most 1"),
        ({"hue": 0.6}, "hue=0.6: must be a number, 0 or more and at most 0.5"),
        ({"grayscale": 3}, "grayscale=3: must be a number"),
        ({"blur": [0.5, 0.5]}, r"blur=\[0.5,0.5\]: must be a number"),
        ({"blur": 0.5, "sigma": [0.1, 9]}, r"sigma=\[0.1,9\]: its filter needs images of more than 18 pixels, not 16"),
        ({"sigma": 2}, "sigma=2: must be two numbers"),
        ({"solarize": "often"}, "solarize=often: must be a number"),
    ],
)
def test_wrong_options_are_named(given: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=f"^{words}"):
        ShiftCrop(**{"size": 16, **given})


@pytest.mark.parametrize("change", [{"randaugment": 2}, {"jitter": 0.8}, {"grayscale": 0.2}])
def test_colours_of_other_channels_are_not_changed(change: dict[str, float]) -> None:
    name, value = next(iter(change.items()))
    crop = InceptionCrop(size=32, **change)
    crop.check(Run(Training(encoder=ViT(image_size=32, patch_size=4, width=64, depth=1, heads=1))))
    words = f"^{name}={value}: must be 0 for images of 5 channels: it changes red, green and blue$"
    with pytest.raises(OptionError, match=words):
        crop.check(Run(Training(encoder=ViT(image_size=32, patch_size=4, width=64, depth=1, heads=1, channels=5))))


@pytest.mark.parametrize("crop", [InceptionCrop, ShiftCrop])
def test_the_default_type_of_numbers_changes_no_pixel(crop: type[RandomCrop]) -> None:
    """An evaluation of a run in float64 makes crops while that is torch's default."""
    changes = {name: value for name, value in EVERY.items() if name != "randaugment"}  # torchvision's own arithmetic
    pictures = images(60)
    wanted = crop(size=16, **changes)(pictures, SLOTS[:60], 3)
    crops._table.cache_clear()
    torch.set_default_dtype(torch.float64)
    try:
        found = crop(size=16, **changes)(pictures, SLOTS[:60], 3)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(found, wanted)
