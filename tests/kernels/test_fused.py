"""What makes a step fast changes nothing: products and attention beside plain float64 arithmetic, and whole steps."""

import pytest
import torch
import torch.nn.functional as F

from ssvit.checkpoints.configuration import Configuration
from ssvit.data.batch import Batch
from ssvit.kernels import fused
from ssvit.kernels.accelerate import Linear, accelerate
from ssvit.kernels.attention import attend, attend_packed
from ssvit.models import vit_options
from ssvit.models.vit import ViT
from ssvit.objectives import masked_patch_options
from ssvit.objectives.masked_patch import MaskedPatch
from ssvit.objectives.targets import MeanColor

SMALL = {"image_size": 16, "patch_size": 4, "width": 48, "depth": 3, "heads": 3}


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def objective(**options) -> MaskedPatch:
    """A small objective in which no weight is zero or one, so that each of them shows in the gradients."""
    torch.manual_seed(0)
    encoder = ViT(vit_options.ViT(**SMALL | options))
    built = MaskedPatch(masked_patch_options.MaskedPatch(), encoder=encoder, target=MeanColor(patch_size=4, bits=1))
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    accelerate(built)
    return built


def step(model, images, noise, dtype=torch.float32):
    """The loss and the gradients of every parameter, as the training loop computes them."""
    model.zero_grad(set_to_none=True)
    with torch.autocast("cpu", dtype, enabled=dtype == torch.bfloat16):
        loss = model(Batch.of_view(images), noise)["loss"]
    loss.backward()
    return loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


def batch(model):
    size = model.encoder.image_size
    images = torch.randint(0, 256, (3, 3, *size), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    return images, model.sample(torch.arange(3), seed=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_bias", [False, True])
def test_attention_is_its_formula(dtype, with_bias):
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 3, t, 8).to(dtype).requires_grad_() for t in (5, 7, 7))
    bias = torch.randn(2, 3, 5, 7).to(dtype).requires_grad_() if with_bias else None
    inputs = [query, key, value, *([bias] if with_bias else [])]
    weight = torch.randn(2, 3, 5, 8).to(dtype)
    out = attend(query, key, value, bias)
    assert out.dtype == dtype
    gradients = torch.autograd.grad((out * weight).sum(), inputs)

    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    logits = torch.einsum("bhqk,bhtk->bhqt", exact[0], exact[1]) / 8**0.5 + (exact[3] if with_bias else 0)
    shares = logits.exp() / logits.exp().sum(-1, keepdim=True)
    expected = torch.einsum("bhqt,bhtk->bhqk", shares, exact[2])
    expected_gradients = torch.autograd.grad((expected * weight.double()).sum(), exact)
    tolerance = 1e-5 if dtype == torch.float32 else 0.04
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)
    for gradient, right in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(gradient.double(), right, atol=2 * tolerance, rtol=2 * tolerance)
    fused = F.scaled_dot_product_attention(query, key, value, attn_mask=bias)
    torch.testing.assert_close(out, fused, atol=tolerance, rtol=tolerance)


def test_dropout_of_attention_keeps_the_expectation():
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 2, 5, 4).expand(4000, -1, -1, -1) for _ in range(3))
    dropped = attend(query, key, value, dropout=0.4)
    error = (dropped.mean(0) - attend(query, key, value)[0]).abs()
    assert (error < 5 * dropped.std(0) / 4000**0.5).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("inputs", "outputs"), [(6, 10), (10, 6), (8, 8), (5, 1)])
