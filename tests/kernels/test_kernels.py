"""The operators in C++ beside formulas in float64, on shapes that fill no vector, and what happens without them."""

import copy
import math
import subprocess
from types import SimpleNamespace

import pytest
import tiny
import torch
from command import LIMIT

from ssvit.cli import build_kernels
from ssvit.engine import private
from ssvit.engine.private import HAS_ONEDNN
from ssvit.errors import UserError
from ssvit.kernels import accelerate, fused, operators
from ssvit.kernels.accelerate import LayerNorm, Linear
from ssvit.models.block import Attention, Block, Layers, TokenInfo
from ssvit.models.vit import ViT
from ssvit.objectives import masked_patch_options
from ssvit.objectives.masked_patch import MaskedPatch
from ssvit.objectives.targets_options import MeanColor

needs_kernels = pytest.mark.usefixtures("kernels")
NAMES = [
    "linear", "linear_inputs", "linear_weights", "attention", "attention_backward", "rotate", "layer_norm",
    "layer_norm_backward", "branches", "branches_backward",
]  # fmt: skip
PRODUCTS = [(1, 16, 16), (7, 48, 32), (95, 64, 112), (197, 192, 576), (1025, 80, 16), (2100, 16, 96)]
SHAPES = [(1, 1), (3, 5), (7, 16), (40, 33), (65, 197)]
EPSILON = 1e-6  # of layer norms
HALF_STEP = 2**-8  # bfloat16 keeps 8 bits: a rounded number is off by at most this share of itself, and here twice


@pytest.fixture(params=operators.VERSIONS)
def kernels(request, monkeypatch):
    """The operators of each version that this processor can execute, which ssvit's layers call."""
    if operators.version() is None or (request.param == "amx" and not private.has_matrix_units()):
        pytest.skip("the processor lacks the instructions")
    path = operators.path(request.param)
    if not path.exists():
        try:
            operators.build(request.param)
        except UserError as error:
            pytest.skip(str(error))
    torch.ops.load_library(path)
    library = getattr(torch.ops, path.stem)
    library = SimpleNamespace(**{name: getattr(library, name) for name in NAMES})
    monkeypatch.setattr(operators, "library", lambda: library)
    return library


def random(*shape: int, seed: int = 0, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return (tiny.noise(*shape, seed=seed) * scale).to(dtype)


def same(found, right) -> bool:
    return all(one is other is None or torch.equal(one, other) for one, other in zip(found, right, strict=True))


def attended(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, heads: int) -> torch.Tensor:
    """The formula of attention: (b, q, d) and twice (b, t, d) -> (b, q, d)."""
    query, key, value = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in (query, key, value))
    weights = (query @ key.mT / math.sqrt(query.shape[-1])).softmax(-1)
    return (weights @ value).transpose(1, 2).flatten(2)


def assert_rounded(found, right):
    """Equal to float64's result but for one rounding to bfloat16, and errors of float32 sums."""
    torch.testing.assert_close(found.double(), right, rtol=HALF_STEP, atol=2e-5 * right.abs().max().item())


@needs_kernels
@pytest.mark.parametrize(("rows", "inputs", "outputs"), PRODUCTS)
def test_a_linear_layer_and_its_gradients(rows, inputs, outputs, kernels):
    x, back = random(rows, inputs), random(rows, outputs, seed=1)
    weight, bias = random(outputs, inputs, seed=2, scale=inputs**-0.5).float() * 1.001, random(outputs, seed=3).float()
    rounded = weight.bfloat16().double()
    assert_rounded(kernels.linear(x, weight, bias), x.double() @ rounded.T + bias.double())
    assert_rounded(kernels.linear_inputs(back, weight), back.double() @ rounded)
    to_weight, to_bias = kernels.linear_weights(back, x)
    torch.testing.assert_close(to_weight.double(), back.double().T @ x.double(), rtol=1e-5, atol=1e-5 * rows**0.5)
    torch.testing.assert_close(to_bias.double(), back.double().sum(0), rtol=1e-5, atol=1e-5 * rows**0.5)


def layers(width: int, first: int, second: int, seed: int = 0) -> list[torch.Tensor]:
    """Weights and biases of a layer norm and two linear layers, bfloat16 in float32."""
    gain, offset = 1 + random(width, seed=seed + 1, scale=0.3).float(), random(width, seed=seed + 2, scale=0.3).float()
    weight, weight2 = random(first, width, seed=seed + 3), random(width, second, seed=seed + 4)
    scaled = [(matrix * matrix.shape[1] ** -0.5).bfloat16().float() for matrix in (weight, weight2)]
    biases = random(first, seed=seed + 5).float(), random(width, seed=seed + 6).float()
    return [gain, offset, scaled[0], biases[0], scaled[1], biases[1]]


