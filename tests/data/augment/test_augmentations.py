"""Every augmentation is a function of (seed, slot, view), with the pixels and the distribution of torchvision's."""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torchvision.transforms.v2.functional as tvf
from command import error_of
from scipy.stats import chisquare, ks_2samp, kstest
from torchvision.transforms import v2

from ssvit.config.declaration import Tree
from ssvit.data.augment import changes
from ssvit.data.augment import crop as crops
from ssvit.data.augment.changes import OPERATIONS
from ssvit.data.augment.crop import resample
from ssvit.data.augment.options import CenterCrop, InceptionCrop, MultiCrop, ResizeCrop, ShiftCrop
from ssvit.data.augment.views import Views
from ssvit.data.batch import Batch
from ssvit.data.sources.base import IGNORED
from ssvit.data.sources.base_options import ImageFiles
from ssvit.errors import OptionError, UserError
from ssvit.models.vit_options import ViT

COUNT = 4000
SLOTS = torch.arange(COUNT)
CHANGES: dict[str, Any] = {
    "vertical_flip": 0.5, "quarter_turns": True, "rotation": 180, "randaugment": 3, "magnitude": 20, "jitter": 0.8,
    "grayscale": 0.5, "blur": 0.5, "sigma": (0.1, 2), "solarize": 0.5, "erasing": 0.5,
}  # fmt: skip
SMALL: dict[str, Any] = {"size": 16, "local_size": (8, 10), "local_views": 3, "sigma": (0.1, 0.5)}
STEPS = (
    changes.VerticalFlip(0.5), changes.QuarterTurns(), changes.Rotation(180), changes.RandAugment(3, 20),
    changes.ColorJitter(0.8, 0.4, 0.4, 0.2, 0.1), changes.Grayscale(0.5), changes.GaussianBlur(0.5, (0.1, 2)),
    changes.Solarize(0.5), changes.Erasing(0.5, (0.02, 0.3333)),
)  # fmt: skip
CROPS = tuple(crop.build() for crop in (
    InceptionCrop(size=(20, 24)), InceptionCrop(size=16, **CHANGES), ShiftCrop(size=(30, 32)),
    ShiftCrop(size=32, **CHANGES), ResizeCrop(size=(16, 20), resize=24), ResizeCrop(size=16, resize=20, **CHANGES),
    CenterCrop(size=20), CenterCrop(size=20, fit="squash"),
))  # fmt: skip
VIEWS = MultiCrop(**SMALL).build()
OF_FLOATS = (*STEPS[:3], *STEPS[6:], *CROPS[::2], CROPS[7])


def called(value: object) -> str:
    return f"{type(value).__name__}{' with changes' if getattr(value, 'changes', ()) else ''}"


def images(count: int, h: int = 32, w: int = 32, c: int = 3) -> torch.Tensor:
    """Noise, smooth colours, and what has no colour: grey, black and white."""
    random = torch.Generator().manual_seed(0)
    noise = torch.randint(0, 256, (count, c, h, w), dtype=torch.uint8, generator=random)
    smooth = torch.nn.functional.interpolate(torch.rand(count, c, 3, 3, generator=random), size=(h, w), mode="bilinear")
    noise[1::2] = (smooth * 255).to(torch.uint8)[1::2]
    noise[:3] = torch.tensor([128, 0, 255], dtype=torch.uint8)[:count, None, None, None]
    return noise


def tensors(views: torch.Tensor | dict[str, torch.Tensor]) -> list[torch.Tensor]:
    return [views] if isinstance(views, torch.Tensor) else [*views.values()]


def assert_alike(ours: torch.Tensor, theirs: torch.Tensor, share: float = 0.002) -> None:
    """Within one grey level, and nearly everywhere the same."""
    difference = (ours.int() - theirs.int()).abs()
    assert ours.dtype == theirs.dtype == torch.uint8
    assert difference.max() <= 1
    assert (difference > 0).double().mean() <= share


