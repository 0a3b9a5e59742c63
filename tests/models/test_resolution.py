"""An encoder taken to images of another size, against scipy's zoom, timm's resampling, and plain interpolation."""

import pytest
import scipy.ndimage
import timm.layers
import tiny
import torch
from command import error_of

from ssvit.data.augment.options import MultiCrop as MultiCropOptions
from ssvit.data.augment.views import MultiCrop
from ssvit.data.batch import Batch
from ssvit.errors import OptionError
from ssvit.models import vit_options
from ssvit.models.positions import Learned1D, Learned2D, Relative, SineCosine2D
from ssvit.models.vit import ViT

SMALL = {"image_size": 16, "patch_size": 4, "width": 24, "depth": 3, "heads": 3, "mean": 0.4, "std": 0.2}
ADDITIVE = ("learned_1d", "learned_2d", "sine_cosine_1d", "sine_cosine_2d")
PLACES = [("relative", "stem"), ("none", "stem")]
PLACES += [(kind, at) for kind in ADDITIVE for at in ("stem", "every_layer", "every_layer_shared")]
# The tokens before the patches, and ways of resizing, which do not depend on them.
TOKENS = pytest.mark.parametrize(
    ("special", "how"),
    [({}, "paper"), ({}, "timm"), ({"distillation_token": True}, "paper"),
     ({"class_token": False, "pooling": "patch_mean"}, "paper")],
)  # fmt: skip
GRIDS = [((4, 4), (7, 7)), ((7, 7), (4, 4)), ((3, 5), (8, 6)), ((6, 2), (3, 5)), ((4, 6), (4, 9)), ((1, 4), (3, 1))]


def build(seed: int = 0, **options) -> ViT:
    """A small encoder in which no weight is zero or one."""
    return tiny.vit(seed=seed, by=0.1, **SMALL | options).eval()


def resized(kind: type, old: tuple[int, int], new: tuple[int, int], how: str, special: int = 1, width: int = 12):
    """A module of one grid, and another that took its state over."""
    torch.manual_seed(0)
    before, after = kind(old, special, width), kind(new, special, width)
    after.load_state_dict(before.state_dict() | before.resampled(new, how))
    return before, after


def reference(table: torch.Tensor, new: tuple[int, int], how: str) -> torch.Tensor:
    """A table (y, x, d) laid over another grid by a peer: scipy as in the authors' code, or timm."""
    y, x, d = table.shape
    if how == "paper":
        return torch.from_numpy(scipy.ndimage.zoom(table.numpy(), (new[0] / y, new[1] / x, 1), order=1))
    flat = timm.layers.resample_abs_pos_embed(table.reshape(1, y * x, d), list(new), [y, x], num_prefix_tokens=0)
    return flat.view(*new, d)


