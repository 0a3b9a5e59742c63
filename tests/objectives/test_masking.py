"""Corruption: exact counts, BERT's fractions, a function of (seed, slot) alone, and its effect as a plain loop."""

import pytest
import torch
from command import error_of
from scipy import stats

from ssvit.objectives.masked_patch import MASKED, REPLACED, UNCHANGED, corrupt, sample_corruption
from ssvit.objectives.masked_patch_options import Masking

GRIDS = [(1, 2), (4, 4), (8, 8), (14, 14), (7, 7), (3, 11), (16, 5), (1, 9)]


def of(masking: Masking, images: int, grid: tuple[int, int], seed: int = 0):
    return sample_corruption(masking, torch.arange(images), seed=seed, grid=grid)


def corrupted_map(at: torch.Tensor, grid: tuple[int, int]) -> torch.Tensor:
    return torch.zeros(len(at), grid[0] * grid[1]).scatter(1, at, 1.0).view(-1, *grid)


def neighbours(corrupted: torch.Tensor) -> float:
    """Return the mean fraction of a corrupted patch's four neighbours that are corrupted too."""
    pairs = torch.cat(
        [
            torch.stack([corrupted[:, 1:].flatten(), corrupted[:, :-1].flatten()]),
            torch.stack([corrupted[:, :, 1:].flatten(), corrupted[:, :, :-1].flatten()]),
        ],
        dim=1,
    )
    return (2 * (pairs[0] * pairs[1]).sum() / (pairs[0] + pairs[1]).sum()).item()


@pytest.mark.parametrize("shape", ["random", "block"])
@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("fraction", [0.01, 0.15, 0.5, 0.75, 1.0])
def test_every_image_has_the_exact_count_of_different_patches(fraction, grid, shape):
    n = grid[0] * grid[1]
    masking = Masking(corrupted=fraction, shape=shape)
    noise = of(masking, 50, grid)
    count = masking.count(n)
    assert count == 1 or abs(count - fraction * n) <= 0.5
    assert noise.ids.shape == noise.types.shape == noise.replacement.shape == (50, count)
    assert {choice.dtype for choice in noise} == {torch.int64}
    assert (noise.ids.sort(1).values.diff(dim=1) > 0).all()
    for ids in (noise.ids, noise.replacement):
        assert ((ids >= 0) & (ids < n)).all()


@pytest.mark.parametrize("shape", ["random", "block"])
@pytest.mark.parametrize(
    "fractions", [(0.8, 0.1, 0.1), (0.5, 0.25, 0.25), (0.6, 0.3, 0.1), (1, 0, 0), (0, 1, 0), (0, 0, 1)]
)
def test_corruption_types_have_their_fractions(fractions, shape):
    masking = Masking(**dict(zip(("mask", "replace", "unchanged"), fractions, strict=True)), shape=shape)
    kinds = of(masking, 1100, (14, 14)).types
    assert kinds.numel() > 100_000
    for kind, fraction in zip((MASKED, REPLACED, UNCHANGED), fractions, strict=True):
        share = (kinds == kind).double().mean().item()
        assert abs(share - fraction) <= 4 * (fraction * (1 - fraction) / kinds.numel()) ** 0.5


def test_the_replacement_is_any_other_patch():
    noise = of(Masking(), 20_000, (3, 4))
    for place in range(12):
        counts = torch.bincount(noise.replacement[noise.ids == place], minlength=12)
        assert counts[place] == 0
        others = torch.cat([counts[:place], counts[place + 1 :]])
        assert stats.chisquare(others.numpy()).pvalue > 1e-4


def test_patches_are_corrupted_as_often_and_independently_and_blocks_everywhere():
    corrupted = corrupted_map(of(Masking(), 5000, (4, 4)).ids, (4, 4)).flatten(1)
    together = corrupted.T @ corrupted / 5000
    for pairs, expected in ((together.diagonal(), 1 / 2), (together[~torch.eye(16, dtype=torch.bool)], 1 / 2 * 7 / 15)):
        assert ((pairs - expected).abs() < 5 * (expected * (1 - expected) / 5000) ** 0.5).all()
    shares = corrupted_map(of(Masking(corrupted=0.4, shape="block"), 2000, (8, 8)).ids, (8, 8)).mean(0)
    assert shares.min() > 0.05
    assert max(shares.flip(side).sub(shares).abs().max() for side in (0, 1)) < 0.08


