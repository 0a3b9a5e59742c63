"""Smaller decoding of JPEGs: crops alike within some grey levels, functions of the step, none where it may not be."""

import io
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from ssvit.data import decode
from ssvit.data.augment import crop as crops
from ssvit.data.augment import views_options
from ssvit.data.augment.crop import InceptionCrop
from ssvit.data.augment.views import MultiCrop
from ssvit.data.loader import Loader
from ssvit.data.sources.base import Part, Unreadable
from ssvit.data.sources.files import Files
from ssvit.options import OptionError


def picture(number: int, height: int, width: int, mode: str = "RGB") -> Image.Image:
    """Waves that are smooth over some pixels."""
    y, x = np.mgrid[0:height, 0:width] / 90
    waves = np.stack([np.sin(x * (1 + c) + number) * np.cos(y + c) for c in range(3)], axis=2)
    return Image.fromarray((127.5 + 120 * waves).astype(np.uint8)).convert(mode)


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
@pytest.mark.parametrize(("height", "width"), [(64, 96), (61, 95), (9, 200)])
@pytest.mark.parametrize("factor", [2, 4, 8])
def test_a_smaller_image_is_the_mean_over_the_larger(
    tmp_path: Path, mode: str, height: int, width: int, factor: int
) -> None:
    picture(0, height, width, mode).save(tmp_path / "a.jpg", quality=95)
    asked = []
    small = decode.load(str(tmp_path / "a.jpg"), lambda *size: asked.append(size) or factor)
    assert asked == [(height, width)]
    assert small.shape == (3, -(-height // factor), -(-width // factor))
    full = decode.load(str(tmp_path / "a.jpg"), lambda *size: 1)
    assert torch.equal(full, decode.load(str(tmp_path / "a.jpg")))
    means = F.avg_pool2d(full.float(), factor)
    assert (small[:, : means.shape[1], : means.shape[2]] - means).abs().mean() < 3
    data = np.frombuffer((tmp_path / "a.jpg").read_bytes(), np.uint8).copy()
    assert torch.equal(decode.decoded(data, "a", lambda *size: factor), small)


def test_other_formats_and_damaged_files_are_as_before(tmp_path: Path) -> None:
    picture(0, 40, 40).save(tmp_path / "a.png")
    assert torch.equal(decode.load(str(tmp_path / "a.png"), lambda *size: 8), decode.load(str(tmp_path / "a.png")))
    file = io.BytesIO()
    picture(0, 40, 40).save(file, "JPEG")
    (tmp_path / "cut.jpg").write_bytes(file.getvalue()[:300])
    with pytest.raises(Unreadable, match=r"cut\.jpg"):
        decode.load(str(tmp_path / "cut.jpg"), lambda *size: 8)


@pytest.mark.parametrize(("height", "width"), [(375, 500), (1200, 1600), (90, 3000), (63, 64)])
def test_an_image_is_made_as_small_as_its_crop_allows(height: int, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crops, "_LARGE", 0)
    crop, slots = InceptionCrop(size=(32, 48)), torch.arange(200)
    boxes, _ = crop.sample(3, slots, torch.full((200,), height), torch.full((200,), width))
    found = {}
    for slot, (_, _, h, w) in enumerate(boxes.tolist()):
        n = found[slot] = crop.reduction(height, width, slot=slot, seed=3)
        assert n == 1 or (h // n >= 32 and w // n >= 48)
        larger = {1: 4, 4: 8}.get(n)
        assert larger is None or h // larger < 32 or w // larger < 48
    assert (max(found.values()) > 1) == (height >= 128)
    monkeypatch.undo()
    assert crop.reduction(767, 1024, slot=0, seed=3) == 1


@pytest.fixture
def files(tmp_path: Path) -> Files:
    for number in range(20):
        picture(number, 200 + 7 * number, 300).save(tmp_path / f"{number:02d}.jpg", quality=95)
    return Files(sorted(map(str, tmp_path.glob("*.jpg"))))


def test_crops_are_the_same_within_some_grey_levels_and_functions_of_the_step(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crops, "_LARGE", 0)

    def load(first: int = 0, **options: object) -> torch.Tensor:
        source = Part(files, torch.arange(20))
        loader = Loader(source=source, transform=InceptionCrop(size=24), seed=1, batch_size=10, **options)  # type: ignore[arg-type]
        return torch.cat([batch.images for batch in loader.batches(first, 4)])

    full, scaled = load(), load(decoding="scaled")
    assert not torch.equal(full, scaled)
    assert (full.float() - scaled.float()).abs().mean() < 4
    assert torch.equal(load(2, decoding="scaled", workers=1), scaled[20:])


def test_it_needs_an_augmentation_of_one_crop(files: Files) -> None:
    transform = MultiCrop(views_options.MultiCrop(size=32, local_size=16))
    with pytest.raises(OptionError, match="decoding=scaled: needs an augmentation with one random crop"):
        Loader(source=files, transform=transform, seed=0, batch_size=10, decoding="scaled")
    with pytest.raises(OptionError, match="decoding=half: must be one of full, scaled"):
        Loader(source=files, transform=InceptionCrop(size=24), seed=0, batch_size=10, decoding="half")