@pytest.mark.parametrize("augment", [*STEPS, *CROPS, VIEWS], ids=called)
def test_an_image_is_a_function_of_seed_slot_and_view(augment):
    """It does not depend on other images of the batch, on tensor or list, on the default dtype or on the chunk size."""
    pictures, slots = images(60), torch.arange(60) * 7 + 1000
    before, views = pictures.clone(), [] if augment is VIEWS else [1]
    whole = tensors(augment(pictures, slots, 3, *views))
    assert pictures.equal(before)

    def same(part: torch.Tensor, inputs: Any, share: float = 0) -> None:
        for one, other in zip(tensors(augment(inputs, slots[part], 3, *views)), whole, strict=True):
            assert_alike(one, other[part], share)

    for part in (torch.tensor([7]), torch.arange(3, 20), torch.arange(59, -1, -1)):
        same(part, pictures[part])
        is_solarized = isinstance(augment, crops.RandomCrop) and augment.options.solarize
        if augment in (*CROPS, VIEWS) and not is_solarized:
            same(part, list(pictures[part]), share=float(isinstance(augment, crops.InceptionCrop)))
    if not isinstance(augment, crops.CenterCrop):
        others = [augment(pictures, slots, 4, *views), augment(pictures, slots + 60, 3, *views)]
        others += [] if augment is VIEWS else [augment(pictures, slots, 3, 0)]
        assert all(not torch.equal(one, tensors(other)[0]) for other in others for one in whole[:1])
    crops._table.cache_clear()
    torch.set_default_dtype(torch.float64)  # as in the evaluation of a run in float64
    try:
        if not any(isinstance(step, changes.RandAugment) for step in (augment, *getattr(augment, "changes", ()))):
            same(torch.arange(60), pictures)  # RandAugment has torchvision's arithmetic
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("inputs", [images(90), images(90) / 255])
def test_a_crop_does_not_depend_on_how_many_are_made_together(inputs, monkeypatch):
    found = []
    for values in (1 << 12, 1 << 17, 1 << 18):
        monkeypatch.setattr(crops, "_CHUNK", values)
        found.append(InceptionCrop(size=32).build()(inputs, SLOTS[:90], seed=0))
    assert found[0].equal(found[1])
    assert found[1].equal(found[2])


@pytest.mark.parametrize("channels", [1, 3, 5])
@pytest.mark.parametrize("augment", OF_FLOATS, ids=called)
def test_floats_are_changed_as_bytes_are(augment, channels):
    """Within the half grey level that bytes are rounded by."""
    pictures, slots = images(8, c=channels), SLOTS[:8]
    for inputs in (pictures, list(pictures)) if augment in CROPS else (pictures,):
        floats = inputs / 255 if isinstance(inputs, torch.Tensor) else [image / 255 for image in inputs]
        of_bytes, of_floats = augment(inputs, slots, 1), augment(floats, slots, 1)
        assert (of_floats.dtype, of_floats.shape) == (torch.float32, of_bytes.shape)
        assert (of_floats * 255 - of_bytes).abs().max() < 1.01


def windows(image: torch.Tensor, h: int, w: int, flips: tuple[bool, ...] = (False, True)) -> dict[bytes, tuple]:
    places = ((t, s, f) for t in range(image.shape[1] - h + 1) for s in range(image.shape[2] - w + 1) for f in flips)
    return {
        (view.flip(-1) if flip else view).numpy().tobytes(): (top, left, flip)
        for top, left, flip in places
        for view in [image[:, top : top + h, left : left + w]]
    }


@pytest.mark.parametrize(
    "crop", [ShiftCrop(size=(12, 10), padding=3).build(), ResizeCrop(size=(9, 10), resize=12).build()]
)
def test_windows_are_torchvisions_each_as_likely(crop):
    """Crops come from the image that torchvision pads by reflection, or resizes to a square."""
    picture = images(5, 12, 10, 2)[3]
    wide = tvf.pad(picture, [3], padding_mode="reflect") if isinstance(crop, crops.ShiftCrop) else None
    wide = tvf.resize(picture, [12, 12], antialias=True) if wide is None else wide
    places, out = windows(wide, *crop.size), crop(picture.expand(COUNT, -1, -1, -1), SLOTS, 0)
    drawn = [places[one.numpy().tobytes()] for one in out]
    counts = [drawn.count(place) for place in places.values()]
    assert chisquare(counts).pvalue > 1e-3


