"""Corruption: exact counts, BERT's fractions, a function of (seed, slot) alone, and its effect as a plain loop."""

import pytest
import torch
from scipy import stats

from ssvit.objectives.masked_patch import MASKED, REPLACED, UNCHANGED, Masking, corrupt
from ssvit.options import OptionError

GRIDS = [(1, 2), (4, 4), (8, 8), (14, 14), (7, 7), (3, 11), (16, 5), (1, 9)]


def of(masking: Masking, images: int, grid: tuple[int, int], seed: int = 0):
    return masking.sample(torch.arange(images), seed=seed, grid=grid)


def corrupted_map(at: torch.Tensor, grid: tuple[int, int]) -> torch.Tensor:
    return torch.zeros(len(at), grid[0] * grid[1]).scatter(1, at, 1.0).view(-1, *grid)


def neighbours(corrupted: torch.Tensor) -> float:
    """The mean share of a corrupted patch's neighbours (up, down, left, right) that are corrupted too."""
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
    noise = of(Masking(corrupted=fraction, shape=shape), 50, grid)
    count = noise.ids.shape[1]
    assert count >= 1
    assert count == 1 or abs(count - fraction * n) <= 0.5
    assert count == Masking(corrupted=fraction).count(n)
    assert noise.ids.shape == noise.kind.shape == noise.replacement.shape == (50, count)
    assert all(choice.dtype == torch.int64 for choice in noise)
    assert ((noise.ids >= 0) & (noise.ids < n)).all()
    assert (noise.ids.sort(1).values.diff(dim=1) > 0).all()
    assert ((noise.replacement >= 0) & (noise.replacement < n)).all()


@pytest.mark.parametrize("shape", ["random", "block"])
@pytest.mark.parametrize("fractions", [(0.8, 0.1, 0.1), (0.5, 0.25, 0.25), (0.6, 0.3, 0.1)])
def test_fates_have_the_fractions_asked_for(fractions, shape):
    masking = Masking(**dict(zip(("mask", "replace", "keep"), fractions, strict=True)), shape=shape)
    fate = of(masking, 1100, (14, 14)).kind
    assert fate.numel() > 100_000
    for kind, fraction in zip((MASKED, REPLACED, UNCHANGED), fractions, strict=True):
        share = (fate == kind).double().mean().item()
        assert abs(share - fraction) < 4 * (fraction * (1 - fraction) / fate.numel()) ** 0.5


@pytest.mark.parametrize(("options", "kind"), [((1, 0, 0), MASKED), ((0, 1, 0), REPLACED), ((0, 0, 1), UNCHANGED)])
def test_a_fraction_of_one_is_all(options, kind):
    mask, replace, keep = options
    assert (of(Masking(mask=mask, replace=replace, keep=keep), 500, (8, 8)).kind == kind).all()


def test_fates_do_not_depend_on_the_place():
    noise = of(Masking(), 2000, (8, 8))
    masked = torch.bincount(noise.ids[noise.kind == MASKED], minlength=64)
    assert stats.chisquare(masked.numpy()).pvalue > 1e-3
    by_rank = (noise.kind == MASKED).sum(0)
    assert ((by_rank - 1600).abs() < 5 * (2000 * 0.8 * 0.2) ** 0.5).all()


def test_the_other_patch_is_any_but_its_own():
    grid = (3, 4)
    noise = of(Masking(), 20_000, grid)
    assert (noise.replacement != noise.ids).all()
    for place in range(12):
        counts = torch.bincount(noise.replacement[noise.ids == place], minlength=12)
        assert counts[place] == 0
        others = torch.cat([counts[:place], counts[place + 1 :]])
        assert stats.chisquare(others.numpy()).pvalue > 1e-4


def test_every_patch_is_corrupted_as_often():
    noise = of(Masking(corrupted=0.25), 8000, (5, 5))
    counts = torch.bincount(noise.ids.flatten(), minlength=25)
    # Drawing without return, so the variance of a count is that of a fraction of m / n.
    share = noise.ids.shape[1] / 25
    assert ((counts - 8000 * share).abs() < 4.5 * (8000 * share * (1 - share)) ** 0.5).all()


def test_pairs_of_patches_are_corrupted_independently():
    corrupted = corrupted_map(of(Masking(), 5000, (4, 4)).ids, (4, 4)).flatten(1)
    together = (corrupted.T @ corrupted)[~torch.eye(16, dtype=torch.bool)] / 5000
    expected = 8 / 16 * 7 / 15
    assert ((together - expected).abs() < 5 * (expected * (1 - expected) / 5000) ** 0.5).all()


@pytest.mark.parametrize("shape", ["random", "block"])
def test_place_and_fate_and_replacement_are_independent(shape):
    noise = of(Masking(shape=shape), 20_000, (4, 4))
    choices = [corrupted_map(noise.ids, (4, 4)).flatten(1), (noise.kind == MASKED).float()]
    # Which of the n - 1 others it is, counted as it was drawn.
    choices.append((noise.replacement - (noise.replacement > noise.ids).long()).float())
    for place, one in enumerate(choices):
        for other in choices[:place]:
            both = torch.corrcoef(torch.cat([one, other], dim=1).T)
            assert both[: one.shape[1], one.shape[1] :].abs().max() < 5 / 20_000**0.5


