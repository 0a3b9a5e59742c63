"""Attention weights, distances and rollout against plain loops, and that looking at them changes nothing."""

import math

import pytest
import tiny
import torch

from ssvit.analysis import attention
from ssvit.models import vit_options
from ssvit.models.vit import ViT

KINDS = [
    {"class_token": False, "pooling": "patch_mean"},
    {"positions": "relative"},
    {"distillation_token": True, "positions": "relative"},
    {"distillation_token": True, "positions": "sine_cosine_2d", "positions_at": "every_layer"},
    {"positions": "rotary"},
]


def build(**options) -> ViT:
    """An encoder of rectangles cut into rectangles, with no weight zero and attention that is far from uniform."""
    shape = {"image_size": [12, 16], "patch_size": [6, 4], "width": 16, "depth": 2, "heads": 2, "channels": 2}
    return tiny.vit(by=0.3, **shape | options).eval()


def images(b: int = 2) -> torch.Tensor:
    return torch.rand(b, 2, 12, 16, generator=torch.Generator().manual_seed(1))


def seen(vit: ViT, run) -> list[torch.Tensor]:
    """The weights of each layer while run() is at work."""
    found = {}
    with attention.attention_hooks(vit, found.__setitem__):
        run()
    return [found[layer] for layer in range(len(found))]


@pytest.mark.parametrize("options", KINDS, ids=str)
@pytest.mark.parametrize("part", ["all", "kept", "read"])
def test_weights_times_values_are_what_the_encoder_computes(options, part):
    vit = build(**options)
    calls = []
    hooks = [
        block.attention.register_forward_hook(lambda module, given, output: calls.append((module, given, output)))
        for block in vit.blocks
    ]
    keep, at = torch.tensor([[5, 2, 7], [0, 1, 6]]), torch.tensor([[2, 0], [1, 1]])
    choice = {"all": {}, "kept": {"visible_ids": keep}, "read": {"visible_ids": keep, "output_ids": at}}[part]
    weights = seen(vit, lambda: vit(images(), **choice))
    for hook in hooks:
        hook.remove()
    assert weights[-1].shape[2:] == ((2, 3 + vit.num_prefix_tokens) if part == "read" else (weights[0].shape[2],) * 2)
    for found, (module, (x, *_), output) in zip(weights, calls, strict=True):
        value = torch.nn.functional.linear(x, module.qkv.weight[32:], module.qkv.bias[32:])
        mixed = torch.cat([found[:, head] @ value[:, :, 8 * head : 8 * head + 8] for head in range(2)], dim=2)
        torch.testing.assert_close(module.out(mixed), output, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(found.sum(-1), torch.ones(found.shape[:3]))


def test_weights_are_float32_in_half_precision():
    vit = build()
    exact = seen(vit, lambda: vit(images()))
    with torch.autocast("cpu", torch.bfloat16):
        half = seen(vit, lambda: vit(images()))
    for found, right in zip(half, exact, strict=True):
        assert found.dtype == torch.float32
        assert (found.sum(-1) - 1).abs().max() < 1e-6
        assert 0 < (found - right).abs().max() < 0.2  # its inputs are rounded, no more


@pytest.mark.parametrize("options", [{}, *KINDS], ids=str)
def test_looking_changes_no_bit(options):
    vit = build(**options)
    with torch.inference_mode():
        plain = vit(images())
        with attention.attention_hooks(vit, lambda layer, weights: weights.zero_()):
            attention_hooks = vit(images())
        assert torch.equal(vit(images()), plain)
    assert torch.equal(attention_hooks, plain)


def test_no_hook_is_left_whatever_is_raised():
    vit = build()
    with pytest.raises(KeyError), attention.attention_hooks(vit, lambda layer, weights: {}[layer]):
        vit(images())
    with attention.attention_hooks(vit, lambda layer, weights: None):
        assert all(block.attention._forward_pre_hooks for block in vit.blocks)
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in vit.modules())


