"""The rendered shapes: a pure function of (seed, index) whose bits never change."""

import hashlib

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from ssvit.data.augment.options import CenterCrop
from ssvit.data.sources import shapes
from ssvit.data.sources.base import masks
from ssvit.data.sources.shapes import render
from ssvit.data.sources.shapes_options import Shapes
from ssvit.errors import OptionError


def seen_through(monkeypatch: pytest.MonkeyPatch, indices: torch.Tensor, size: int) -> torch.Tensor:
    """Return the change of each pixel if the scene behind the shape is white instead of black: (b, h, w), 0 to 255."""
    pictures = []
    for value in (0.0, 1.0):
        monkeypatch.setattr(shapes, "_paint_leaves", lambda canvas, *_, value=value: canvas.fill_(value))
        pictures.append(render(indices, seed=0, size=size)[0])
    monkeypatch.undo()
    return (pictures[1].int() - pictures[0].int()).amax(dim=1)


def test_form_of_what_is_drawn():
    scenes = render(torch.arange(5), seed=0, size=(24, 40))
    assert [tuple(part.shape) for part in scenes] == [(5, 3, 24, 40), (5,), (5, 24, 40)]
    assert [part.dtype for part in scenes] == [torch.uint8, torch.int64, torch.uint8]
    assert render(torch.arange(0), seed=0, size=8).images.shape == (0, 3, 8, 8)


@pytest.mark.parametrize("size", [0, [8, 8, 8], 2.5])
def test_a_size_that_cannot_be_is_refused(size):
    with pytest.raises(OptionError, match="size"):
        render(torch.arange(2), seed=0, size=size)


@pytest.mark.parametrize("size", [32, 7, 1, (9, 33), (64, 16)])
def test_an_image_does_not_depend_on_its_batch(size):
    scenes = render(torch.arange(64), seed=3, size=size)
    scattered = torch.tensor([63, 7, 7, 0, 31])
    for batch in (torch.tensor([7]), torch.arange(5, 22), torch.arange(63, -1, -1), scattered):
        for alone, together in zip(render(batch, seed=3, size=size), scenes, strict=True):
            assert torch.equal(alone, together[batch])


@pytest.mark.parametrize("chunk", [1, 1000, 5000, 1 << 20])
def test_an_image_does_not_depend_on_threads_or_chunks(monkeypatch, chunk):
    indices, size, threads = torch.arange(12), (61, 67), torch.get_num_threads()
    expected = render(indices, seed=3, size=size)[0]
    monkeypatch.setattr(shapes, "_CHUNK", chunk)
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            assert torch.equal(render(indices, seed=3, size=size)[0], expected)
    finally:
        torch.set_num_threads(threads)


def test_seeds_and_indices_differ():
    first, first_labels, _ = render(torch.arange(100), seed=0, size=16)
    second, second_labels, _ = render(torch.arange(100), seed=1, size=16)
    assert (first.float() - second.float()).abs().mean(dim=(1, 2, 3)).min() > 10
    assert (first_labels != second_labels).sum() > 70
    assert len(first.flatten(1).unique(dim=0)) == 100


def test_sizes_of_one_aspect_show_one_scene():
    large = render(torch.arange(20), seed=0, size=128)[0].float()
    small = render(torch.arange(20), seed=0, size=32)[0].float()
    shrunk = F.avg_pool2d(large, 4)
    assert torch.corrcoef(torch.stack([small.flatten(), shrunk.flatten()]))[0, 1] > 0.95


def test_the_bits_never_change():
    """Results on the pages were measured on these images; their shapes, poses and colours were tested before."""
    images, labels, masks = render(torch.arange(200), seed=3, size=(24, 40))
    digest = hashlib.sha256(images.numpy().tobytes() + labels.numpy().tobytes() + masks.numpy().tobytes())
    assert digest.hexdigest() == "aff0fbeea312cda2d4a749673427d00e6c497dec2fecfc445c170f4b13a31335"


