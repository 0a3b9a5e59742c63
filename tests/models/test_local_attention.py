"""Axial and windowed attention against a plain loop over queries, and how far an image reaches in a layer."""

import math

import pytest
import tiny
import torch
from command import error_of

from ssvit.errors import OptionError
from ssvit.kernels import accelerate
from ssvit.models.block import TokenInfo
from ssvit.models.local_attention import LocalAttention
from ssvit.models.vit import ViT
from ssvit.objectives import mae_options

KINDS = [
    {"attention": "axial"},
    {"attention": "window", "window": 2},
    {"attention": "window", "window": 3},
    {"attention": "window", "window": 9},
]
TOKENS = [
    {},
    {"class_token": False, "pooling": "patch_mean"},
    {"registers": 2, "class_tokens": 2},
    {"distillation_token": True},
    {"positions": "rotary"},
]


def build(**options) -> ViT:
    shape = {"image_size": [20, 12], "patch_size": [4, 2], "width": 16, "depth": 4, "heads": 2}  # a grid of 5 x 6
    return tiny.vit(by=0.3, **shape | options).eval()


def images(height=20, width=12):
    return torch.rand(2, 3, height, width, generator=torch.Generator().manual_seed(1))


def are_neighbours(kind, layer, window, first, second):
    """Whether a patch attends to another one, from their rows and columns."""
    if kind == "axial":
        return first[layer % 2] == second[layer % 2]
    shift = window // 2 if layer % 2 else 0
    return all((a + shift) // window == (b + shift) // window for a, b in zip(first, second, strict=True))


def looped(module: LocalAttention, x, grid):
    """Attention of each query in float64, over the tokens to which it attends."""
    _, t, d = x.shape
    query, key, value = torch.nn.functional.linear(x, module.qkv.weight.double(), module.qkv.bias.double()).split(d, -1)
    patches = [(row, column) for row in range(grid[0]) for column in range(grid[1])]
    special, size, pattern = t - len(patches), d // module.heads, (module.kind, module.layer, module.window)
    mixed = torch.zeros_like(x)
    for token in range(t):
        seen = [
            other for other in range(t)
            if token < special or other < special
            or are_neighbours(*pattern, patches[token - special], patches[other - special])
        ]  # fmt: skip
        for head in range(module.heads):
            part = slice(head * size, (head + 1) * size)
            logits = torch.einsum("bk,btk->bt", query[:, token, part], key[:, seen, part]) / math.sqrt(size)
            mixed[:, token, part] = torch.einsum("bt,btk->bk", logits.softmax(-1), value[:, seen, part])
    return torch.nn.functional.linear(mixed, module.out.weight.double(), module.out.bias.double())


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("special", [0, 3])
@pytest.mark.parametrize("grid", [(5, 6), (3, 7)])
@torch.no_grad()
def test_each_token_attends_to_its_group_and_to_the_prefix_tokens(kind, special, grid):
    window = kind.get("window", 4)
    x = torch.randn(2, special + math.prod(grid), 16, generator=torch.Generator().manual_seed(2))
    ids = torch.tensor([[0, 4], [7, 1]])
    for layer in range(2):
        torch.manual_seed(layer)
        module = LocalAttention(
            width=16, heads=2, dropout=0.0, kind=kind["attention"], layer=layer, grid=(5, 6), window=window
        )
        torch.nn.init.normal_(module.qkv.bias)
        expected = looped(module, x.double(), grid)
        torch.testing.assert_close(module(x, info=TokenInfo(grid=grid)).double(), expected, atol=1e-5, rtol=1e-5)
        some = module(x, ids, TokenInfo(grid=grid))
        torch.testing.assert_close(some.double(), expected[torch.arange(2)[:, None], ids], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS[:2], ids=str)
@pytest.mark.parametrize("tokens", TOKENS, ids=str)
@torch.no_grad()
def test_all_ways_to_compute_an_encoder_agree(kind, tokens):
    vit = build(**kind, **tokens)
    for size in ((20, 12), (12, 16)):
        x = images(*size)
        outputs = vit(x)
        *_, last = vit.layers(x)
        torch.testing.assert_close(vit.norm(last), outputs)
        torch.testing.assert_close(vit.represent(x), vit.pool(outputs))
        accelerate.accelerate(vit)
        torch.testing.assert_close(vit(x), outputs, atol=1e-4, rtol=1e-4)
        accelerate.accelerate(vit, enabled=False)


def test_a_window_as_large_as_the_grid_is_full_attention():
    local, full = build(attention="window", window=12), build()
    full.load_state_dict(local.state_dict())
    torch.testing.assert_close(local(images()), full(images()))


def test_gradients_reach_only_the_group_in_one_layer():
    vit = build(attention="axial", class_token=False, pooling="patch_mean", depth=1)
    x = images().requires_grad_()
    vit(x)[:, 8].square().sum().backward()  # the patch in row 1 and column 2
    touched = x.grad.abs().sum((0, 1)).unflatten(0, (5, 4)).unflatten(2, (6, 2)).sum((1, 3)) > 0
    assert touched[1].all()
    assert not touched[[0, 2, 3, 4]].any()


def test_what_local_attention_does_not_support_is_named():
    with pytest.raises(OptionError, match="attention=axial"):
        build(attention="axial", positions="relative")
    with pytest.raises(OptionError, match="masked"):
        mae_options.MAE().check_encoder(build(attention="axial").options)
    vit = build(attention="axial")
    assert "attention=axial" in str(error_of(lambda: vit(images(), torch.tensor([[0, 1], [2, 3]]))))