@needs_kernels
@pytest.mark.parametrize("heads", [0, 3])
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize(("b", "t"), [(1, 1), (1, 7), (5, 19), (2, 197), (300, 7)])
def test_a_branch_and_its_gradients(b, t, heads, adds, kernels):
    """Each part beside float64 given the part before, and the gradients of the whole: three roundings, or a few."""
    width, first, second = 48, *((144, 48) if heads else (80, 80))
    x, back = random(b, t, width), random(b, t, width, seed=7)
    gain, offset, weight, bias, weight2, bias2 = given = layers(width, first, second)
    out, normed, moments, between, hidden, norms = saved = kernels.branches(x, given, [heads], EPSILON, adds, True)
    norm, kept = kernels.layer_norm(x.view(-1, width), gain, offset, EPSILON)
    assert torch.equal(normed.view_as(norm), norm)
    assert torch.equal(moments.view_as(kept), kept)
    if heads:
        assert torch.equal(between.view(-1, first), kernels.linear(norm, weight, bias))
        mixed, kept = kernels.attention(None, between, heads)
        assert torch.equal(hidden, mixed)
        assert torch.equal(norms, kept)
    else:
        known = (normed.double() @ weight.double().T + bias.double()).requires_grad_()
        right = known * (1 + torch.erf(known / math.sqrt(2))) / 2
        assert_rounded(hidden, right.detach())
        assert_rounded(between, torch.autograd.grad(right.sum(), known)[0])
    assert_rounded(out, hidden.double() @ weight2.double().T + bias2.double() + (x.double() if adds else 0))

    known = [tensor.double().requires_grad_() for tensor in (x, gain, offset, weight, bias, weight2, bias2)]
    whole, weights = known[0], known[3:]
    y = torch.nn.functional.layer_norm(whole, (width,), known[1], known[2], EPSILON) @ weights[0].T + weights[1]
    y = attended(*y.chunk(3, -1), heads) if heads else y * (1 + torch.erf(y / math.sqrt(2))) / 2
    right = y @ weights[2].T + weights[3] + (whole if adds else 0)
    rights = torch.autograd.grad(right, known, back.double())
    for found, wanted in zip(kernels.branches_backward(back, x, given, saved, [heads], adds), rights, strict=True):
        # A query's share of the bias is a small difference of large sums.
        assert (found.double() - wanted).norm() <= 2 * HALF_STEP * wanted.norm() + 1e-3


@needs_kernels
def test_branches_in_a_row_are_one_after_the_other(kernels):
    """Bit for bit, forward and backward; without learning they share memory, and nothing but the result is kept."""
    heads = [1, 0, 0, 2, 1, 1, 0]
    weights = [layers(32, *((96, 32) if own else (80, 80)), seed=10 * n) for n, own in enumerate(heads)]
    x, back = random(2, 5, 32), random(2, 5, 32, seed=7)
    inputs, saved = [x], []
    for own, each in zip(heads, weights, strict=True):
        saved.append(kernels.branches(inputs[-1], each, [own], EPSILON, True, True))
        inputs.append(saved[-1][0])
    rights, gradient = [], back
    for own, given, each, kept in zip(heads[::-1], inputs[-2::-1], weights[::-1], saved[::-1], strict=True):
        gradient, *to_weights = kernels.branches_backward(gradient, given, each, kept, [own], True)
        rights = [*to_weights, *rights]

    weights, saved = ([part for each in parts for part in each] for parts in (weights, saved))
    before = x.clone()
    (out,) = kernels.branches(x, weights, heads, EPSILON, True, False)
    assert torch.equal(out, inputs[-1])
    kept = kernels.branches(x, weights, heads, EPSILON, True, True)
    assert same(kept, saved)
    assert same(kernels.branches_backward(back, x, weights, kept, heads, True), [gradient, *rights])
    assert torch.equal(x, before)
    with pytest.raises(RuntimeError):
        kernels.branches(x, weights, heads, EPSILON, False, True)


