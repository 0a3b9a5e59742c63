"""The similarity of position embeddings against a loop over pairs, and the place of each tile in its figure."""

import math

import numpy as np
import pytest
import tiny
import torch

from ssvit.analysis import positions
from ssvit.models.vit import ViT


def encoder(kind: str, **options) -> ViT:
    shape = {"image_size": [4, 6], "patch_size": 2, "width": 8, "depth": 2, "heads": 2}
    return tiny.vit(**shape | options, positions=kind)


@pytest.mark.parametrize("options", [{}, {"distillation_token": True}, {"positions_at": "every_layer"}], ids=str)
@pytest.mark.parametrize("kind", ["learned_1d", "learned_2d", "sine_cosine_1d", "sine_cosine_2d"])
def test_similarity_is_the_cosine_of_each_pair_of_patches(kind, options):
    vit = encoder(kind, **options)
    found = positions.similarity(vit)
    rows = vit.positions[0]().tolist()[vit.num_prefix_tokens :]
    assert found.shape == (6, 6)
    for i, a in enumerate(rows):
        for j, b in enumerate(rows):
            cosine = sum(x * y for x, y in zip(a, b, strict=True)) / math.hypot(*a) / math.hypot(*b)
            assert found[i, j].item() == pytest.approx(cosine, abs=1e-6)


def test_a_tile_stands_where_its_patch_does():
    found = positions.similarity(encoder("learned_1d"))
    figure = positions.plot(found, (2, 3))
    canvas = figure.values
    assert canvas.shape == (2 * 2 + 1, 3 * 3 + 2)
    for row in range(2):
        for column in range(3):
            tile = canvas[3 * row : 3 * row + 2, 4 * column : 4 * column + 3]
            assert np.array_equal(tile, found[3 * row + column].view(2, 3).numpy())
    assert np.isnan(canvas[2]).all()
    assert figure.png()


@pytest.mark.parametrize("grid", [(1, 1), (1, 40), (20, 30)])
def test_any_grid_fits(grid):
    figure = positions.plot(torch.eye(grid[0] * grid[1]), grid)
    tall, wide = figure.values.shape
    assert max(tall, wide) <= 16 * (max(grid) + max(1, max(grid) // 8))
    assert figure.png()