def test_uniform_and_identity_attention_have_their_known_distances():
    vit = build()
    apart = attention.patch_distances(vit)
    centres = [(6 * row + 3, 4 * column + 2) for row in range(2) for column in range(4)]
    assert apart.tolist() == [[pytest.approx(math.dist(a, b)) for b in centres] for a in centres]
    n = len(centres)
    uniform = torch.full((1, 3, 1 + n, 1 + n), 1 / (1 + n))
    mean = sum(math.dist(a, b) for a in centres for b in centres) / n**2
    assert attention.mean_distance(uniform, apart).tolist() == [[pytest.approx(mean)] * 3]
    identity = torch.eye(1 + n).expand(1, 1, -1, -1)
    assert attention.mean_distance(identity, apart).tolist() == [[0.0]]


@pytest.mark.parametrize("special", [0, 1, 2])
def test_mean_distance_is_that_of_a_loop_over_pairs_of_patches(special):
    apart = attention.patch_distances(build())
    n = len(apart)
    weights = torch.rand(2, 3, special + n, special + n).softmax(-1)
    found = attention.mean_distance(weights, apart)
    for image in range(2):
        for head in range(3):
            total = 0.0
            for i in range(n):
                shares = weights[image, head, special + i, special:].tolist()
                total += sum(share * apart[i, j].item() for j, share in enumerate(shares)) / sum(shares)
            assert found[image, head].item() == pytest.approx(total / n, rel=1e-5)


def test_a_figure_shows_the_distance_of_each_head_at_its_layer():
    (panel,) = attention.plot_distances(torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]), uniform=2.5).panels
    (line,) = panel.lines
    assert [*zip(line.x, line.y, strict=True)] == [(1, 1), (1, 2), (2, 3), (2, 4), (3, 5), (3, 6)]
    assert [*panel.xticks] == [1, 2, 3]
    assert [level.y for level in panel.levels] == [2.5]


def test_distance_of_a_lone_patch_is_zero():
    vit = vit_options.ViT(image_size=4, patch_size=4, width=8, depth=1, heads=2).build()
    (found,) = seen(vit, lambda: vit(torch.rand(2, 3, 4, 4)))
    assert attention.mean_distance(found, attention.patch_distances(vit)).tolist() == [[0, 0], [0, 0]]


def test_rollout_is_the_product_of_the_layers_and_its_rows_sum_to_one():
    layers = [torch.rand(2, 3, 5, 5).softmax(-1) for _ in range(3)]
    rollout = None
    for weights in layers:
        rollout = attention.extend_rollout(rollout, weights)
    for image in range(2):
        expected = torch.eye(5).double()
        for weights in layers:
            mean = sum(weights[image, head].double() for head in range(3)) / 3
            with_residual = mean + torch.eye(5)
            expected = (with_residual / with_residual.sum(1, keepdim=True)) @ expected
        torch.testing.assert_close(rollout[image].double(), expected, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(rollout.sum(-1), torch.ones(2, 5))
    nowhere = attention.extend_rollout(None, torch.eye(5).expand(1, 1, -1, -1))
    assert torch.equal(nowhere[0], torch.eye(5))


def test_attention_over_patches_is_that_of_the_class_token_or_of_all_patches():
    weights = torch.rand(2, 3, 6, 6)
    assert torch.equal(attention.attention_to_patches(weights, 2, "class_token"), weights[:, :, 0, 2:])
    expected = (weights[:, :, 2, 2:] + weights[:, :, 3, 2:] + weights[:, :, 4, 2:] + weights[:, :, 5, 2:]) / 4
    torch.testing.assert_close(attention.attention_to_patches(weights, 2, "patch_mean"), expected)
    of_both = (weights[:, :, 0, 2:] + weights[:, :, 1, 2:]) / 2
    torch.testing.assert_close(attention.attention_to_patches(weights, 2, "class_token", 2), of_both)
