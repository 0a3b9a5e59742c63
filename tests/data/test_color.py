"""Colour operations are torchvision's, with its distribution of parameters, whatever stands beside an image."""

import numpy as np
import pytest
import torch
import torchvision.transforms.v2.functional as tvf
from scipy.stats import kstest
from torchvision.transforms import v2

from ssvit.data.augment import color
from ssvit.data.augment.color import ColorJitter, GaussianBlur, Grayscale, Solarize
from ssvit.options import OptionError

JITTER = ColorJitter(brightness=0.4, contrast=0.4, saturation=0.2, hue=0.1, probability=0.8)


def images(count: int, h: int = 20, w: int = 17) -> torch.Tensor:
    """Noise, smooth colours, and what has no colour: grey, black and white."""
    made = torch.Generator().manual_seed(0)
    noise = torch.randint(0, 256, (count, 3, h, w), dtype=torch.uint8, generator=made)
    smooth = torch.nn.functional.interpolate(torch.rand(count, 3, 3, 3, generator=made), size=(h, w), mode="bilinear")
    noise[1::2] = (smooth * 255).to(torch.uint8)[1::2]
    noise[:3] = torch.tensor([128, 0, 255], dtype=torch.uint8)[:, None, None, None]
    return noise


def assert_alike(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Within one grey level, and nearly everywhere the same."""
    difference = (ours.int() - theirs.int()).abs()
    assert difference.max() <= 1
    assert (difference > 0).double().mean() < 0.002


@pytest.mark.parametrize("name", ["brightness", "contrast", "saturation", "hue"])
def test_adjustments_are_torchvisions(name: str) -> None:
    pictures = images(60)
    factors = torch.linspace(-0.5, 0.5, 60) if name == "hue" else torch.linspace(0, 2, 60)
    ours = getattr(color, f"adjust_{name}")(pictures, factors)
    theirs = [getattr(tvf, f"adjust_{name}")(one, factor.item()) for one, factor in zip(pictures, factors, strict=True)]
    assert ours.dtype == torch.uint8
    assert_alike(ours, torch.stack(theirs))


@pytest.mark.parametrize("reach", [1, 4])
def test_the_blur_is_torchvisions(reach: int) -> None:
    pictures, sigma = images(30), torch.linspace(0.1, 2, 30)
    taps = [2 * reach + 1] * 2
    theirs = [tvf.gaussian_blur(one, taps, [width.item()] * 2) for one, width in zip(pictures, sigma, strict=True)]
    assert_alike(color.blur(pictures, sigma, reach), torch.stack(theirs))


def test_jitter_is_torchvisions_operations_in_the_order_drawn() -> None:
    pictures, slots = images(60), torch.arange(60)
    changed, factors, order = JITTER.sample(1, slots, view=2)
    theirs = pictures.clone()
    operations = (tvf.adjust_brightness, tvf.adjust_contrast, tvf.adjust_saturation, tvf.adjust_hue)
    for i in changed.nonzero()[:, 0].tolist():
        for which in order[i].tolist():
            theirs[i] = operations[which](theirs[i], factors[i, which].item())
    difference = (JITTER(pictures, slots, 1, view=2).int() - theirs.int()).abs()
    assert (difference > 3).double().mean() < 0.001  # a grey level lost is multiplied by what comes after it
    assert (difference > 0).double().mean() < 0.01
    assert torch.equal(JITTER(pictures, slots, 1, view=2)[~changed], pictures[~changed])


def test_jitter_has_the_distribution_of_torchvisions() -> None:
    count = 4000
    changed, factors, order = JITTER.sample(0, torch.arange(count))
    assert abs(changed.double().mean() - 0.8) < 4 * (0.16 / count) ** 0.5
    theirs = v2.ColorJitter(brightness=0.4, contrast=0.4, saturation=0.2, hue=0.1)
    for place, name in enumerate(("brightness", "contrast", "saturation", "hue")):
        low, high = getattr(theirs, name)
        assert kstest(factors[:, place].numpy(), "uniform", (low, high - low)).pvalue > 1e-3
    orders = np.unique(order.numpy(), axis=0, return_counts=True)[1]
    assert len(orders) == 24
    assert abs(orders / count - 1 / 24).max() < 5 * (1 / 24 / count) ** 0.5
    strong = ColorJitter(brightness=3, contrast=0, saturation=0, hue=0, probability=1.0)
    low, high = v2.ColorJitter(brightness=3).brightness
    assert kstest(strong.sample(0, torch.arange(count))[1][:, 0].numpy(), "uniform", (low, high - low)).pvalue > 1e-3


def test_blurs_and_choices_have_their_probabilities() -> None:
    count = 4000
    slots, pictures = torch.arange(count), images(count, 3, 3)
    blurred, sigma = GaussianBlur(probability=0.3, sigma=[0.1, 2.0]).sample(0, slots)
    assert abs(blurred.double().mean() - 0.3) < 4 * (0.21 / count) ** 0.5
    assert kstest(sigma.numpy(), "uniform", (0.1, 1.9)).pvalue > 1e-3
    for step, operation in ((Grayscale(probability=0.2), lambda x: tvf.rgb_to_grayscale(x, 3)),
                            (Solarize(probability=0.2), lambda x: tvf.solarize(x, 128))):  # fmt: skip
        found = step(pictures, slots, 0)
        whole = operation(pictures)
        same = (found.int() - whole.int()).abs().amax((1, 2, 3)) <= 1
        assert (same | (found == pictures).all(3).all(2).all(1)).all()
        assert abs(same.double().mean() - 0.2) < 4 * (0.16 / count) ** 0.5 + 3 / count
        assert_alike(type(step)(probability=1.0)(pictures, slots, 0), whole)
        assert torch.equal(type(step)(probability=0.0)(pictures, slots, 0), pictures)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ColorJitter(hue=0.6), "hue=0.6: must be a number, 0 or more and at most 0.5"),
        (lambda: ColorJitter(brightness=-1), "brightness=-1: must be a number, 0 or more"),
        (lambda: Grayscale(probability=1.1), "probability=1.1: must be a number, 0 or more and at most 1"),
        (lambda: GaussianBlur(sigma=[0, 1]), r"sigma=\[0,1\]|sigma=0: must be a number, above 0"),
        (lambda: GaussianBlur(sigma=[2, 1]), "the first is larger"),
        (lambda: Solarize(threshold=300), "threshold=300: must be a whole number, 0 or more and at most 255"),
    ],
)
def test_wrong_options_are_named(make, words: str) -> None:
    with pytest.raises(OptionError, match=words):
        make()