@pytest.mark.parametrize("shape", ["random", "block"])
def test_a_draw_depends_on_seed_and_slot_alone(shape):
    masking, order = Masking(shape=shape), torch.tensor([63, 5, 17, 17])
    whole = of(masking, 64, (6, 7))
    for choice, again in zip(whole, masking.sample(order, seed=0, grid=(6, 7)), strict=True):
        assert torch.equal(again, choice[order])
    torch.manual_seed(99)
    for choice, again in zip(whole, of(Masking(shape=shape), 64, (6, 7)), strict=True):
        assert torch.equal(again, choice)
    other = of(masking, 64, (6, 7), seed=1)
    assert not any(torch.equal(choice, again) for choice, again in zip(whole, other, strict=True))
    assert len(whole.ids.sort(1).values.unique(dim=0)) == 64


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
    noise = of(masking, 300, grid)
    units = grid[0] * grid[1] // unit**2
    count = max(1, round(fraction * units))
    corrupted = corrupted_map(noise.ids, grid)
    assert noise.ids.shape == noise.kind.shape == noise.replacement.shape == (300, count * unit**2)
    assert masking.count(grid[0] * grid[1]) == count * unit**2
    blocks = corrupted.unflatten(1, (-1, unit)).unflatten(3, (-1, unit)).sum((2, 4))
    assert set(blocks.unique().tolist()) <= {0.0, unit**2}
    assert (blocks.flatten(1).sum(1) == count * unit**2).all()
    share = blocks.mean(0) / unit**2
    if shape == "random":  # five standard errors
        assert (share - count / units).abs().max() <= 5 * (count / units * (1 - count / units) / 300) ** 0.5
        # The same choice as of patches on a grid of units.
        plain = Masking(corrupted=fraction, mask=1, replace=0, keep=0)
        coarse = corrupted_map(of(plain, 300, tuple(blocks.shape[1:])).ids, blocks.shape[1:])
        assert torch.equal(coarse, blocks / unit**2)


def test_a_unit_must_divide_the_grid():
    with pytest.raises(OptionError, match=r"^unit=3: must divide the grid of 9x8 patches"):
        of(Masking(unit=3), 2, (9, 8))


def test_blocks_reach_the_whole_image():
    shares = corrupted_map(of(Masking(corrupted=0.4, shape="block"), 2000, (8, 8)).ids, (8, 8)).mean(0)
    assert shares.min() > 0.05
    assert shares.flip(0).sub(shares).abs().max() < 0.08
    assert shares.flip(1).sub(shares).abs().max() < 0.08


def test_an_image_of_one_patch_has_no_other():
    with pytest.raises(OptionError, match="replace"):
        of(Masking(), 2, (1, 1))
    noise = of(Masking(mask=0.9, replace=0, keep=0.1), 200, (1, 1))
    tokens = torch.randn(200, 1, 3)
    out = corrupt(tokens, torch.zeros(3), noise)
    assert torch.equal(out[noise.kind[:, 0] == UNCHANGED], tokens[noise.kind[:, 0] == UNCHANGED])
    assert not out[noise.kind[:, 0] == MASKED].any()


def loop(tokens: torch.Tensor, mask_token: torch.Tensor, noise) -> torch.Tensor:
    """What corruption does, patch by patch; replacements come from the sequence as it was."""
    rows = []
    for image in range(len(tokens)):
        new = list(tokens[image])
        for at, fate, other in zip(*(choice[image].tolist() for choice in noise), strict=True):
            if fate == MASKED:
                new[at] = mask_token
            elif fate == REPLACED:
                new[at] = tokens[image, other]
        rows.append(torch.stack(new))
    return torch.stack(rows)


@pytest.mark.parametrize("fractions", [(0.8, 0.1, 0.1), (0.3, 0.4, 0.3), (0, 1, 0)])
def test_corruption_equals_a_loop_and_so_does_its_gradient(fractions):
    torch.manual_seed(0)
    mask, replace, keep = fractions
    noise = of(Masking(mask=mask, replace=replace, keep=keep), 6, (4, 5))
    tokens, mask_token = torch.randn(6, 20, 3, requires_grad=True), torch.randn(3, requires_grad=True)
    weight = torch.randn(6, 20, 3)
    before = tokens.detach().clone()
    outputs = [how(tokens, mask_token, noise) for how in (corrupt, loop)]
    assert torch.equal(*outputs)
    assert torch.equal(tokens, before)
    gradients = [
        torch.autograd.grad((out * weight).sum(), (tokens, mask_token), materialize_grads=True) for out in outputs
    ]
    torch.testing.assert_close(*gradients)
    masked = torch.zeros(6, 20, dtype=torch.bool).scatter(1, noise.ids, noise.kind == MASKED)
    torch.testing.assert_close(gradients[0][1], weight[masked].sum(0))


def test_uncorrupted_and_kept_patches_stay_to_the_bit():
    noise = of(Masking(), 50, (8, 8))
    tokens = torch.randn(50, 64, 4)
    same = (corrupt(tokens, torch.randn(4), noise) == tokens).all(-1)
    changed = torch.zeros(50, 64, dtype=torch.bool).scatter(1, noise.ids, noise.kind != UNCHANGED)
    assert torch.equal(same, ~changed)


def test_the_mask_token_takes_the_type_of_the_patches():
    noise = of(Masking(), 3, (4, 4))
    assert corrupt(torch.randn(3, 16, 4).bfloat16(), torch.randn(4), noise).dtype == torch.bfloat16