@needs_kernels
def test_gelu_far_out(kernels):
    x = torch.tensor([-1e30, -40.0, -13.0, -6.0, 0.0, 6.0, 40.0, 1e30] * 2)
    nothing = [torch.zeros(16), torch.zeros(16), torch.zeros(16, 16), x, torch.zeros(16, 16), torch.zeros(16)]
    _, _, _, slopes, found, _ = kernels.branches(random(1, 1, 16), nothing, [0], EPSILON, False, True)
    right = torch.nn.functional.gelu(x.double())
    torch.testing.assert_close(found.flatten().double(), right, rtol=HALF_STEP, atol=1e-8)
    known = torch.tensor([0, 0, 0, 0, 0.5, 1, 1, 1] * 2)
    torch.testing.assert_close(slopes.flatten().float(), known, rtol=0, atol=1e-6)


@needs_kernels
@pytest.mark.parametrize("scale", [0.1, 1.0, 30.0])
@pytest.mark.parametrize(
    ("q", "t", "width"), [(1, 1, 16), (5, 7, 16), (7, 7, 48), (32, 33, 64), (65, 65, 80), (20, 197, 64)]
)
def test_attention_and_its_gradients(q, t, width, scale, kernels):
    """Of the gradients it can only be asked that they are as near as bfloat16's rounding of the weights allows."""
    b, heads = 2, 3
    parts = random(b, q, heads * width, scale=scale), *(random(b, t, heads * width, seed=s) for s in (1, 2))
    back = random(b, q, heads * width, seed=3)
    known = [part.double().requires_grad_() for part in parts]
    right = attended(*known, heads)
    right.backward(back.double())
    apart, packed = (parts[0], torch.cat(parts[1:], -1)), (None, torch.cat(parts, -1) if q == t else None)
    for given in [apart, packed] if q == t else [apart]:
        out, norms = kernels.attention(*given, heads)
        to = kernels.attention_backward(*given, back, norms)
        to = to[0].chunk(3, -1) if given[0] is None else (to[1], *to[0].chunk(2, -1))
        for found, wanted in zip((out, *to), (right.detach(), *(part.grad for part in known)), strict=True):
            assert (found.double() - wanted).norm() <= 2 * HALF_STEP * wanted.norm() + 1e-5 * scale


def turned(x: torch.Tensor, angles: torch.Tensor, rotated: int) -> torch.Tensor:
    """The formula of a rotation, as a product of complex numbers: the first channels of each token are turned."""
    half = angles.shape[-1]
    numbers = torch.complex(*x[..., :rotated].unflatten(-1, (-1, 2, half)).unbind(-2))
    numbers = numbers * torch.complex(*angles)[:, :, None]
    return torch.cat([torch.stack([numbers.real, numbers.imag], -2).flatten(-3), x[..., rotated:]], -1)


@needs_kernels
@pytest.mark.parametrize("images", [1, 3])
@pytest.mark.parametrize(("width", "rotated"), [(32, 32), (96, 64), (144, 96)])
def test_a_rotation_and_its_gradient(images, width, rotated, kernels):
    """The gradient of a rotation is the inverse rotation."""
    x, back = random(3, 5, width), random(3, 5, width, seed=1)
    angle = random(images, 5, 8, seed=2, scale=4.0, dtype=torch.float64)
    angles = torch.stack([angle.cos(), angle.sin()])
    known = x.double().requires_grad_()
    right = turned(known, angles, rotated)
    right.backward(back.double())
    for found, wanted in [
        (kernels.rotate(x, angles.float(), rotated, False), right.detach()),
        (kernels.rotate(back, angles.float(), rotated, True), known.grad),
    ]:
        assert_rounded(found, wanted)


@needs_kernels
@pytest.mark.parametrize("level", [-1e4, 1e4])
def test_attention_to_keys_that_are_all_alike_and_far_from_the_query(level, kernels):
    """Of logits that are all far below or above zero only the differences count, here none."""
    query, key = torch.full((1, 7, 16), 8.0).bfloat16(), torch.full((1, 7, 16), level / 8).bfloat16()
    value, back = random(1, 7, 16), random(1, 7, 16, seed=1)
    packed = torch.cat([query, key, value], -1)
    out, norms = kernels.attention(None, packed, 1)
    torch.testing.assert_close(out.float(), value.float().mean(1, keepdim=True).expand_as(out), rtol=0.01, atol=0.01)
    (to_packed,) = kernels.attention_backward(None, packed, back, norms)
    assert to_packed.isfinite().all()
    torch.testing.assert_close(
        to_packed[..., 32:].float(), back.float().mean(1, keepdim=True).expand_as(out), rtol=0.01, atol=0.01
    )