def test_square_roots_are_rounded_correctly():
    """torch's own in float32 are not: on an Intel processor, 0.6 % of them differ in the last bit."""
    x = torch.rand(100_000, generator=torch.Generator().manual_seed(0)) * 4
    assert torch.equal(shapes._root(x), torch.from_numpy(np.sqrt(x.numpy())))


@pytest.mark.parametrize("size", [32, (24, 40), 7])
def test_masks_lie_where_the_shapes_are_drawn(monkeypatch, size):
    indices = torch.arange(200)
    _, labels, masks = render(indices, seed=0, size=size)
    # At the shape's edge the scene is in its shadow, of 0.4 of the light, and half of that is hidden.
    change, hidden = seen_through(monkeypatch, indices, size), masks > 0
    edge = 0.5 * 0.4 * 255
    assert (change[hidden] < edge + 1.5).all()
    assert (change[~hidden] > edge - 1.5).all()
    for mask, label in zip(masks, labels, strict=True):
        assert set(mask.unique().tolist()) <= {0, label.item() + 1}
    areas = hidden.double().mean((1, 2))
    assert areas.min() > 0.02
    assert areas.max() < 0.7


def test_the_data_set_has_disjoint_images_and_their_masks():
    data = shapes.shapes(Shapes(image_size=(16, 24), images=20, held_out_images=12, seed=3))
    train, test = data.train.in_memory, data.test.in_memory
    assert (train.shape, test.shape) == ((20, 3, 16, 24), (12, 3, 16, 24))
    assert len(torch.cat((train, test)).flatten(1).unique(dim=0)) == 32
    for source in (data.train, data.test, data.train.take(torch.tensor([7, 3]))):
        found = masks(source, CenterCrop(size=(16, 24)).build().mask, torch.arange(len(source)))
        assert (found.flatten(1).amax(1) == source.labels + 1).all()


def test_a_texture_changes_pixels_of_the_shape_alone_and_is_that_of_its_class():
    indices = torch.arange(100)
    plain = render(indices, seed=0, size=64)
    own = render(indices, seed=0, size=64, textures=plain.labels)
    assert own.labels.equal(plain.labels)
    assert own.masks.equal(plain.masks)
    near = F.max_pool2d((plain.masks > 0).float(), 13, 1, 6)  # tips are smoothed over a few pixels
    assert not (own.images != plain.images).any(1)[near == 0].any()
    assert torch.equal(render(indices[7:9], seed=0, size=64, textures=plain.labels[7:9]).images, own.images[7:9])
    data = shapes.shapes(Shapes(image_size=64, images=60, held_out_images=40, textures=True))
    assert torch.cat((data.train.in_memory, data.test.in_memory)).equal(own.images)


def test_textures_differ_by_more_than_a_shift():
    """Amplitudes of frequencies, which a shift does not change, identify each texture."""
    amplitudes = []
    for shift in (0.0, 0.37):
        y, x = torch.meshgrid(torch.arange(40) / 8 + shift, torch.arange(40) / 8 + 2 * shift, indexing="ij")
        patterns = torch.stack([texture(x, y) for texture in shapes._TEXTURES])
        assert patterns.abs().max() <= 1
        amplitudes.append(torch.fft.fft2(patterns).abs().flatten(1))
    assert (torch.cdist(*amplitudes).argmin(1) == torch.arange(10)).all()


def test_cues_conflict_evenly_on_scenes_of_their_own():
    scenes, textures = shapes.conflicts(3000, seed=2, size=8)
    assert (scenes.labels != textures).all()
    pairs = (10 * scenes.labels + textures).bincount(minlength=100).view(10, 10)
    assert pairs.sum(1).tolist() == [300] * 10
    expected = 300 / 9
    others = pairs[~torch.eye(10, dtype=torch.bool)].double()
    assert ((others - expected).square() / expected).sum() < 130  # chi-squared with 80 degrees of freedom
    again, same = shapes.conflicts(50, seed=2, size=8)
    assert again.images.equal(scenes.images[:50])
    assert same.equal(textures[:50])
    trained = render(torch.arange(3000), seed=2, size=8)
    assert len(torch.cat((scenes.masks, trained.masks)).flatten(1).unique(dim=0)) > 5000
