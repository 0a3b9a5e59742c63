"""The similarity of layers is the unbiased estimate of CKA in its definition."""

import itertools
import math

import pytest
import torch
from torch import nn

from ssvit.analysis import similarity
from ssvit.errors import UserError


def hsic(first: torch.Tensor, second: torch.Tensor) -> float:
    """Return the U-statistic of HSIC, the mean over all ordered sets of four different images (Song et al. 2012)."""
    k, m = ((rows.flatten(1).double() @ rows.flatten(1).double().T).tolist() for rows in (first, second))
    terms = [
        k[i][j] * m[i][j] + k[i][j] * m[q][r] - 2 * k[i][j] * m[i][q]
        for i, j, q, r in itertools.permutations(range(len(k)), 4)
    ]
    return sum(terms) / len(terms)


class Layers(nn.Module):
    """Return maps of images by functions."""

    def __init__(self, *functions) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))
        self.functions = functions

    def maps(self, images):
        return [function(images) for function in self.functions]


def wide(seed):
    weight = torch.randn(12, 20, generator=torch.Generator().manual_seed(seed)).double()
    return lambda images: (images.flatten(1).double() @ weight).tanh().view(-1, 2, 2, 5)


def test_it_is_the_definition_averaged_over_batches():
    torch.manual_seed(0)
    images = torch.randn(14, 3, 2, 2)
    functions = [wide(0), wide(1), lambda images: images.movedim(1, -1)]
    values = similarity.cka([Layers(*functions[:2]), Layers(functions[2])], images, batch_size=8)
    for (row, first), (column, second) in itertools.product(enumerate(functions), repeat=2):

        def mean(a, b):
            return sum(hsic(a(part), b(part)) for part in (images[:7], images[7:])) / 2

        expected = mean(first, second) / math.sqrt(mean(first, first) * mean(second, second))
        assert values[row, column].item() == pytest.approx(expected, abs=1e-9)


def test_rotations_and_scales_do_not_matter_and_unrelated_wide_features_are_not_similar():
    torch.manual_seed(0)
    images = torch.randn(64, 3, 2, 2)
    rotation = torch.linalg.qr(torch.randn(12, 12).double())[0]
    noise = torch.randn(2, 64, 1, 1, 500).double()

    def rotated(images):
        return 3 * (images.flatten(1).double() @ rotation)[:, None, None] + 1

    encoder = Layers(lambda images: images.movedim(1, -1), rotated, lambda _: noise[0], lambda _: noise[1])
    values = similarity.cka([encoder], images, batch_size=64)
    torch.testing.assert_close(values.diagonal(), torch.ones(4).double())
    assert values[0, 1].item() == pytest.approx(1, abs=1e-6)
    assert abs(values[2, 3].item()) < 0.1  # the biased estimate is 0.89


def test_too_few_images_are_an_error():
    with pytest.raises(UserError):
        similarity.cka([Layers(wide(0))], torch.randn(3, 3, 2, 2), batch_size=8)


def test_a_plot_has_one_tick_in_the_middle_of_each_encoder():
    plot = similarity.plot(torch.ones(5, 5), {"a": 2, "b": 3})
    assert plot.values.shape == (6, 6)
    assert plot.xticks == {"a": 0.5, "b": 4}
    plot.png()