@pytest.mark.parametrize("special", [0, 1, 2])
@pytest.mark.parametrize("how", ["paper", "timm"])
@pytest.mark.parametrize(("old", "new"), GRIDS)
@pytest.mark.parametrize("kind", [Learned1D, Learned2D])
def test_learned_positions_are_laid_over_the_new_grid_as_the_peer_does(kind, old, new, how, special):
    before, after = resized(kind, old, new, how, special)
    assert torch.equal(after()[:special], before()[:special])
    expected = reference(before()[special:].detach().view(*old, 12), new, how)
    torch.testing.assert_close(after()[special:].detach().view(*new, 12), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("how", ["paper", "timm"])
@pytest.mark.parametrize(("old", "new"), [((4, 1), (7, 1)), ((4, 3), (7, 1)), ((7, 1), (4, 2)), ((4, 1), (7, 3))])
@pytest.mark.parametrize("kind", [Learned1D, Learned2D, SineCosine2D])
def test_a_grid_lying_down_is_resized_as_one_that_stands(kind, old, new, how):
    standing, lying = kind(old, 0, 12), kind(old[::-1], 0, 12)
    with torch.no_grad():
        if kind is Learned1D:
            lying.embedding.copy_(standing.embedding.view(*old, 12).transpose(0, 1).flatten(0, 1))
        elif kind is Learned2D:
            lying.rows.copy_(standing.columns), lying.columns.copy_(standing.rows)
    results = []
    for before, grid in ((standing, new), (lying, new[::-1])):
        after = kind(grid, 0, 12)
        after.load_state_dict(before.state_dict() | before.resampled(grid, how))
        results.append(after().detach().view(*grid, 12))
    expected = results[0] if kind is Learned1D else results[0].roll(6, dims=-1)
    torch.testing.assert_close(results[1].transpose(0, 1), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("how", ["paper", "timm"])
@pytest.mark.parametrize(("old", "new"), GRIDS)
def test_resized_sine_cosine_is_the_waves_at_the_resized_coordinates(old, new, how):
    _, after = resized(SineCosine2D, old, new, how, special=2)
    rows, columns = torch.meshgrid(*(torch.arange(side).float() for side in old), indexing="ij")
    places = reference(torch.stack([rows, columns], dim=-1), new, how).double()
    assert not after()[:2].any()
    for y in range(new[0]):
        for x in range(new[1]):
            row, column = places[y, x]
            frequency = torch.tensor([10_000.0 ** -(i / 3) for i in range(3)], dtype=torch.float64)
            waves = [wave(place * frequency) for place in (column, row) for wave in (torch.sin, torch.cos)]
            torch.testing.assert_close(after()[2 + y * new[1] + x].double(), torch.cat(waves), atol=2e-6, rtol=0)


@pytest.mark.parametrize("how", ["paper", "timm"])
@pytest.mark.parametrize(("old", "new"), [*GRIDS, ((2, 2), (1, 1)), ((1, 1), (2, 2)), ((14, 14), (24, 24))])
@pytest.mark.parametrize("special", [0, 1, 2])
def test_relative_keys_are_stretched_linearly_around_the_zero_offset(old, new, how, special):
    before, after = resized(Relative, old, new, how, special, width=4)
    last, longest = (special + y * x - 1 for y, x in (new, old))
    assert torch.equal(after.keys[last], before.keys[longest])
    for offset in range(-last, last + 1):
        place = longest + (offset * longest / last if last else 0)
        low = min(int(place), 2 * longest)
        high = min(low + 1, 2 * longest)
        expected = before.keys[low] + (place - low) * (before.keys[high] - before.keys[low])
        torch.testing.assert_close(after.keys[last + offset], expected, atol=1e-5, rtol=1e-5)


@TOKENS
@pytest.mark.parametrize(("positions", "at"), PLACES)
def test_all_but_the_positions_is_taken_as_it_is(positions, at, special, how):
    options = {"positions": positions, "positions_at": at, **special}
    old, new = build(**options), build(1, image_size=[24, 12], **options, mean=[0.1, 0.2, 0.3], std=0.5)
    before = {name: value.clone() for name, value in old.state_dict().items()}
    new.load_weights_from(old, how=how)
    for name, value in new.state_dict().items():
        owner, _, leaf = name.rpartition(".")
        if not owner.startswith("positions") and "relative" not in owner:
            assert torch.equal(value, before[name]), name
        else:
            resampled = old.get_submodule(owner).resampled(new.grid, how)
            assert torch.equal(value, resampled.get(leaf, before[name])), name
        assert torch.equal(old.state_dict()[name], before[name])
    assert new.grid == (6, 3)
    assert all(parameter.is_leaf and parameter.requires_grad for parameter in new.parameters())
    assert {name: new.arguments[name] for name in ("mean", "std")} == {"mean": 0.4, "std": 0.2}
    assert new(torch.rand(2, 3, 24, 12)).isfinite().all()


@pytest.mark.parametrize("how", ["paper", "timm"])
@pytest.mark.parametrize(("positions", "at"), PLACES)
def test_on_the_same_grid_nothing_changes_by_a_bit(positions, at, how):
    options = {"positions": positions, "positions_at": at, "distillation_token": True}
    old, new = build(**options), build(1, **options, pooling="patch_mean", dropout=0.1, stochastic_depth=0.1, mean=0.6)
    images = torch.rand(2, 3, 16, 16)
    assert not torch.equal(new(images), old(images))
    new.load_weights_from(old, how=how)
    assert torch.equal(new(images), old(images))


def test_coordinates_once_resized_are_kept_on_the_same_grid():
    first, second, third = (
        build(seed, positions="sine_cosine_2d", image_size=size) for seed, size in enumerate((16, 24, 24))
    )
    second.load_weights_from(first, how="paper")
    third.load_weights_from(second, how="timm")
    assert third.positions[0].rows.tolist() == pytest.approx([0, 0.6, 1.2, 1.8, 2.4, 3])
    assert torch.equal(third(torch.full((1, 3, 24, 24), 0.7)), second(torch.full((1, 3, 24, 24), 0.7)))


def test_the_same_architecture_may_be_written_in_other_words():
    old, new = build(), build(1, patch_size=[4, 4], mlp_width=96, image_size=[16, 16])
    new.load_weights_from(old, how="paper")
    images = torch.rand(2, 3, 16, 16)
    assert torch.equal(new(images), old(images))


DIFFERENT = [
    ("patch_size", {"patch_size": 8}, "[8,8]", "[4,4]"), ("patch_size", {"patch_size": [2, 4]}, "[2,4]", "[4,4]"),
    ("width", {"width": 48}, "48", "24"), ("depth", {"depth": 2}, "2", "3"), ("heads", {"heads": 4}, "4", "3"),
    ("mlp_width", {"mlp_width": 50}, "50", "96"),
    ("class_token", {"class_token": False, "pooling": "patch_mean"}, "false", "true"),
    ("distillation_token", {"distillation_token": True}, "true", "false"),
    ("positions", {"positions": "learned_2d"}, "learned_2d", "learned_1d"),
    ("positions_at", {"positions_at": "every_layer"}, "every_layer", "stem"),
    ("gelu", {"gelu": "tanh"}, "tanh", "exact"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "options", "own", "right"), DIFFERENT)
def test_another_architecture_is_refused_by_name_and_nothing_is_taken(name, options, own, right):
    old, new = build(), build(1, **options)
    before = {key: value.clone() for key, value in new.state_dict().items()}
    option, _, expected = str(error_of(new.load_weights_from, old, how="paper")).partition(": ")
    assert option == f"{name}={own}"
    assert right in expected
    assert all(torch.equal(value, before[key]) for key, value in new.state_dict().items())


@pytest.mark.parametrize("image_size", [16, 24])
@pytest.mark.parametrize("how", ["bilinear", "", None])
def test_a_way_that_is_none_is_refused(how, image_size):
    with pytest.raises(OptionError, match=r"\bpaper, timm$"):
        build(image_size=image_size).load_weights_from(build(), how=how)


SIZES = [(24, 24), (12, 28), (4, 16)]  # each side is larger, smaller and the same


@torch.no_grad()
@TOKENS
@pytest.mark.parametrize(("positions", "at"), PLACES)
def test_an_encoder_of_one_size_computes_what_one_taken_to_another_does(positions, at, special, how):
    vit = build(positions=positions, positions_at=at, **special).double()
    vit.resize = how
    for size in SIZES:
        images = torch.rand(2, 3, *size, generator=torch.Generator().manual_seed(1)).double()
        other = vit_options.ViT(**vit.arguments | {"image_size": size}).build().eval().double()
        other.load_weights_from(vit, how=how)
        assert vit.grid_of(images) == other.grid
        torch.testing.assert_close(vit(images), other(images), atol=1e-12, rtol=1e-10)
        torch.testing.assert_close(vit.represent(images), other.represent(images), atol=1e-12, rtol=1e-10)
        for mine, right in zip(vit.layers(images), other.layers(images), strict=True):
            torch.testing.assert_close(mine, right, atol=1e-12, rtol=1e-10)
    own = torch.rand(2, 3, 16, 16).double()
    assert torch.equal(vit(own), vit.encode(vit.embed(own)))


@torch.no_grad()
@pytest.mark.parametrize(("positions", "at"), PLACES)
def test_some_patches_of_another_grid_stand_where_they_do_in_it(positions, at):
    vit = build(positions=positions, positions_at=at)
    images = torch.rand(2, 3, 12, 20)
    other = vit_options.ViT(**vit.arguments | {"image_size": (12, 20)}).build().eval()
    other.load_weights_from(vit)
    visible_ids, output_ids = torch.tensor([[14, 3, 7], [0, 8, 2]]), torch.tensor([[2, 0], [1, 1]])
    found = {"grid": vit.grid_of(images), "output_ids": output_ids}
    right = other.encode(other.embed(images), output_ids=output_ids)
    torch.testing.assert_close(vit.encode(vit.embed(images), **found), right, atol=1e-5, rtol=1e-4)
    found["patch_ids"] = visible_ids
    right = other.encode(other.embed(images, visible_ids), patch_ids=visible_ids, output_ids=output_ids)
    if positions == "relative":
        with pytest.raises(OptionError, match=r"^positions=relative"):
            vit.encode(vit.embed(images, visible_ids), **found)
    else:
        torch.testing.assert_close(vit.encode(vit.embed(images, visible_ids), **found), right, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("how", ["paper", "timm"])
@pytest.mark.parametrize("kind", [Learned1D, Learned2D])
def test_gradients_flow_to_the_table_from_every_grid(kind, how):
    module = kind((3, 2), 1, 4).double()
    names, values = zip(*module.named_parameters(), strict=True)
    for grid in ((2, 4), (5, 1), (3, 3)):

        def rows(*tables, grid=grid):
            return torch.func.functional_call(module, dict(zip(names, tables, strict=True)), (grid, how))

        torch.autograd.gradcheck(rows, values)


@pytest.mark.parametrize("method", ["model", "masked_patch_decoder", "simmim", "mae", "latent", "ibot", "simclr"])
@pytest.mark.parametrize("size", [8, 24])
def test_an_objective_that_samples_patches_refuses_images_of_another_size(method, size):
    """Training images must have the encoder's 16 px: masks are patch indices for this size."""
    objective, slots, images = getattr(tiny, method)(), torch.arange(2), tiny.pictures(2, side=size)
    scheduled = {name: torch.tensor(1.0) for name in objective.schedules}
    batch = Batch.of_view(images)
    if method in ("ibot", "simclr"):
        views = MultiCrop(MultiCropOptions(size=size, local_size=8, local_views=0, sigma=(0.1, 0.5)))(images, slots, 0)
        batch = Batch(views, None, slots)
    with pytest.raises(OptionError, match=rf"^images={size}x{size}: .*\b16x16\b"):
        objective(batch, objective.sample(slots, seed=0), scheduled)
