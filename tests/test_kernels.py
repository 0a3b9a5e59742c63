"""The kernels in C beside formulas in float64, on shapes that fill no vector, and what happens without a compiler."""

import math
import subprocess

import pytest
import torch

from ssvit.encoder import attention, fused, kernels
from ssvit.encoder.attention import attend_packed
from ssvit.training import engine
from ssvit.training.recipe import Recipe

needs_compiler = pytest.mark.skipif(kernels.library() is None, reason="there is no C compiler")
SHAPES = [(1, 1), (3, 5), (7, 16), (40, 33), (65, 197)]
HALF_STEP = 2**-8  # bfloat16 keeps 8 bits: a rounded number is off by at most this share of itself, and here twice


def random(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).bfloat16()


def assert_rounded(found, right):
    """Equal to float64's result but for one rounding to bfloat16, and errors of float32 sums."""
    torch.testing.assert_close(found.double(), right, rtol=HALF_STEP, atol=2e-5 * right.abs().max().item())


@needs_compiler
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scale", [0.1, 30.0])
def test_softmax_and_its_gradient(shape, scale):
    logits, back = random(*shape, scale=scale), random(*shape, seed=1)
    known = logits.double().requires_grad_()
    right = (known * 0.125).softmax(-1)
    weights = logits.clone()
    kernels.softmax_(weights, 0.125)
    assert_rounded(weights, right)
    # The gradient is taken at the rounded weights.
    w = weights.double()
    wanted = 0.125 * w * (back.double() - (w * back.double()).sum(-1, keepdim=True))
    kernels.softmax_backward_(weights, back, 0.125)
    assert_rounded(back, wanted)


@needs_compiler
@pytest.mark.parametrize("shape", SHAPES)
def test_gelu_s_gradient_and_its_sum(shape):
    x, back = random(*shape, scale=3), random(*shape, seed=1)
    known = x.double().requires_grad_()
    (known * (1 + torch.erf(known / math.sqrt(2))) / 2).backward(back.double())
    found, total = kernels.gelu_backward(x, back)
    assert_rounded(found, known.grad)
    torch.testing.assert_close(total.double(), known.grad.sum(0), rtol=1e-5, atol=1e-5)


@needs_compiler
def test_gelu_s_gradient_far_out():
    x = torch.tensor([[-1e30, -40.0, -13.0, -6.0, 0.0, 6.0, 40.0, 1e30]]).bfloat16()
    found, _ = kernels.gelu_backward(x, torch.ones_like(x))
    torch.testing.assert_close(found[0].float(), torch.tensor([0, 0, 0, 0, 0.5, 1, 1, 1]), rtol=0, atol=1e-6)


