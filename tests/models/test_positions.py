"""Position embeddings against plain Python loops over rows, columns and tokens."""

import pytest
import torch

from ssvit.models.positions import Learned1D, Learned2D, Relative, SineCosine2D

GRIDS = [(1, 1), (4, 4), (3, 5), (5, 2)]


@pytest.mark.parametrize("special", [0, 1, 2])
@pytest.mark.parametrize("grid", GRIDS)
def test_learned_2d_joins_the_column_and_the_row(grid, special):
    module = Learned2D(grid, special, 12)
    rows = module()
    assert rows.shape == (special + grid[0] * grid[1], 12)
    assert torch.equal(rows[:special], module.special)
    for y in range(grid[0]):
        for x in range(grid[1]):
            expected = module.columns[x].tolist() + module.rows[y].tolist()
            assert rows[special + y * grid[1] + x].tolist() == expected


@pytest.mark.parametrize("grid", [*GRIDS, (14, 14), (7, 30)])
def test_unresized_sine_cosine_is_bit_for_bit_float64_waves_rounded(grid):
    frequency = 10_000.0 ** -(torch.arange(48, dtype=torch.float64) / 48)
    rows, columns = torch.meshgrid(*(torch.arange(side, dtype=torch.float64) for side in grid), indexing="ij")
    angles = [place.flatten()[:, None] * frequency for place in (columns, rows)]
    waves = torch.cat([wave for angle in angles for wave in (angle.sin(), angle.cos())], dim=1)
    assert torch.equal(SineCosine2D(grid, 1, 192)(), torch.cat([torch.zeros(1, 192), waves.float()]))


def test_sine_cosine_learns_nothing_and_tells_a_checkpoint_where_its_rows_and_columns_lie():
    module = SineCosine2D((3, 4), 1, 8)
    assert not list(module.parameters())
    assert {name: value.tolist() for name, value in module.state_dict().items()} == {
        "rows": [0, 1, 2], "columns": [0, 1, 2, 3]
    }  # fmt: skip


@pytest.mark.parametrize("kind", [Learned1D, Learned2D])
def test_learned_embeddings_start_small_and_random(kind):
    torch.manual_seed(0)
    for parameter in kind((40, 40), 1, 64).parameters():
        if parameter.numel() > 1000:
            assert parameter.std().item() == pytest.approx(0.02, rel=0.1)
            assert abs(parameter.mean().item()) < 0.003
    assert Relative((10, 20), 0, 64).keys.std().item() == pytest.approx(0.02, rel=0.05)
