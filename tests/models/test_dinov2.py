"""LayerScale and registers, as DINOv2 has them: the equations, the sequence, the kernels, and what stays as it was."""

import exported
import onnxruntime
import peers
import pytest
import torch
from exported import images
from safetensors.torch import save_file
from torch import nn

from ssvit.exchange.export_options import Export
from ssvit.exchange.program import Program, write_onnx
from ssvit.kernels import accelerate, operators
from ssvit.kernels.fused import branches
from ssvit.loading import encoder as loading
from ssvit.loading import encoder_options as loading_options
from ssvit.models import vit_options
from ssvit.models.block import LayerScale
from ssvit.models.vit import ViT
from ssvit.objectives.base import parameter_groups
from ssvit.options import OptionError

BOTH = {"layer_scale": 0.3, "registers": 3}


def plain_block(block, x):
    """A layer with LayerScale as the papers have it, in float64."""
    d, h = x.shape[-1], block.attention.heads

    def norm(x, layer):
        x = (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True) + 1e-6).sqrt()
        return x * layer.weight + layer.bias

    query, key, value = (norm(x, block.norm1) @ block.attention.qkv.weight.T + block.attention.qkv.bias).split(d, -1)
    mixed = []
    for part in range(h):
        q, k, v = (of[..., part * d // h : (part + 1) * d // h] for of in (query, key, value))
        mixed.append((q @ k.mT / (d // h) ** 0.5).softmax(-1) @ v)
    x = x + block.scale1.gamma * (torch.cat(mixed, -1) @ block.attention.out.weight.T + block.attention.out.bias)
    hidden = nn.functional.gelu(norm(x, block.norm2) @ block.expand.weight.T + block.expand.bias)
    return x + block.scale2.gamma * (hidden @ block.contract.weight.T + block.contract.bias)


@torch.no_grad()
def test_the_equations():
    encoder = exported.encoder(**BOTH).double()
    x = images().double()
    patches = encoder.embed(x)
    rows = encoder.positions[0]()
    assert len(rows) == 1 + encoder.patches
    tokens = torch.cat(
        [
            (encoder.class_token + rows[:1]).expand(len(x), -1, -1),
            encoder.register_tokens.expand(len(x), -1, -1),  # without positions
            patches + rows[1:],
        ],
        1,
    )
    for block in encoder.blocks:
        tokens = plain_block(block, tokens)
    expected = encoder.norm(tokens)
    assert expected.shape[1] == 1 + 3 + encoder.patches
    torch.testing.assert_close(encoder(x), expected, atol=1e-12, rtol=0)
    torch.testing.assert_close(encoder.represent(x), expected[:, 0], atol=1e-12, rtol=0)
    mean = encoder.pooling
    encoder.pooling = "patch_mean"
    torch.testing.assert_close(encoder.represent(x), expected[:, 4:].mean(1), atol=1e-12, rtol=0)
    encoder.pooling = mean


@pytest.mark.parametrize("positions", ["learned_1d", "learned_2d", "sine_cosine_2d", "relative", "none"])
@pytest.mark.parametrize("at", ["stem", "every_layer"])
@torch.no_grad()
def test_visible_and_output_ids_choose_among_the_patches(positions, at):
    if at != "stem" and positions in ("relative", "none"):
        return
    encoder = exported.encoder(**BOTH, positions=positions, positions_at=at).double()
    tokens = encoder.embed(images().double())
    ids = torch.stack([torch.randperm(encoder.patches) for _ in range(len(tokens))])
    whole = encoder.encode(tokens)
    shuffled = encoder.encode(tokens, visible_ids=ids)
    torch.testing.assert_close(shuffled[:, :4], whole[:, :4], atol=1e-12, rtol=0)
    torch.testing.assert_close(shuffled[:, 4:], whole[:, 4:].gather(1, ids[..., None].expand_as(whole[:, 4:])))
    some = encoder.encode(tokens, output_ids=ids[:, :5])
    torch.testing.assert_close(some, shuffled[:, 4:9], atol=1e-12, rtol=0)


@pytest.mark.parametrize("changes", [{"layer_scale": 0.3}, {"registers": 3}, BOTH])
@pytest.mark.parametrize("training", [False, True])
def test_kernels_are_as_exact_as_torch(changes, training, monkeypatch):
    """Under autocast, where whole branches are kernels: beside float32, with gradients."""
    used = []
    monkeypatch.setattr(accelerate, "branches", lambda *given, **how: used.append(branches(*given, **how)) or used[-1])
    results = []
    for enabled, dtype in ((False, torch.float32), (False, torch.bfloat16), (True, torch.bfloat16)):
        encoder = exported.encoder(width=64, heads=2, mlp_width=256, **changes).train(training)
        accelerate.accelerate(encoder, enabled)
        with torch.autocast("cpu", dtype, enabled=dtype == torch.bfloat16):
            out = encoder(images())
        out.float().square().mean().backward()
        results.append([out.float(), *(weight.grad for weight in encoder.parameters())])
    if operators.supports_matmul(torch.zeros(1, 1, 64, dtype=torch.bfloat16), 64, 192, 256):
        assert used
        assert all(out is not None for out in used)
    for exact, plain, fast in zip(*results, strict=True):
        assert (fast - exact).norm() <= 2 * (plain - exact).norm() + 1e-3 * exact.norm() + 1e-6


def test_activation_checkpointing_changes_no_gradient():
    gradients = []
    for saves in (False, True):
        encoder = exported.encoder(**BOTH, activation_checkpointing=saves).train()
        encoder(images()).square().mean().backward()
        gradients.append([weight.grad for weight in encoder.parameters()])
    for one, other in zip(*gradients, strict=True):
        assert torch.equal(one, other)


def test_compiled_it_is_one_graph():
    encoder = exported.encoder(**BOTH)
    compiled = torch.compile(encoder, backend="eager", fullgraph=True)
    assert torch.equal(compiled(images()), encoder(images()))


@torch.no_grad()
def test_onnx_takes_images_of_any_size(tmp_path):
    encoder = exported.encoder(**BOTH)
    write_onnx(Program(encoder, Export(format="onnx", any_size=True)).eval(), {}, tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    for size in ((32, 48), (40, 24)):
        x = images(size)
        found = session.run(None, {session.get_inputs()[0].name: x.numpy()})[0]
        assert (torch.from_numpy(found) - encoder(x)).abs().max() < 1e-4


@torch.no_grad()
def test_positions_of_another_image_size_are_timms(tmp_path):
    model = peers.of_timm(init_values=1e-5, reg_tokens=3, no_embed_class=True, dynamic_img_size=True)
    save_file(model.state_dict(), tmp_path / "timm.safetensors")
    size = (48, 40)
    encoder = loading.load_encoder(
        loading_options.LoadEncoder(path=tmp_path / "timm.safetensors", **peers.TOLD, image_size=size, resize="timm")
    )
    x = torch.rand(2, 3, *size, generator=torch.Generator().manual_seed(0))
    mean, std = (torch.tensor(value)[:, None, None] for value in peers.IMAGENET)
    assert (encoder(x) - model.forward_features((x - mean) / std)).abs().max() < 1e-5


def test_without_them_nothing_has_changed():
    encoder = exported.encoder()
    assert not any(isinstance(part, LayerScale) for part in encoder.modules())
    assert not any("scale" in name or "register" in name for name in encoder.state_dict())


def test_factors_and_registers_do_not_decay():
    encoder = ViT(vit_options.ViT(image_size=8, patch_size=4, width=8, depth=1, heads=1, **BOTH))
    named = [(name, value) for name, value in encoder.named_parameters() if "scale" in name or "register" in name]
    assert len(named) == 3
    assert [group["decays"] for group in parameter_groups(named, 0.1)] == [False]
    assert torch.equal(encoder.blocks[0].scale1.gamma, torch.full((8,), 0.3))


@pytest.mark.parametrize(("name", "value"), [("layer_scale", 0), ("layer_scale", "a"), ("registers", -1)])
def test_wrong_values_are_refused(name, value):
    with pytest.raises(OptionError, match=name):
        ViT(vit_options.ViT(image_size=8, patch_size=4, width=8, depth=1, heads=1, **{name: value}))