@needs_compiler
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("offset", [0.0, 20.0])
def test_layer_norm_and_its_gradients(shape, offset):
    x, back = random(*shape) + offset, random(*shape, seed=1)
    weight, bias = (torch.randn(shape[1], generator=torch.Generator().manual_seed(seed)) for seed in (2, 3))
    known = [tensor.double().requires_grad_() for tensor in (x, weight, bias)]
    centred = known[0] - known[0].mean(-1, keepdim=True)
    normal = centred / (centred.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    right = normal * known[1] + known[2]
    right.backward(back.double())
    out, *saved = kernels.layer_norm(x, weight, bias, 1e-6)
    assert_rounded(out, right.detach())
    to_x, to_weight, to_bias = kernels.layer_norm_backward(x, back, weight, *saved)
    if shape[1] > 1:  # of a single number nothing is left but rounding
        torch.testing.assert_close(to_x.double(), known[0].grad, rtol=HALF_STEP, atol=1e-4)
    torch.testing.assert_close(to_weight.double(), known[1].grad, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(to_bias.double(), known[2].grad, rtol=1e-5, atol=1e-5)


@needs_compiler
@pytest.mark.parametrize("parts", [1, 2, 3])
def test_heads_are_taken_apart_and_put_back(parts):
    packed = random(2, 5, parts * 12)
    apart = kernels.gather_heads(packed, 3, parts)
    assert apart.shape == (parts, 6, 5, 4)
    for part, image, head, token in ((0, 0, 0, 0), (parts - 1, 1, 2, 4), (parts - 1, 0, 1, 3)):
        first = part * 12 + head * 4
        assert torch.equal(apart[part, image * 3 + head, token], packed[image, token, first : first + 4])
    assert torch.equal(kernels.scatter_heads(apart, 3), packed)


@needs_compiler
def test_what_is_not_a_number_stays_so():
    x = random(4, 33)
    x[2, 20] = math.nan
    weights, ones = x.clone(), torch.ones(33)
    kernels.softmax_(weights, 1.0)
    out, *saved = kernels.layer_norm(x, ones, ones, 1e-6)
    for rows in (weights, out, kernels.layer_norm_backward(x, x, ones, *saved)[0]):
        assert rows.isnan().all(1).tolist() == [False, False, True, False]
    found, total = kernels.gelu_backward(x, torch.ones_like(x))
    assert found.isnan().nonzero().tolist() == [[2, 20]]
    assert total.isnan().nonzero().tolist() == [[20]]


@needs_compiler
def test_the_number_of_threads_changes_no_bit():
    def everything():
        x = random(100, 48, seed=4)
        weight = random(48, seed=5).float()
        out, *saved = kernels.layer_norm(x, weight, weight, 1e-6)
        packed = random(5, 20, 72, seed=6).requires_grad_()
        attended = attend_packed(None, packed, 3)
        (back,) = torch.autograd.grad(attended, packed, attended.detach())
        return [out, *saved, *kernels.layer_norm_backward(x, out, weight, *saved), *kernels.gelu_backward(x, out), back]

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = everything()
        torch.set_num_threads(3)
        assert all(torch.equal(one, other) for one, other in zip(alone, everything(), strict=True))
    finally:
        torch.set_num_threads(before)


@needs_compiler
def test_the_source_has_no_warnings(tmp_path):
    source = kernels.SOURCE
    done = subprocess.run(
        ["cc", "-fopenmp", "-O3", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", source, "-o", tmp_path / "k.so"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("compiler", ["false", "there-is-no-such-compiler", "true"])
def test_without_a_compiler_torch_computes(compiler, monkeypatch):
    """`false` fails, and `true` succeeds without having built anything."""
    monkeypatch.setenv("CC", compiler)
    kernels.library.cache_clear()
    try:
        assert kernels.library() is None
        x = random(2, 5, 24)
        assert not kernels.fit(x)
        known = x.double().unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        right = (known[0] @ known[1].mT / 2).softmax(-1) @ known[2]
        torch.testing.assert_close(attend_packed(None, x, 2).double(), attention.merge(right), rtol=0.03, atol=0.03)
        layer = fused.Linear(24, 8, gelu=True)
        with torch.autocast("cpu", torch.bfloat16):
            layer(x).sum().backward()
        assert layer.weight.grad.isfinite().all()
    finally:
        kernels.library.cache_clear()


@needs_compiler
@pytest.mark.parametrize("way", ["expanded", "turned"])
def test_gradients_may_have_any_strides(way):
    x = random(3, 5, 24)
    back = random(1, 1, 24, seed=1).expand_as(x) if way == "expanded" else random(24, 5, 3, seed=1).permute(2, 1, 0)
    layers = torch.nn.Linear(24, 24), torch.nn.LayerNorm(24, eps=1e-6)
    own = fused.Linear(24, 24, gelu=True), fused.LayerNorm(24, eps=1e-6)
    for one, other in zip(own, layers, strict=True):
        one.load_state_dict(other.state_dict())
    for one, right in zip(own, (lambda x: torch.nn.functional.gelu(layers[0](x)), layers[1]), strict=True):
        given, known = x.clone().requires_grad_(), x.float().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            one(given).backward(back)
        right(known).backward(back.float())
        torch.testing.assert_close(given.grad.float(), known.grad, rtol=0.05, atol=0.05)
    packed = random(3, 5, 24, seed=2).requires_grad_()
    out = attend_packed(None, packed, 2)
    (found,) = torch.autograd.grad(out, packed, back[..., :8])
    (again,) = torch.autograd.grad(attend_packed(None, packed, 2), packed, back[..., :8].contiguous())
    assert torch.equal(found, again)


@needs_compiler
@pytest.mark.parametrize("change", ["float", "double", "strided"])
def test_other_tensors_are_left_to_torch(change):
    x = random(4, 6)
    assert kernels.fit(x)
    other = x.T if change == "strided" else getattr(x, change)()
    assert not kernels.fit(other)
    norm = fused.LayerNorm(6 if change != "strided" else 4, eps=1e-6).to(other.dtype)
    right = torch.nn.functional.layer_norm(other, norm.normalized_shape, norm.weight, norm.bias, 1e-6)
    assert torch.equal(norm(other), right)


def test_no_tokens_are_no_error():
    x = torch.empty(2, 0, 24, dtype=torch.bfloat16)
    assert not kernels.fit(x)
    assert attend_packed(None, x, 2).shape == (2, 0, 8)
    assert fused.LayerNorm(24, eps=1e-6)(x).shape == x.shape


@pytest.mark.parametrize(
    ("options", "device", "lacks"),
    [
        ({"precision": "bf16-mixed"}, "cpu", True),
        ({"precision": "bf16-mixed", "compile": True}, "cpu", False),
        ({"precision": "32-true"}, "cpu", False),
        ({"precision": "bf16-mixed"}, "cuda", False),
    ],
)
def test_a_run_that_would_use_the_kernels_knows_that_it_lacks_them(options, device, lacks, monkeypatch):
    monkeypatch.setattr(kernels, "library", lambda: None)
    assert engine.lacks_kernels(Recipe(**options), torch.device(device)) is lacks
    monkeypatch.setattr(kernels, "library", lambda: object())
    assert not engine.lacks_kernels(Recipe(**options), torch.device(device))
