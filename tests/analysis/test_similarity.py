"""Linear CKA against its definition by sums over distinct images, and what it must not depend on."""

from itertools import permutations

import numpy as np
import pytest
import torch

from ssvit.analysis import similarity


def grams(*representations: torch.Tensor) -> torch.Tensor:
    return torch.stack([similarity.gram(one[:, None]) for one in representations])


def features(b: int, d: int, seed: int) -> torch.Tensor:
    return torch.randn(b, d, generator=torch.Generator().manual_seed(seed)).double()


def test_hsic_is_the_mean_over_distinct_images():
    """The U-statistic of Song et al. 2012, in which every term has four images that differ."""
    x, y = features(6, 3, 0), features(6, 4, 1) + features(6, 4, 0) + 5
    k, l = ((one @ one.T).numpy() for one in (x, y))  # noqa: E741
    terms = [k[i, j] * l[i, j] + k[i, j] * l[q, r] - 2 * k[i, j] * l[i, q] for i, j, q, r in permutations(range(6), 4)]
    found = similarity.hsic(grams(x, y))
    assert found[0, 1].item() == pytest.approx(np.mean(terms), rel=1e-9)
    assert found[1, 0].item() == pytest.approx(np.mean(terms), rel=1e-9)


def test_many_images_at_once_have_the_biased_definition_of_kornblith():
    x = features(600, 4, 0)
    y = x @ features(4, 7, 1) + 0.5 * features(600, 7, 2)
    found = similarity.cka(similarity.hsic(grams(x, y)))
    a, b = (one - one.mean(0) for one in (x, y))
    plain = (a.T @ b).norm() ** 2 / ((a.T @ a).norm() * (b.T @ b).norm())
    assert found[0, 1].item() == pytest.approx(plain.item(), abs=0.01)


def test_neither_rotation_nor_scale_nor_shift_changes_it():
    x, y = features(20, 5, 0), features(20, 5, 1)
    rotation = torch.linalg.qr(features(5, 5, 2))[0]
    found = similarity.cka(similarity.hsic(grams(x, y, 7 * x @ rotation + 3)))
    torch.testing.assert_close(found.diagonal(), torch.ones(3).double())
    assert found[0, 2].item() == pytest.approx(1)
    assert found[1, 2].item() == pytest.approx(found[1, 0].item())


def test_small_batches_say_what_one_large_one_does():
    x = features(800, 6, 0)
    y = x + features(800, 6, 1)
    whole = similarity.cka(similarity.hsic(grams(x, y)))[0, 1].item()
    parts = sum(similarity.hsic(grams(a, b)) for a, b in zip(x.split(8), y.split(8), strict=True))
    assert similarity.cka(parts)[0, 1].item() == pytest.approx(whole, abs=0.05)
    # What shares nothing is near 0, where the biased estimate of wide layers is near 1.
    wide = [features(400, 300, seed) for seed in (2, 3)]
    apart = sum(similarity.hsic(grams(a, b)) for a, b in zip(*(one.split(8) for one in wide), strict=True))
    assert abs(similarity.cka(apart)[0, 1].item()) < 0.1


def test_tokens_are_side_by_side():
    tokens = features(5, 12, 0).view(5, 3, 4)
    centred = tokens - tokens.mean(0)
    found = similarity.gram(tokens)
    for i in range(5):
        for j in range(5):
            assert found[i, j].item() == pytest.approx(0 if i == j else (centred[i] * centred[j]).sum().item())


def test_a_layer_that_says_the_same_of_all_images_is_undefined():
    found = similarity.cka(similarity.hsic(grams(features(8, 3, 0), torch.ones(8, 3))))
    assert found[0, 0].item() == pytest.approx(1)
    assert found.isnan().sum() == 3


def test_three_images_are_too_few():
    with pytest.raises(ValueError, match="3 images: 4 or more"):
        similarity.hsic(torch.zeros(2, 3, 3))


@pytest.mark.parametrize(("own", "others"), [(3, 0), (3, 3), (2, 4), (1, 1)])
def test_figure_has_a_matrix_for_each_comparison(own, others):
    alignment = torch.rand(own + others, own + others)
    figure = similarity.plot(alignment, own, "another" if others else "")
    expected = [alignment[:own, :own], alignment[:own, own:]][: 1 + bool(others)]
    for matrix, values in zip(figure.matrices, expected, strict=True):
        assert np.array_equal(matrix.values, values)
    assert figure.png()
