"""Fingerprints: what they identify, and which of them a run records."""

import hashlib
import io

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from command import error_of
from images import pixels, put
from PIL import Image
from runs import train_in_processes
from scipy.fft import dctn

from ssvit.data.fingerprints import BYTES, CONTENT, FILE, fingerprints, read_fingerprints, record, start


def smooth(count, seed=0, size=48):
    """Smooth pictures, as photographs are: (n, 3, size, size) uint8."""
    coarse = torch.rand(count, 3, 24, 24, generator=torch.Generator().manual_seed(seed))
    return (F.interpolate(coarse, size=size, mode="bicubic").clamp(0, 1) * 255).to(torch.uint8)


def distance(first, second):
    bits = np.unpackbits((first ^ second).numpy()[..., CONTENT:], axis=-1)
    return bits.sum(-1)


def test_the_signs_are_those_of_the_lowest_frequencies():
    images = torch.randint(0, 256, (3, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    bits = np.unpackbits(fingerprints(images).numpy()[:, CONTENT:], axis=1)
    order = sorted(((v, u) for v in range(32) for u in range(32)), key=lambda place: (sum(place), place))[1:129]
    for image, of_image in zip(images, bits, strict=True):
        coefficients = dctn(image.double().sum(0).numpy())
        expected = [coefficients[place] for place in order]
        assert [value > 0 for value in expected] == of_image.astype(bool).tolist()


@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 20, 7), (4, 70, 9)])
def test_the_bits_of_the_content_never_change(shape):
    """Folders of earlier runs have them: another hash would find none of their images in an evaluation."""
    image = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    rows = image.numpy().transpose(1, 2, 0)[:: max(1, shape[1] // 32)]
    expected = hashlib.blake2b(f"{shape}".encode() + rows.tobytes(), digest_size=CONTENT).digest()
    assert fingerprints([image]).numpy()[0, :CONTENT].tobytes() == expected


def test_a_fingerprint_depends_on_the_image_alone():
    images = smooth(5)
    together = fingerprints(images)
    assert together.shape == (5, BYTES)
    assert together.dtype == torch.uint8
    apart = [image.permute(1, 2, 0).contiguous().permute(2, 0, 1) for image in images]  # as a JPEG is decoded
    assert torch.equal(fingerprints(apart), together)
    assert torch.equal(fingerprints([apart[2], smooth(1, 9, size=40)[0]])[0], together[2])
    assert len({bytes(row) for row in together[:, :CONTENT].numpy()}) == 5
    changed = images.clone()
    changed[0, 0, 0, 0] ^= 1
    assert (fingerprints(changed)[:, :CONTENT] != together[:, :CONTENT]).any(1).tolist() == [True] + [False] * 4


def test_copies_differ_in_few_bits_and_other_images_in_many():
    images = smooth(8)
    before = fingerprints(images)
    assert distance(before[:, None], before[None])[~np.eye(8, dtype=bool)].min() > 30
    copies = []
    for image in images:
        file, picture = io.BytesIO(), Image.fromarray(image.permute(1, 2, 0).numpy())
        picture.resize((36, 36), Image.Resampling.BICUBIC).save(file, "JPEG", quality=75)
        copies.append(pixels(file.getvalue()))
    assert distance(fingerprints(copies), before).max() <= 16
    assert distance(fingerprints((images.float() / 255).clamp(0, 1)), before).max() <= 2


@pytest.mark.parametrize(("world", "workers", "accumulate"), [(1, 0, 1), (1, 2, 2), (2, 0, 1)])
def test_a_run_records_each_image_of_its_first_epoch(tmp_path, world, workers, accumulate):
    images = smooth(24, size=16)
    for number, image in enumerate(images):
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(tmp_path / f"{number:02d}.png")
    expected = fingerprints(images).numpy()
    run = tmp_path / "run"
    run.mkdir()
    start(run, 24, None)
    options = {"data": tmp_path, "workers": workers, "accumulate": accumulate, "ema": 0.0, "warmup": 1}
    assert train_in_processes(run, world, steps=2, **options) == [0] * world
    shown = read_fingerprints(run)
    assert sorted(shown.any(1).tolist()) == [False] * 8 + [True] * 16
    assert (shown[shown.any(1)] == expected[shown.any(1)]).all()
    assert train_in_processes(run, world, steps=12, **options) == [0] * world  # four epochs
    assert (read_fingerprints(run) == expected).all()


def test_a_set_in_memory_is_recorded_and_a_run_from_another_includes_its_images(tmp_path):
    import tiny

    first, second = tmp_path / "first", tmp_path / "second"
    for folder, initial in ((first, None), (second, first)):
        folder.mkdir()
        start(folder, 24, initial)
        tiny.train(folder, steps=4)
    expected = fingerprints(tiny.pictures()).numpy()
    assert (read_fingerprints(first) == expected).all()
    assert (read_fingerprints(second) == np.concatenate([expected, expected])).all()
    start(second, 24, None)  # a run that continues
    assert len(read_fingerprints(second)) == 48
    third = tmp_path / "fine-tuned"
    third.mkdir()
    start(third, 0, second)
    assert (read_fingerprints(third) == read_fingerprints(second)).all()


def test_a_run_without_checkpoints_starts_anew_with_the_images_that_there_are_now(tmp_path):
    for images in (12, 17):
        start(tmp_path, images, None)
        assert len(read_fingerprints(tmp_path)) == images


def test_without_a_file_nothing_is_recorded_and_a_damaged_one_is_an_error(tmp_path):
    record(tmp_path, bytes(32))
    start(tmp_path, 0, None)
    assert read_fingerprints(tmp_path) is None
    assert not list(tmp_path.iterdir())
    (tmp_path / "older" / "step_00000003").mkdir(parents=True)
    assert not start(tmp_path / "older", 5, None)
    assert read_fingerprints(tmp_path / "older") is None
    whole = io.BytesIO()
    np.save(whole, np.zeros(3, [("content_2", "u1", 8), ("picture_2", "u1", 16)]))
    for body in (b"", b"\x93NUMPY", whole.getvalue()):
        path = put(tmp_path / FILE, body)
        assert str(path) in str(error_of(read_fingerprints, tmp_path))