@pytest.mark.parametrize("shape", [(7,), (2, 3), (0,), (1, 1, 1)])
def test_a_linear_layer_is_its_formula(dtype, inputs, outputs, shape):
    x, weight, bias, back = (
        random(*size, seed=seed).to(dtype)
        for seed, size in enumerate([(*shape, inputs), (outputs, inputs), (outputs,), (*shape, outputs)])
    )
    given = [tensor.clone().requires_grad_() for tensor in (x, weight, bias)]
    out = fused.linear(*given)
    assert out.dtype == dtype
    out.backward(back)
    known = [tensor.double().requires_grad_() for tensor in (x, weight, bias)]
    expected = known[0] @ known[1].T + known[2]
    expected.backward(back.double())
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)
    for found, right in zip(given, known, strict=True):
        assert found.grad.dtype == dtype
        torch.testing.assert_close(found.grad.double(), right.grad, atol=2 * tolerance, rtol=2 * tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_linear_layer_takes_any_strides_and_any_wish_for_gradients(dtype):
    x, weight, bias = random(4, 5, 6).to(dtype), random(3, 6, seed=1).to(dtype), random(3, seed=2).to(dtype)
    right = F.linear(x.transpose(0, 1).double(), weight.double(), bias.double())
    turned = weight.T.contiguous().T
    torch.testing.assert_close(fused.linear(x.transpose(0, 1), turned, bias).double(), right, atol=0.1, rtol=0.05)
    for place in range(3):
        given = [x, weight, bias]
        given[place] = given[place].clone().requires_grad_()
        fused.linear(*given).sum().backward()
        (wanted,) = torch.autograd.grad(F.linear(*(t.double() for t in given)).sum(), given[place])
        torch.testing.assert_close(given[place].grad, wanted, atol=0.1, rtol=0.05)


@pytest.mark.parametrize("shape", [(6, 4), (16, 32)])
def test_autocast_casts_a_linear_layer_and_gives_gradients_in_the_weights_own_type(shape):
    layer = Linear(*shape)
    x = random(3, 1, shape[0]).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x)
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert layer.weight.grad.dtype == layer.bias.grad.dtype == x.grad.dtype == torch.float32
    torch.testing.assert_close(out.float(), F.linear(x, layer.weight, layer.bias), atol=0.03, rtol=0.03)


@pytest.mark.parametrize("width", [8, 16])
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_attention_is_attention(dtype, given, width):
    d = 3 * width
    query = random(2, 5, d).to(dtype).requires_grad_() if given else None
    packed = random(2, 7, 2 * d if given else 3 * d, seed=1).to(dtype).requires_grad_()
    inputs = [packed] if query is None else [query, packed]
    out = attend_packed(query, packed, heads=3)
    back = random(*out.shape, seed=2).to(dtype)
    gradients = torch.autograd.grad(out, inputs, back)

    known = [tensor.detach().double().requires_grad_() for tensor in inputs]
    parts = [known[0]] if given else []
    parts += known[-1].split(d, dim=-1)
    q, k, v = (part.unflatten(-1, (3, width)).transpose(1, 2) for part in parts)
    expected = ((q @ k.mT / width**0.5).softmax(-1) @ v).transpose(1, 2).flatten(2)
    tolerance = 1e-5 if dtype == torch.float32 else 0.04
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)
    for gradient, right in zip(gradients, torch.autograd.grad(expected, known, back.double()), strict=True):
        torch.testing.assert_close(gradient.double(), right, atol=2 * tolerance, rtol=2 * tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout_of_packed_attention_keeps_the_expectation(dtype):
    torch.manual_seed(0)
    packed = random(1, 5, 24).to(dtype).expand(4000, -1, -1)
    dropped = attend_packed(None, packed, 2, dropout=0.4).float()
    error = (dropped.mean(0) - attend_packed(None, packed[:1], 2)[0].float()).abs()
    assert (error < 5 * dropped.std(0) / 4000**0.5 + (dtype == torch.bfloat16) * 0.01).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"positions": "relative"}, {"dropout": 0.3, "stochastic_depth": 0.3}])
def test_activation_checkpointing_changes_no_bit(options, dtype):
    images, noise = batch(objective())
    torch.manual_seed(1)
    loss, gradients = step(objective(**options).train(), images, noise, dtype)
    torch.manual_seed(1)
    again, repeated = step(objective(activation_checkpointing=True, **options).train(), images, noise, dtype)
    assert torch.equal(loss, again)
    for name, gradient in gradients.items():
        assert torch.equal(gradient, repeated[name]), name


def test_activation_checkpointing_keeps_less_for_the_backward():
    def kept(**options) -> int:
        model, total = objective(**options), 0
        images, noise = batch(model)

        def count(tensor):
            nonlocal total
            total += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            model(Batch.of_view(images), noise)
        return total

    assert kept(depth=8, activation_checkpointing=True) < kept(depth=8) / 3


def test_a_run_may_go_on_with_activation_checkpointing_or_without():
    assert objective(activation_checkpointing=True).metadata == objective().metadata
    old, new = ({"encoder": {"width": 8, "activation_checkpointing": value}} for value in (False, True))
    assert Configuration(new, {}).difference(Configuration(old, {})) is None