@pytest.mark.parametrize(("size", "window"), [((60, 60), (12, 12)), ((48, 32), (12, 8)), ((40, 80), (5, 10))])
def test_a_window_of_a_small_image_is_enlarged(size, window):
    """Crops are the enlarged windows of the largest crop of this shape, each equally likely."""
    picture, crop = images(5, 12, 12 if window == (12, 12) else 10, 2)[3], ShiftCrop(size=size, padding=3)
    wide = tvf.pad(picture, [3], padding_mode="reflect")
    places = {
        resized.flip(-1).numpy().tobytes() if flip else resized.numpy().tobytes(): (top, left, flip)
        for top in range(wide.shape[1] - window[0] + 1)
        for left in range(wide.shape[2] - window[1] + 1)
        for flip in (False, True)
        for resized in [tvf.resize(wide[:, top : top + window[0], left : left + window[1]], list(size), antialias=True)]
    }
    drawn = [places[one.numpy().tobytes()] for one in crop.build()(picture.expand(COUNT, -1, -1, -1), SLOTS, 0)]
    assert chisquare([drawn.count(place) for place in places.values()]).pvalue > 1e-3


def test_an_image_too_small_for_its_padding_is_an_error():
    with pytest.raises(UserError, match="an image of 10x8 pixels"):
        ShiftCrop(size=20, padding=8).build()(images(3, 8, 10), SLOTS[:3], 0)


def boxes(crop: crops.InceptionCrop, height: int, width: int, count: int = COUNT) -> tuple[torch.Tensor, torch.Tensor]:
    return crop.sample(0, torch.arange(count), torch.tensor([[height, width]]).expand(count, 2))


@pytest.mark.parametrize(("height", "width"), [(375, 500), (32, 32), (20, 90)])
def test_boxes_are_distributed_as_torchvision_draws_them(height, width):
    crop = InceptionCrop(size=8).build()
    found, flips = boxes(crop, height, width)
    torch.manual_seed(0)
    blank = torch.zeros(3, height, width)
    peer = v2.RandomResizedCrop(8, crop.options.scale, crop.options.ratio)
    theirs = np.array([[*peer.make_params([blank]).values()] for _ in SLOTS])
    ours = found.numpy()
    for a, b in zip((*ours.T, ours[:, 2] * ours[:, 3], ours[:, 3] / ours[:, 2]),
                    (*theirs.T, theirs[:, 2] * theirs[:, 3], theirs[:, 3] / theirs[:, 2]), strict=True):  # fmt: skip
        assert ks_2samp(a, b).pvalue > 1e-3
    assert abs(flips.double().mean() - 0.5) < 4 * (0.25 / COUNT) ** 0.5
    assert [boxes(InceptionCrop(size=8, flip=flip).build(), 9, 9)[1].sum() for flip in (0, 1)] == [0, COUNT]


@pytest.mark.parametrize(("height", "width"), [(1, 1), (1, 50), (50, 1), (7, 300), (33, 47)])
def test_boxes_lie_within_the_image(height, width):
    top, left, h, w = boxes(InceptionCrop(size=8).build(), height, width)[0].unbind(1)
    assert torch.stack((top, left, h - 1, w - 1, height - top - h, width - left - w)).min() >= 0


def test_where_no_try_fits_the_crop_is_torchvisions():
    options = {"scale": (1.0, 1.0), "ratio": (0.5, 0.6)}
    for height, width in ((10, 100), (100, 10), (60, 60)):
        theirs = v2.RandomResizedCrop(8, **options).make_params([torch.zeros(3, height, width)])
        ours = boxes(InceptionCrop(size=8, **options).build(), height, width, 1)[0][0].tolist()
        assert ours == [theirs[side] for side in ("top", "left", "height", "width")]