@needs_kernels
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("offset", [0.0, 20.0])
def test_layer_norm_and_its_gradients(shape, offset, kernels):
    x, back = random(*shape) + offset, random(*shape, seed=1)
    weight, bias = (tiny.noise(shape[1], seed=seed) for seed in (2, 3))
    known = [tensor.double().requires_grad_() for tensor in (x, weight, bias)]
    centred = known[0] - known[0].mean(-1, keepdim=True)
    normal = centred / (centred.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    right = normal * known[1] + known[2]
    right.backward(back.double())
    out, moments = kernels.layer_norm(x, weight, bias, 1e-6)
    assert_rounded(out, right.detach())
    to_x, to_weight, to_bias = kernels.layer_norm_backward(x, back, weight, moments)
    if shape[1] > 1:  # of a single number nothing is left but rounding
        torch.testing.assert_close(to_x.double(), known[0].grad, rtol=HALF_STEP, atol=1e-4)
    torch.testing.assert_close(to_weight.double(), known[1].grad, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(to_bias.double(), known[2].grad, rtol=1e-5, atol=1e-5)


@needs_kernels
def test_what_is_not_a_number_stays_so_in_layer_norm(kernels):
    x = random(4, 33)
    x[2, 20] = math.nan
    ones = torch.ones(33)
    out, moments = kernels.layer_norm(x, ones, ones, 1e-6)
    for rows in (out, kernels.layer_norm_backward(x, x, ones, moments)[0]):
        assert rows.isnan().all(1).tolist() == [False, False, True, False]


@needs_kernels
def test_what_is_not_a_number_stays_so_in_products_and_attention(kernels):
    x, weight, bias = random(9, 32), random(16, 32, seed=1).float(), torch.zeros(16)
    x[2, 20] = math.nan
    only = [row == 2 for row in range(9)]
    whole = kernels.branches(x[None], layers(32, 48, 48), [0], EPSILON, False, True)
    for out in (kernels.linear(x, weight, bias), *(part[0] for part in whole[:5] if part is not whole[2])):
        assert out.isnan().any(1).tolist() == out.isnan().all(1).tolist() == only
    to_weight, _ = kernels.linear_weights(random(9, 16), x)
    assert to_weight.isnan().any(0).tolist() == to_weight.isnan().all(0).tolist() == [i == 20 for i in range(32)]
    _, to_bias = kernels.linear_weights(x, random(9, 16))
    assert to_bias.isnan().tolist() == [i == 20 for i in range(32)]
    query, key, value = x[None], random(1, 9, 32, seed=2), random(1, 9, 32, seed=3)
    packed = torch.cat([key, value], -1)
    out, norms = kernels.attention(query, packed, 1)
    assert out[0].isnan().all(1).tolist() == only
    to_packed, to_query = kernels.attention_backward(query, packed, random(1, 9, 32), norms)
    assert to_query[0].isnan().all(1).tolist() == only
    assert to_packed.isnan().all()


@needs_kernels
def test_the_number_of_threads_changes_no_bit(kernels):
    def everything():
        x = random(100, 48, seed=4)
        weight = random(48, seed=5).float()
        out, moments = kernels.layer_norm(x, weight, weight, 1e-6)
        torch.manual_seed(7)
        layer = block(width=48, heads=3, mlp_width=192)
        with torch.autocast("cpu", torch.bfloat16):
            changed = layer(random(25, 100, 48, seed=8))
        changed.backward(changed.detach())
        rest = [parameter.grad for parameter in layer.parameters()]
        return [out, moments, *kernels.layer_norm_backward(x, out, weight, moments), changed, *rest]

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = everything()
        torch.set_num_threads(3)
        assert same(alone, everything())
    finally:
        torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.parametrize("version", ["amx", "avx512"])
def test_the_sources_have_no_warnings(version, tmp_path):
    line = operators.command(version, tmp_path / "kernels.so")
    line = [f"-isystem{part[2:]}" if part.startswith("-I") else part for part in line[:-3]]
    line += ["-fsyntax-only", "-Wall", "-Wextra", "-Werror"]
    try:
        done = subprocess.run(line, capture_output=True, text=True, timeout=LIMIT)
    except FileNotFoundError:
        pytest.skip("there is no C++ compiler")
    assert done.returncode == 0, done.stderr


@pytest.fixture
def empty(tmp_path, monkeypatch):
    """A folder of extensions without any."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    operators.library.cache_clear()
    yield tmp_path
    operators.library.cache_clear()


def test_without_the_operators_torch_computes(empty):
    assert operators.library() is None
    x = random(2, 5, 48)
    assert not operators.supports(x)
    layer = block(width=48, heads=3, mlp_width=16)
    with torch.autocast("cpu", torch.bfloat16):
        layer(x).sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in layer.parameters())


@pytest.mark.parametrize("compiler", ["false", "there-is-no-such-compiler", "an open 'quote"])
def test_a_failed_build_is_one_error_and_leaves_nothing(compiler, empty, monkeypatch):
    monkeypatch.setenv("CXX", compiler)
    with pytest.raises(UserError, match=f"CXX={compiler}"):
        operators.build("avx512")
    assert not [path for path in empty.rglob("*") if path.is_file()]


def test_the_command_compiles_the_version_of_the_processor(empty, monkeypatch, capsys):
    """By a compiler that writes its arguments to the file that it is asked for."""
    compiler = empty / "compiler"
    compiler.write_text('#!/bin/sh\nfor part; do test "$before" = -o && echo "$@" > "$part"; before=$part; done\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr(operators, "version", lambda: "amx")
    build_kernels.command.call([])
    path = operators.path("amx")
    assert "-mamx-bf16" in path.read_text()
    assert str(path) in capsys.readouterr().out
    assert [part for part in empty.rglob("*") if part.is_file()] == [compiler, path]
    path.unlink()
    monkeypatch.setattr(operators, "version", lambda: None)
    build_kernels.command.call([])
    assert not path.exists()
    build_kernels.command.call(["version=avx512"])
    assert "-mamx-bf16" not in operators.path("avx512").read_text()


@needs_kernels
@pytest.mark.parametrize("way", ["expanded", "turned"])
def test_gradients_may_have_any_strides(way):
    x, width = random(3, 5, 48), 48
    back = (
        random(1, 1, width, seed=1).expand_as(x) if way == "expanded" else random(width, 5, 3, seed=1).permute(2, 1, 0)
    )
    linear, norm = torch.nn.Linear(width, width), torch.nn.LayerNorm(width, 1e-6)
    own = Linear(width, width), LayerNorm(width, 1e-6)
    for one, other in zip(own, (linear, norm), strict=True):
        one.load_state_dict(other.state_dict())
    layer = block(width=width, heads=1, mlp_width=width)
    pairs = [(own[0], linear), (own[1], norm), (layer, copy.deepcopy(layer))]
    for one, right in pairs:
        given, known = x.clone().requires_grad_(), x.float().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            one(given).backward(back)
        right(known).backward(back.float())
        torch.testing.assert_close(given.grad.float(), known.grad, rtol=0.05, atol=0.05)
    packed = random(3, 5, 48, seed=2).requires_grad_()
    given = back[..., :16], back[..., :16].contiguous()
    assert torch.equal(*(torch.autograd.grad(fused.attention(None, packed, 1), packed, one)[0] for one in given))


@needs_kernels
@pytest.mark.parametrize(
    "learned", ["linear.weight", "linear.bias", "norm1.weight", "expand.weight", "norm2.bias", "x"]
)
def test_each_part_gets_its_gradient_when_the_rest_is_frozen(learned):
    layer, x, linear = block(width=16, heads=1, mlp_width=32), random(2, 3, 16), Linear(16, 16)
    parts = {f"linear.{name}": part for name, part in linear.named_parameters()} | dict(layer.named_parameters())
    parts["x"] = x

    def gradients(*names):
        for name, part in parts.items():
            part.requires_grad_(name in names)
            part.grad = None
        with torch.autocast("cpu", torch.bfloat16):
            layer(linear(x)).square().sum().backward()
        return {name: part.grad for name, part in parts.items()}

    found, right = gradients(learned), gradients(*parts)
    assert [name for name, gradient in found.items() if gradient is not None] == [learned]
    assert torch.equal(found[learned], right[learned])


IMAGES = torch.randint(0, 256, (2, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(4))


@pytest.fixture
def calls(kernels):
    """How many branches each call of the operators has computed; grows as they are called."""
    counts, branches = [], kernels.branches

    def count(x, weights, heads, *rest):
        counts.append(len(heads))
        return branches(x, weights, heads, *rest)

    kernels.branches = count
    return counts


def block(**sizes) -> Block:
    attention = Attention(width=sizes["width"], heads=sizes.pop("heads"), dropout=0.0, relative=None)
    built = Block(attention, **sizes, dropout=0.0, drop=0.0)
    accelerate.accelerate(built)
    return built


def encoder(**options) -> ViT:
    shape = {"image_size": 8, "patch_size": 4, "width": 32, "depth": 3, "heads": 2}
    built = tiny.vit(seed=3, **shape | options)
    accelerate.accelerate(built)
    return built


def learn(vit: ViT, at: torch.Tensor | None = None) -> list[torch.Tensor | None]:
    """What an encoder makes of IMAGES, and the gradients of its weights."""
    vit.zero_grad()
    torch.manual_seed(5)
    with torch.autocast("cpu", torch.bfloat16):
        out = vit.encode(vit.embed(IMAGES), output_ids=at)
    out.backward(random(*out.shape, seed=6).to(out.dtype))
    return [out.detach(), *(weight.grad for weight in vit.parameters())]


@needs_kernels
@pytest.mark.parametrize("at", [None, torch.tensor([[0, 3]] * 2)])
@pytest.mark.parametrize(
    ("options", "apart"),
    [
        ({}, False), ({"depth": 1}, False),
        ({"positions": "sine_cosine_2d", "class_token": False, "pooling": "patch_mean"}, False),
        ({"positions_at": "every_layer"}, True), ({"activation_checkpointing": True}, True),
        ({"stochastic_depth": 0.5}, True), ({"dropout": 0.5}, True), ({"attention_dropout": 0.5}, True),
    ],
)  # fmt: skip
def test_layers_at_once_are_the_layers_in_turn(options, apart, at, calls, monkeypatch):
    """Bit for bit; where something happens between them, they are not computed at once."""
    vit = encoder(**options)
    found, together = learn(vit, at), 2 * (len(vit.blocks) - (at is not None))
    assert (together in calls) == (together > 0 and not apart)
    monkeypatch.setattr(accelerate.Layers, "forward", Layers.forward)
    calls.clear()
    assert same(found, learn(vit, at))
    assert set(calls) <= {1}


@needs_kernels
@pytest.mark.parametrize(
    "name", ["patch", "blocks.0", "blocks.1.attention", "blocks.1.attention.qkv", "blocks.2.norm2"]
)
@pytest.mark.parametrize("kind", ["forward_hook", "forward_pre_hook", "full_backward_hook"])
def test_who_listens_to_a_module_is_told(name, kind, calls):
    vit, told = encoder(), []
    right = learn(vit)
    handle = getattr(vit.get_submodule(name), f"register_{kind}")(lambda *_: told.append(name))
    for found, wanted in zip(learn(vit), right, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0.05, atol=0.05 * wanted.abs().max().item())
    assert told == [name]
    handle.remove()
    calls.clear()
    assert same(learn(vit), right)
    assert calls == [6]
    assert told == [name]


@needs_kernels
@torch.no_grad()
def test_a_compiled_graph_is_of_torchs_operators(calls):
    vit = encoder()
    compiled = torch.compile(vit, backend="eager", fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16):
        found = compiled(IMAGES)
        assert not calls
        torch.testing.assert_close(found, vit(IMAGES), rtol=0.05, atol=0.05)
    assert calls == [6]


@needs_kernels
def test_modules_in_the_place_of_others_are_called():
    class Zero(Linear):
        def forward(self, x):
            return 0 * super().forward(x)

    class Skipped(accelerate.Block):
        def forward(self, x, *_):
            return x

    vit = encoder()
    before = learn(vit)[0]
    for name, kind in (("blocks.0.contract", Zero), ("blocks.2.attention.out", Zero), ("blocks.1", Skipped)):
        vit.get_submodule(name).__class__ = kind
        after = learn(vit)[0]
        assert not torch.allclose(before, after, atol=0.1)
        before = after


@needs_kernels
def test_layers_that_learn_nothing_are_left_out_of_the_gradient(monkeypatch, kernels):
    vit, right = encoder(), learn(encoder())
    frozen = {id(weight) for module in (vit.patch, *vit.blocks[:2]) for weight in module.parameters()}
    frozen |= {id(vit.class_token), *(id(weight) for weight in vit.positions.parameters())}
    kept = [id(weight) in frozen for weight in vit.parameters()]
    for weight in vit.parameters():
        weight.requires_grad_(id(weight) not in frozen)
    counted, backward = [], kernels.branches_backward

    def count(gradient, x, weights, *rest):
        counted.append(len(weights))
        return backward(gradient, x, weights, *rest)

    kernels.branches_backward = count
    out, *gradients = learn(vit)
    assert same([out, *gradients], [right[0], *(None if k else g for k, g in zip(kept, right[1:], strict=True))])
    assert counted == [6, 6]  # the two branches of the last layer


@needs_kernels
def test_what_does_not_match_is_refused_and_not_read_beyond_its_end():
    norm, x = LayerNorm(16, 1e-6), random(1, 3, 16)
    with torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(RuntimeError):
            fused.linear(random(3, 16), torch.zeros(32, 48), torch.zeros(32))
        for first, second, heads in [((16, 32), (48, 16), 0), ((32, 32), (32, 16), 0), ((16, 32), (32, 16), 1)]:
            with pytest.raises(RuntimeError):
                fused.branches(x, fused.Branch(norm, Linear(*first), Linear(*second), heads))
        with pytest.raises(RuntimeError):
            fused.branches(x, fused.Branch(LayerNorm(48), Linear(16, 32), Linear(32, 16)))
        for heads in (-1, 0, 2, 3):
            with pytest.raises(RuntimeError):
                operators.library().attention(None, random(1, 3, 48), heads)
        out = fused.linear(random(3, 16), torch.ones(32, 16), torch.ones(32, dtype=torch.bfloat16))
    torch.testing.assert_close(out, random(3, 16).sum(1, keepdim=True).expand(-1, 32) + 1, rtol=0.01, atol=0.01)


@needs_kernels
@pytest.mark.parametrize("change", ["float", "double", "strided"])
def test_other_tensors_are_left_to_torch(change, kernels):
    x = random(4, 6)
    other = x.T if change == "strided" else getattr(x, change)()
    del kernels.layer_norm
    norm = LayerNorm(6 if change != "strided" else 4, eps=1e-6).to(other.dtype)
    right = torch.nn.functional.layer_norm(other, norm.normalized_shape, norm.weight, norm.bias, 1e-6)
    assert torch.equal(norm(other), right)


def test_no_tokens_are_no_error():
    x = torch.empty(2, 0, 24, dtype=torch.bfloat16)
    assert not operators.supports(x)
    assert fused.attention(None, x, 2) is None
    assert LayerNorm(24, eps=1e-6)(x).shape == x.shape


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
@pytest.mark.parametrize("std", [0.25, 0.01])
def test_images_of_low_contrast_are_embedded_as_precisely_as_others(std, dtype):
    """The reference is float64; rounding floats before the mean is subtracted would lose a tenth of this contrast."""
    vit = encoder(mean=0.9, std=std)
    images = (0.9 + std * random(4, 3, 16, 16, dtype=torch.float32)).clamp(0, 1)
    images = images if dtype.is_floating_point else (255 * images).round().to(dtype)
    unit = 1 if dtype.is_floating_point else 255
    right = copy.deepcopy(vit).double().embed(images.double() / unit)
    accelerate.accelerate(vit)
    with torch.autocast("cpu", torch.bfloat16):
        found = vit.embed(images).double()
    assert (found - right).norm() < 2 * HALF_STEP * right.norm()


def test_accelerating_changes_neither_names_nor_weights_and_can_be_taken_back():
    model = MaskedPatch(
        masked_patch_options.MaskedPatch(), encoder=encoder(), target=MeanColor(bits=1).build(encoder=tiny.patches(4))
    )
    model.own = torch.nn.Linear(2, 2, bias=False)
    accelerate.accelerate(model)
    kinds, before = [type(module) for module in model.modules()], copy.deepcopy(model.state_dict())
    assert kinds.count(Linear) == 3 * 4 + 3
    assert isinstance(model.encoder, ViT)
    assert torch.equal(model.own(torch.eye(2)), model.own.weight.T)
    accelerate.accelerate(model, enabled=False)
    assert all(type(module).__module__ != accelerate.__name__ for module in model.modules())
    assert before.keys() == model.state_dict().keys()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    accelerate.accelerate(model)
    assert [type(module) for module in copy.deepcopy(model).modules()] == kinds


@pytest.mark.parametrize("shape", [(3, 8), (2, 3, 8)])
def test_layer_norms_of_other_kinds_are_torchs(shape):
    x = torch.randn(shape).bfloat16()
    for options in ({"elementwise_affine": False}, {"bias": False}):
        norm = torch.nn.LayerNorm(shape[1:], **options).bfloat16()
        right = norm(x)
        accelerate.accelerate(norm)
        assert torch.equal(norm(x), right)


@pytest.fixture(params=["oneDNN", "torch"])
def products(request, monkeypatch):
    """Compute linear layers by oneDNN in each type that it supports on any processor, or by torch."""
    by_onednn = fused.TYPES | ({torch.float32} if HAS_ONEDNN else set())
    monkeypatch.setattr(fused, "TYPES", by_onednn if request.param == "oneDNN" else set())


@pytest.mark.usefixtures("products")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("inputs", "outputs"), [(6, 10), (10, 6), (8, 8), (5, 1)])
@pytest.mark.parametrize("shape", [(7,), (2, 3), (0,), (1, 1, 1)])
def test_a_linear_layer_is_its_formula(dtype, inputs, outputs, shape):
    x, weight, bias, back = (
        random(*size, seed=seed, dtype=dtype)
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


@pytest.mark.usefixtures("products")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_linear_layer_takes_any_strides_and_any_wish_for_gradients(dtype):
    x, weight, bias = (random(*size, seed=seed, dtype=dtype) for seed, size in enumerate([(4, 5, 6), (3, 6), (3,)]))
    right = torch.nn.functional.linear(x.transpose(0, 1).double(), weight.double(), bias.double())
    turned = weight.T.contiguous().T
    torch.testing.assert_close(fused.linear(x.transpose(0, 1), turned, bias).double(), right, atol=0.1, rtol=0.05)
    for place in range(3):
        given = [x, weight, bias]
        given[place] = given[place].clone().requires_grad_()
        fused.linear(*given).sum().backward()
        (wanted,) = torch.autograd.grad(torch.nn.functional.linear(*(t.double() for t in given)).sum(), given[place])
        torch.testing.assert_close(given[place].grad, wanted, atol=0.1, rtol=0.05)


@pytest.mark.parametrize("shape", [(6, 4), (16, 32)])
def test_autocast_casts_a_linear_layer_and_gives_gradients_in_the_weights_own_type(shape):
    layer = Linear(*shape)
    x = random(3, 1, shape[0], dtype=torch.float32).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x)
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert layer.weight.grad.dtype == layer.bias.grad.dtype == x.grad.dtype == torch.float32
    torch.testing.assert_close(
        out.float(), torch.nn.functional.linear(x, layer.weight, layer.bias), atol=0.03, rtol=0.03
    )


@pytest.mark.parametrize("width", [8, 16])
@pytest.mark.parametrize("output_ids", [None, torch.tensor([[4, 0], [1, 2]])])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("positions", ["none", "of all images", "of each image"])
def test_attention_of_projected_tokens_is_its_formula(positions, dtype, output_ids, width):
    """Kernels support heads of 16 channels and not of 8; queries and keys may be rotated by their positions."""
    d, x = 3 * width, random(2, 7, 3 * width, dtype=torch.float32).requires_grad_()
    attention = block(width=d, heads=3, mlp_width=1).attention
    angle = random(2 if positions == "of each image" else 1, 7, width // 2, seed=3, scale=4.0, dtype=torch.float32)
    angles = torch.stack([angle.cos(), angle.sin()])
    info = TokenInfo() if positions == "none" else TokenInfo(rotation=angles[:, :, None])
    with torch.autocast("cpu", dtype, enabled=dtype == torch.bfloat16):
        out = attention(x, output_ids, info)
    inputs = [x, *attention.parameters()]
    back = random(*out.shape, seed=2, dtype=dtype)

    known = [tensor.detach().double().requires_grad_() for tensor in inputs]
    query, key, value = torch.nn.functional.linear(known[0], *known[1:3]).chunk(3, -1)
    if positions != "none":
        query, key = (turned(part, angles.double(), d) for part in (query, key))
    if output_ids is not None:
        query = query[torch.arange(2)[:, None], output_ids]
    expected = torch.nn.functional.linear(attended(query, key, value, 3), *known[3:])
    tolerance = 1e-5 if dtype == torch.float32 else 0.04
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)
    rights = torch.autograd.grad(expected, known, back.double())
    for gradient, right in zip(torch.autograd.grad(out, inputs, back), rights, strict=True):
        assert (gradient - right).norm() <= tolerance * right.norm() + 1e-3