@pytest.mark.parametrize("shape", ["random", "block"])
def test_place_and_corruption_type_and_replacement_are_independent(shape):
    noise = of(Masking(shape=shape), 20_000, (4, 4))
    choices = [corrupted_map(noise.ids, (4, 4)).flatten(1), (noise.types == MASKED).float()]
    # The index among the n - 1 other patches, as it was sampled.
    choices.append((noise.replacement - (noise.replacement > noise.ids).long()).float())
    for number, choice in enumerate(choices):
        for other in choices[:number]:
            correlations = torch.corrcoef(torch.cat([choice, other], dim=1).T)
            assert correlations[: choice.shape[1], choice.shape[1] :].abs().max() < 5 / 20_000**0.5


@pytest.mark.parametrize("fraction", [0.25, 0.5])
@pytest.mark.parametrize("grid", [(14, 14), (8, 8), (8, 20)])
def test_blocks_are_contiguous(grid, fraction):
    random, block = (
        neighbours(corrupted_map(of(Masking(corrupted=fraction, shape=shape), 300, grid).ids, grid))
        for shape in ("random", "block")
    )
    assert random == pytest.approx(fraction, abs=0.03)
    assert block > fraction + 0.2


@pytest.mark.parametrize("shape", ["random", "block"])
@pytest.mark.parametrize(("grid", "unit"), [((8, 8), 2), ((6, 9), 3), ((4, 4), 4), ((14, 14), 2)])
@pytest.mark.parametrize("fraction", [0.3, 0.6, 1.0])
def test_units_are_corrupted_as_a_whole(grid, unit, fraction, shape):
    masking = Masking(corrupted=fraction, shape=shape, unit=unit)
    noise, units = of(masking, 300, grid), (grid[0] // unit, grid[1] // unit)
    count = max(1, round(fraction * units[0] * units[1])) * unit**2
    assert noise.ids.shape == noise.types.shape == noise.replacement.shape == (300, count)
    blocks = corrupted_map(noise.ids, grid).unflatten(1, (-1, unit)).unflatten(3, (-1, unit)).sum((2, 4))
    assert set(blocks.unique().tolist()) <= {0.0, unit**2}
    # The same choice as of patches on a grid of units.
    plain = Masking(corrupted=fraction, shape=shape, mask=1, replace=0, unchanged=0)
    assert torch.equal(corrupted_map(of(plain, 300, units).ids, units), blocks / unit**2)


def test_grids_that_cannot_be_corrupted_are_reported():
    for masking, grid, name in ((Masking(), (1, 1), "replace"), (Masking(unit=3), (9, 8), "unit")):
        assert error_of(of, masking, 2, grid).name == name
    noise = of(Masking(mask=0.9, replace=0, unchanged=0.1), 200, (1, 1))
    tokens = torch.randn(200, 1, 3)
    expected = tokens * (noise.types == UNCHANGED)[:, :, None]
    assert torch.equal(corrupt(tokens, torch.zeros(3), noise), expected)


def by_loops(tokens: torch.Tensor, mask_token: torch.Tensor, noise) -> torch.Tensor:
    """Corruption patch by patch; replacements come from the original sequence."""
    rows = []
    for image in range(len(tokens)):
        new = list(tokens[image])
        for at, kind, other in zip(*(choice[image].tolist() for choice in noise), strict=True):
            if kind == MASKED:
                new[at] = mask_token
            elif kind == REPLACED:
                new[at] = tokens[image, other]
        rows.append(torch.stack(new))
    return torch.stack(rows)


@pytest.mark.parametrize("fractions", [(0.8, 0.1, 0.1), (0.3, 0.4, 0.3), (0, 1, 0)])
def test_corruption_equals_a_loop_and_so_does_its_gradient(fractions):
    torch.manual_seed(0)
    mask, replace, unchanged = fractions
    noise = of(Masking(mask=mask, replace=replace, unchanged=unchanged), 6, (4, 5))
    tokens, mask_token = torch.randn(6, 20, 3, requires_grad=True), torch.randn(3, requires_grad=True)
    weight, before = torch.randn(6, 20, 3), tokens.detach().clone()
    outputs = [function(tokens, mask_token, noise) for function in (corrupt, by_loops)]
    assert torch.equal(*outputs)
    assert torch.equal(tokens, before)
    gradients = [
        torch.autograd.grad((out * weight).sum(), (tokens, mask_token), materialize_grads=True) for out in outputs
    ]
    torch.testing.assert_close(*gradients)
    assert corrupt(tokens.bfloat16(), mask_token, noise).dtype == torch.bfloat16