@pytest.mark.parametrize("size", [32, (16, 48), (5, 7), (90, 100)])
@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 40, 70), (5, 21, 9)])
def test_crops_are_torchvisions_within_one_grey_level(size, shape):
    crop, slots = InceptionCrop(size=size).build(), torch.arange(40) + 1000
    c, h, w = shape
    batch = images(40, h, w, c)
    found, flips = crop.sample(3, slots, torch.tensor([[h, w]]).expand(40, 2))
    expected = []
    for image, box, flip in zip(batch, found.tolist(), flips.tolist(), strict=True):
        cropped = tvf.resized_crop(image, *box, list(crop.size), antialias=True)
        expected.append(tvf.horizontal_flip(cropped) if flip else cropped)
    for ours in (crop(batch, slots, seed=3), crop(list(batch), slots, seed=3)):
        assert_alike(ours, torch.stack(expected), share=1)
    several = [images(4, *sides)[3] for sides in ((40, 60), (33, 20), (100, 31))]
    assert crop(several, SLOTS[:3], 0).shape == (3, 3, *crop.size)


def test_large_images_need_no_table_and_agree(monkeypatch):
    batch, boxes = images(4, 50, 60), torch.tensor([[0, 0, 50, 60], [3, 5, 1, 1], [10, 20, 40, 40], [49, 59, 1, 1]])
    flips = torch.tensor([False, True, True, False])
    kept = resample(batch, boxes, flips, (33, 34))
    monkeypatch.setattr(crops, "_TABLE", 0)
    assert resample(batch, boxes, flips, (33, 34)).equal(kept)


def test_an_image_that_covers_a_square_has_the_size_of_torchvisions():
    crop = CenterCrop(size=224).build()
    for height, width in ((107, 214), (214, 107), (320, 670), (333, 500), (224, 225)):
        assert crop.fitted(height, width) == v2.Resize(224)(torch.zeros(1, height, width)).shape[1:]


