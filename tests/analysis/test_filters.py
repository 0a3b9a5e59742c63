"""The components of the filters against the eigenvectors of their covariance, and the filters against the encoder."""

import numpy as np
import pytest
import tiny
import torch

from ssvit.analysis import filters
from ssvit.figures.display import PLAIN
from ssvit.models.vit import ViT


def encoder(**options) -> ViT:
    shape = {"image_size": [4, 6], "patch_size": [2, 3], "width": 24, "depth": 1, "heads": 2, "std": [0.2, 0.3, 0.4]}
    return tiny.vit(**shape | options)


def test_filters_are_what_pixels_are_multiplied_by():
    vit = encoder()
    found = filters.filters(vit)
    images = torch.rand(2, 3, 4, 6)
    black = vit.embed(torch.zeros_like(images))
    expected = torch.einsum("dcpq,bcpq->bd", found, images[:, :, 2:, 3:])  # the last patch
    torch.testing.assert_close(vit.embed(images)[:, 3] - black[:, 3], expected, atol=1e-5, rtol=1e-4)


def test_components_are_the_eigenvectors_of_the_covariance():
    weight = filters.filters(encoder())
    found = filters.components(weight, 5)
    values, vectors = np.linalg.eigh(np.cov(weight.flatten(1).double().numpy(), rowvar=False))
    assert found.filters.shape == (5, 3, 2, 3)
    for place in range(5):
        mine, other = found.filters[place].flatten().numpy(), vectors[:, -1 - place]
        assert abs(mine @ other) == pytest.approx(1)
        assert found.shares[place].item() == pytest.approx(values[-1 - place] / values.sum())
        assert mine[np.abs(mine).argmax()] > 0


@pytest.mark.parametrize(
    ("options", "count"),
    [({}, 18), ({"width": 8}, 7), ({"patch_size": 1}, 3), ({"width": 64, "image_size": 8, "patch_size": 4}, 28)],
)
def test_there_are_as_many_components_as_there_can_be(options, count):
    found = filters.components(filters.filters(encoder(**options)))
    assert len(found.filters) == len(found.shares) == count
    if count < 28:
        assert found.shares.sum().item() == pytest.approx(1)


@pytest.mark.parametrize("channels", [1, 2, 3])
def test_every_component_is_drawn(channels):
    found = filters.components(filters.filters(encoder(channels=channels, std=0.5)))
    figure = filters.plot(found, PLAIN)
    pictures = [picture.image.movedim(0, -1).numpy() for row in figure.rows for picture in row]
    assert len(pictures) == len(found.filters)
    for picture, one in zip(pictures, found.filters, strict=True):
        assert picture.shape == (2, 3, 3)
        if channels == 3:
            drawn = one.permute(1, 2, 0).numpy()
            assert np.allclose(picture, (drawn - drawn.min()) / (drawn.max() - drawn.min()))
    assert figure.png()
