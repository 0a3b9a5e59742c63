"""Attention next to its formula in float64, and activation checkpointing of blocks."""

import pytest
import tiny
import torch

from ssvit.checkpoints.configuration import Configuration
from ssvit.kernels.accelerate import accelerate
from ssvit.models import block
from ssvit.models.vit import ViT
from ssvit.objectives import classify_options
from ssvit.objectives.classify import Classify

CLASSES = classify_options.Classify(classes=("ant", "bee"))
LONG = block._MOST_TOKENS + 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [7, LONG])
@pytest.mark.parametrize("with_bias", [False, True])
def test_attention_is_its_formula(dtype, tokens, with_bias):
    torch.manual_seed(0)
    shapes = [(2, 3, 5, 8), (2, 3, tokens, 8), (2, 3, tokens, 8), (2, 3, 5, tokens)][: 3 + with_bias]
    inputs = [torch.randn(*shape).to(dtype).requires_grad_() for shape in shapes]
    weight = torch.randn(2, 3, 5, 8).to(dtype)
    out = block.attend(*inputs)
    gradients = torch.autograd.grad((out * weight).sum(), inputs)

    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    logits = torch.einsum("bhqk,bhtk->bhqt", exact[0], exact[1]) / 8**0.5 + (exact[3] if with_bias else 0)
    expected = torch.einsum("bhqt,bhtk->bhqk", logits.exp() / logits.exp().sum(-1, keepdim=True), exact[2])
    expected_gradients = torch.autograd.grad((expected * weight.double()).sum(), exact)
    tolerance = 1e-5 if dtype == torch.float32 else 0.04
    for result, reference in zip((out, *gradients), (expected, *expected_gradients), strict=True):
        assert result.dtype == dtype
        torch.testing.assert_close(result.double(), reference, atol=2 * tolerance, rtol=2 * tolerance)


@pytest.mark.parametrize(("dtype", "tokens", "fused"), [
    (torch.bfloat16, LONG - 1, False), (torch.bfloat16, LONG, True), (torch.float32, 7, True),
])  # fmt: skip
def test_torchs_fused_attention_is_used_where_it_is_faster(dtype, tokens, fused, monkeypatch):
    calls = []
    monkeypatch.setattr(block.F, "scaled_dot_product_attention", lambda query, *_, **__: calls.append(query) or query)
    block.attend(*(torch.randn(1, 1, tokens, 8).to(dtype) for _ in range(3)))
    assert bool(calls) == fused


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout_of_attention_keeps_the_expectation(dtype):
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 2, 5, 4).to(dtype).expand(4000, -1, -1, -1) for _ in range(3))
    dropped = block.attend(query, key, value, dropout=0.4).float()
    error = (dropped.mean(0) - block.attend(query, key, value)[0]).abs()
    assert (error < 5 * dropped.std(0) / 4000**0.5 + (dtype == torch.bfloat16) * 0.01).all()
    assert dropped.std(0).min() > 0


def encoder(**options) -> ViT:
    return tiny.vit(image_size=16, patch_size=4, width=48, depth=8, heads=3, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("accelerated", [False, True])
@pytest.mark.parametrize(
    "options",
    [{}, {"positions": "relative"}, {"attention": "window", "window": 3}, {"dropout": 0.3, "stochastic_depth": 0.3}],
)
def test_activation_checkpointing_changes_no_gradient_and_keeps_less(options, accelerated, dtype):
    gradients, kept = [], []
    images = torch.rand(3, 3, 16, 16, generator=torch.Generator().manual_seed(1))

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[-1] += tensor.numel()
        return tensor

    for checkpoints in (False, True):
        vit = encoder(activation_checkpointing=checkpoints, **options).train()
        accelerate(vit, enabled=accelerated)
        kept.append(0)
        keeping = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
        with keeping, torch.autocast("cpu", dtype, enabled=dtype == torch.bfloat16):
            loss = vit(images).float().square().mean()
        loss.backward()
        gradients.append([weight.grad for weight in vit.parameters() if weight.grad is not None])
    assert all(map(torch.equal, *gradients))
    assert kept[1] < kept[0] / 3


def test_a_run_may_continue_with_activation_checkpointing_or_without():
    with_, without = (Classify(CLASSES, encoder=encoder(activation_checkpointing=value)) for value in (True, False))
    assert with_.metadata == without.metadata
    old, new = ({"encoder": {"width": 8, "activation_checkpointing": value}} for value in (False, True))
    assert Configuration(new, {}).difference(Configuration(old, {})) is None