@pytest.mark.parametrize(("height", "width"), [(60, 90), (90, 60), (300, 47), (64, 64), (10, 12)])
def test_center_crops_are_torchvisions(height, width):
    image = images(5, height, width)[4]
    squashed = {size: tvf.resize(image, list(size), antialias=True) for size in ((32, 32), (24, 40))}
    cases = [(CenterCrop(size=size, fit="stretch").build(), expected) for size, expected in squashed.items()]
    for rows, columns in squashed:  # the largest image that fits, between equal borders of zeros
        factor = min(rows / height, columns / width)
        whole = tvf.resize(image, [round(height * factor), round(width * factor)], antialias=True)
        free = rows - whole.shape[1], columns - whole.shape[2]
        padded = tvf.pad(whole, [free[1] // 2, free[0] // 2, -(-free[1] // 2), -(-free[0] // 2)])
        cases.append((CenterCrop(size=(rows, columns), fit="pad").build(), padded))
    if min(height, width) > 40:
        theirs = v2.Compose([v2.Resize(40, antialias=True), v2.CenterCrop(32)])(image)
        cases.append((CenterCrop(size=32, resize=40).build(), theirs))
    for crop, expected in cases:
        assert crop([image])[0].equal(expected)
        assert crop(image[None].repeat(5, 1, 1, 1))[4].equal(expected)
    plain = torch.full((2, 1, height, width), 9, dtype=torch.uint8)
    assert CenterCrop(size=(24, 32)).build()(plain).equal(torch.full((2, 1, 24, 32), 9, dtype=torch.uint8))  # covered
    assert CenterCrop(size=(height, width), resize=25).build()(image[None])[0].equal(image)


@pytest.mark.parametrize("shape", [(13, 40), (40, 13), (24, 16), (50, 60), (5, 3)])
@pytest.mark.parametrize("options", [{}, {"resize": 30}, {"fit": "stretch"}, {"fit": "pad"}])
def test_masks_are_cropped_as_images_are(shape, options):
    crop, mask = CenterCrop(size=(24, 16), **options).build(), torch.zeros(shape, dtype=torch.uint8)
    mask[shape[0] // 2 :] += 1
    mask[:, shape[1] // 2 :] += 2
    found = crop.mask(mask)
    # The same quarters as images, smoothed by the resizing: where one of them is all that is seen, the mask tells it.
    quarters = crop(torch.stack([(mask == value) * 255 for value in range(4)])[:, None].to(torch.uint8))[:, 0]
    for value, quarter in enumerate(quarters):
        assert (found[quarter == 255] == value).all()
    maps = crop.geometry(torch.tensor([shape]))[0]
    for row in range(24):
        for column in range(16):
            x, y = (maps @ torch.tensor([column + 0.5, row + 0.5, 1], dtype=torch.float64)).tolist()
            y, x = math.floor(y + 1e-9), math.floor(x + 1e-9)
            is_inside = 0 <= y < shape[0] and 0 <= x < shape[1]
            assert found[row, column] == (mask[y, x] if is_inside else IGNORED)
    assert (found == IGNORED).any() == (options.get("fit") == "pad" and 2 * shape[0] != 3 * shape[1])


def test_the_fit_of_earlier_versions_is_read():
    for name, former in (("crop", "cover"), ("stretch", "squash"), ("pad", "pad")):
        assert CenterCrop(size=8, fit=name) == CenterCrop(size=8, fit=former)
    for value in ("border", 3, ["crop"], None):
        with pytest.raises(OptionError, match="fit"):
            CenterCrop(size=8, fit=value)
    for fit in ("pad", "stretch"):
        with pytest.raises(OptionError, match="resize=9"):
            CenterCrop(size=8, fit=fit, resize=9)


FACTORS, TURNS = torch.linspace(0, 2, 60), torch.linspace(-0.5, 0.5, 60)
Single = Callable[[torch.Tensor, float], torch.Tensor]


@pytest.mark.parametrize(
    ("ours", "theirs", "factors"),
    [
        (changes.adjust_brightness, tvf.adjust_brightness, FACTORS),
        (changes.adjust_contrast, tvf.adjust_contrast, FACTORS),
        (changes.adjust_saturation, tvf.adjust_saturation, FACTORS),
        (changes.adjust_hue, tvf.adjust_hue, TURNS),
        (lambda x, s: changes.blur(x, s, 1), lambda x, s: tvf.gaussian_blur(x, [3, 3], [s, s]), FACTORS + 0.1),
        (lambda x, s: changes.blur(x, s, 4), lambda x, s: tvf.gaussian_blur(x, [9, 9], [s, s]), FACTORS + 0.1),
    ],
)
def test_operations_are_torchvisions(ours, theirs, factors):
    pictures = images(60, 20, 17)
    assert_alike(
        ours(pictures, factors), torch.stack([theirs(*one) for one in zip(pictures, factors.tolist(), strict=True)])
    )


@pytest.mark.parametrize("size", [(20, 20), (17, 24), (24, 17)])
def test_rotations_are_torchvisions_of_the_reflected_image(size):
    pictures, step = images(60, *size), changes.Rotation(180)
    expected = []
    for picture, angle in zip(pictures, step.sample(0, SLOTS[:60]).tolist(), strict=True):
        wide = tvf.pad(picture, [15], padding_mode="symmetric")
        turned = tvf.rotate(wide, angle, interpolation=tvf.InterpolationMode.BILINEAR)
        expected.append(tvf.center_crop(turned, list(size)))
    assert_alike(step(pictures, SLOTS[:60], 0), torch.stack(expected), share=0.01)
    assert changes.rotate(pictures, torch.zeros(60, dtype=torch.float64)).equal(pictures)


THEIR_NAMES = {name.replace("_", ""): name for name in OPERATIONS} | {"color": "saturation"}


@pytest.mark.parametrize("name", list(v2.RandAugment._AUGMENTATION_SPACE))
def test_operations_of_randaugment_are_torchvisions(name):
    strengths, signed = v2.RandAugment._AUGMENTATION_SPACE[name]
    ours = OPERATIONS[THEIR_NAMES[name.lower()]]
    assert signed == (THEIR_NAMES[name.lower()] in list(OPERATIONS)[:9])
    pictures, peer = images(12, 20, 31), v2.RandAugment()
    every = strengths(31, 20, 31)
    how = {"interpolation": peer.interpolation, "fill": peer._fill}
    for magnitude in (0, 9, 23, 30):
        for sign in (1, -1) if signed else (1,):
            strength = 0.0 if every is None else sign * float(every[magnitude])
            theirs = [peer._apply_image_or_video_transform(one, name, strength, **how) for one in pictures]
            assert_alike(ours(pictures, sign * magnitude / 30), torch.stack(theirs), share=0.01)  # theirs are float32


def in_turn(step: Any, picture: torch.Tensor, place: int) -> torch.Tensor:
    """Apply torchvision's operations, or the operations of one image, with the sampled parameters."""
    sampled = step.sample(4, SLOTS[:80], 1)
    if isinstance(step, changes.QuarterTurns):
        return tvf.rotate(picture, 90 * sampled[place].item())
    if isinstance(step, changes.RandAugment):
        for which, strength in zip(sampled[0][place].tolist(), sampled[1][place].tolist(), strict=True):
            picture = list(OPERATIONS.values())[which](picture[None], strength)[0]
        return picture
    changed, factors, order = sampled
    operations = (tvf.adjust_brightness, tvf.adjust_contrast, tvf.adjust_saturation, tvf.adjust_hue)
    for which in order[place].tolist() if changed[place] else ():
        picture = operations[which](picture, factors[place, which].item())
    return picture


@pytest.mark.parametrize("step", [STEPS[1], STEPS[3], STEPS[4]], ids=called)
def test_changes_are_their_operations_one_after_the_other(step):
    pictures = images(80, 20, 20)
    expected = torch.stack([in_turn(step, picture, place) for place, picture in enumerate(pictures)])
    difference = (step(pictures, SLOTS[:80], 4, 1).int() - expected.int()).abs()
    of_jitter = isinstance(step, changes.ColorJitter)  # a grey level lost is multiplied by what comes after it
    assert (difference > 3).double().mean() <= 0.001 * of_jitter
    assert (difference > 0).double().mean() <= 0.01 * of_jitter


@pytest.mark.parametrize(
    ("make", "operation"),
    [
        (changes.VerticalFlip, tvf.vertical_flip),
        (changes.Grayscale, lambda x: tvf.rgb_to_grayscale(x, 3)),
        (changes.Solarize, lambda x: tvf.solarize(x, 128)),
    ],
)
def test_choices_have_their_probability(make, operation):
    pictures = images(COUNT, 4, 3)
    whole, found = operation(pictures), make(probability=0.3)(pictures, SLOTS, 0)
    changed = (found.int() - whole.int()).abs().flatten(1).amax(1) <= 1
    assert (changed | (found == pictures).flatten(1).all(1)).all()
    same = (whole == pictures).flatten(1).all(1).sum()  # which are changed to themselves
    assert abs(changed.double().mean() - 0.3) < 4 * (0.21 / COUNT) ** 0.5 + same / COUNT
    assert_alike(make(probability=1.0)(pictures, SLOTS, 0), whole)
    assert make(probability=0.0)(pictures, SLOTS, 0).equal(pictures)


def test_parameters_have_torchvisions_distribution():
    jitter = changes.ColorJitter(0.8, 0.4, 3, 0.2, 0.1)
    theirs = v2.ColorJitter(brightness=0.4, contrast=3, saturation=0.2, hue=0.1)
    changed, factors, order = jitter.sample(0, SLOTS)
    blurred, sigma = changes.GaussianBlur(0.3, (0.1, 2.0)).sample(0, SLOTS)
    which, strengths = changes.RandAugment(operations=2, magnitude=9).sample(0, SLOTS)
    uniforms = [(sigma, (0.1, 2.0)), (changes.Rotation(degrees=20).sample(0, SLOTS), (-20, 20))]
    names = ("brightness", "contrast", "saturation", "hue")
    uniforms += [(factors[:, place], getattr(theirs, name)) for place, name in enumerate(names)]
    for values, (low, high) in uniforms:
        assert kstest(values.numpy(), "uniform", (low, high - low)).pvalue > 1e-3
    orders = np.unique(order.numpy(), axis=0, return_counts=True)[1]
    pairs = (14 * which[:, 0] + which[:, 1]).bincount(minlength=196)
    for counts, kinds in (
        (orders, 24),
        (pairs.numpy(), 196),
        (changes.QuarterTurns().sample(1, SLOTS, 2).bincount().numpy(), 4),
    ):
        assert len(counts) == kinds
        assert chisquare(counts).pvalue > 1e-3
    signs = strengths[which < 9] < 0
    for chosen, probability in ((changed, 0.8), (blurred, 0.3), (signs, 0.5)):
        assert abs(chosen.double().mean() - probability) < 4 * (0.25 / len(chosen)) ** 0.5
    assert set(OPERATIONS) == set(THEIR_NAMES.values())
    assert strengths.abs().equal(torch.full_like(strengths, 0.3))
    assert not (strengths < 0)[which >= 9].any()


def test_erased_rectangles_have_torchvisions_distribution():
    size, area, ratio = (40, 30), (0.02, 0.3333), (0.3, 1 / 0.3)
    boxes = changes.Erasing(0.7, area).sample(size, SLOTS, 5, 1).double()
    erased = boxes[:, 2] > 0
    torch.manual_seed(0)
    theirs = [v2.RandomErasing(1.0, area, ratio).make_params([torch.zeros(3, *size)]) for _ in range(COUNT)]
    expected = torch.tensor([[made[name] for name in "ijhw"] for made in theirs if made["v"] is not None]).double()
    share = 0.7 * len(expected) / COUNT  # in a few images no attempt fits
    assert abs(erased.double().mean() - share) < 4 * (share * (1 - share) / COUNT) ** 0.5
    for statistic in (
        lambda top, left, height, width: height * width,
        lambda top, left, height, width: height / width,
        lambda top, left, height, width: top,
        lambda top, left, height, width: left,
    ):
        assert ks_2samp(statistic(*boxes[erased].unbind(1)), statistic(*expected.unbind(1))).pvalue > 1e-3


def test_erasing_replaces_the_pixels_of_the_rectangle_by_uniform_values():
    step, pictures = changes.Erasing(0.6, (0.1, 0.3)), torch.full((300, 3, 20, 24), 7, dtype=torch.uint8)
    found, values = step(pictures, SLOTS[:300], 3), []
    for image, (top, left, height, width) in zip(found, step.sample((20, 24), SLOTS[:300], 3).tolist(), strict=True):
        inside = image[:, top : top + height, left : left + width]
        values.append(inside.flatten())
        outside = image.clone()
        outside[:, top : top + height, left : left + width] = 7
        assert (outside == 7).all()
    assert chisquare(torch.cat(values).bincount(minlength=256)).pvalue > 1e-3


@pytest.mark.parametrize("crop", CROPS[1:6:2], ids=called)
def test_every_crop_has_all_changes_one_after_the_other(crop):
    pictures, slots = images(40), SLOTS[:40] + 7
    options = {name: value for name, value in crop.options.values().items() if name not in CHANGES}
    plain = type(crop.options)(**options).build()
    assert plain.changes == ()
    for view in (0, 2):
        expected = plain(pictures, slots, 5, view)
        for step in STEPS:
            expected = step(expected, slots, 5, view)
        assert crop(pictures, slots, 5, view).equal(expected)


def test_dinos_views_are_crops_with_their_changes():
    pictures, slots = images(40, 20, 20), torch.arange(40) + 7
    found = VIEWS(pictures, slots, 5)
    shapes = {name: tuple(views.shape) for name, views in found.items()}
    assert shapes == {"global": (40, 2, 3, 16, 16), "local": (40, 3, 3, 8, 10)}
    assert VIEWS.bytes_per_image == sum(views[0].numel() for views in found.values())
    every = [*found["global"].unbind(1), *found["local"].unbind(1)]
    blurs, inverted = [1.0, 0.1, 0.5, 0.5, 0.5], [0.0, 0.2, 0.0, 0.0, 0.0]
    for number, (view, blur, solarize) in enumerate(zip(every, blurs, inverted, strict=True)):
        size, scale = (16, (0.4, 1.0)) if number < 2 else ((8, 10), (0.05, 0.4))
        changes = {"jitter": 0.8, "grayscale": 0.2, "blur": blur, "sigma": (0.1, 0.5), "solarize": solarize}
        assert view.equal(InceptionCrop(size=size, scale=scale, **changes).build()(list(pictures), slots, 5, number))
    assert (every[0] != every[1]).flatten(1).any(1).sum() > 30
    assert set(MultiCrop(**SMALL | {"local_views": 0}).build()(pictures, slots, 0)) == {"global"}
    for unused in ({"local_views": 0}, {"blur": (0, 0, 0)}):  # neither local views nor a blur limit the filter
        MultiCrop(**SMALL | {"local_size": 2, "sigma": (0.1, 1.0)} | unused)
    with pytest.raises(UserError, match=r"^data\.augment: .*global and local"):
        _ = Batch(found, None, slots).images


def test_users_define_groups_of_views():
    plain, turned = CenterCrop(size=20).build(), ShiftCrop(size=20, padding=0, flip=0, vertical_flip=1).build()
    augment, pictures = Views({"clean": [plain], "pair": [turned, plain]}), images(4, 20, 20)
    found = augment(pictures, SLOTS[:4], 0)
    assert found["clean"].equal(pictures[:, None])
    assert found["pair"].equal(torch.stack((pictures.flip(2), pictures), dim=1))
    assert augment.bytes_per_image == 3 * 3 * 20 * 20


@pytest.mark.parametrize(
    ("make", "options", "name"),
    [
        (InceptionCrop, {"size": 0}, "size"), (InceptionCrop, {"scale": (0.5, 0.2)}, "scale"),
        (InceptionCrop, {"scale": (0.5, 1.2)}, "scale"), (InceptionCrop, {"ratio": 1.0}, "ratio"),
        (CenterCrop, {"resize": 17, "fit": "squash"}, "resize"), (ResizeCrop, {"resize": 9}, "resize"),
        (ShiftCrop, {"quarter_turns": True, "size": (8, 10)}, "quarter_turns"), (ShiftCrop, {"hue": 0.6}, "hue"),
        (ShiftCrop, {"rotation": 200}, "rotation"), (ShiftCrop, {"magnitude": 31}, "magnitude"),
        (ShiftCrop, {"erasing": 1.5}, "erasing"), (ShiftCrop, {"erased_area": [0.5, 0.1]}, "erased_area"),
        (ShiftCrop, {"blur": 0.5, "sigma": [0.1, 9]}, "sigma"), (ShiftCrop, {"sigma": [2, 1]}, "sigma"),
        (MultiCrop, {"local_size": 0}, "local_size"),
        (MultiCrop, {"local_scale": [0.5, 2]}, "local_scale"),
        (MultiCrop, {"blur": 0.5}, "blur"),
        (MultiCrop, {"solarize": [0, 0, 2]}, "solarize"),
        (MultiCrop, {**SMALL, "quarter_turns": True}, "quarter_turns"),
        (MultiCrop, {**SMALL, "sigma": [0.1, 4.0]}, "sigma"),
    ],
)  # fmt: skip
def test_wrong_options_are_named(make, options, name):
    assert error_of(make, **{"size": 16} | options).name == name


@pytest.mark.parametrize("change", [{"randaugment": 2}, {"jitter": 0.8}, {"grayscale": 0.2}])
def test_colours_of_other_channels_and_of_floats_are_not_changed(change):
    crop, sized = (
        InceptionCrop(size=32, **change),
        {"image_size": 32, "patch_size": 4, "width": 64, "depth": 1, "heads": 1},
    )
    crop.check(Tree(SimpleNamespace(encoder=ViT(**sized))))
    for run in (SimpleNamespace(encoder=ViT(**sized, channels=5)), SimpleNamespace(data=ImageFiles(range=[0, 1]))):
        InceptionCrop(size=32, blur=0.5, solarize=0.2).check(Tree(run))
        assert error_of(crop.check, Tree(run)).name == next(iter(change))


@pytest.mark.parametrize("shape", [(20, 20), (30, 20), (20, 60)])
def test_a_crop_that_exceeds_the_resized_image_covers_it_instead(shape):
    """The shorter side would become 16, less than the width of the crop, and its border would be black."""
    images = torch.full((1, 3, *shape), 255, dtype=torch.uint8)
    assert torch.equal(
        CenterCrop(size=(16, 32), resize=16).build()(images), torch.full((1, 3, 16, 32), 255, dtype=torch.uint8)
    )
