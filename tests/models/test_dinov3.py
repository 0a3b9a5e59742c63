"""Rotary positions and SwiGLU, as DINOv3 and DINOv2's giant have them: equations, files, a command."""

import json

import peers
import pytest
import tiny
import torch
from command import TINY, tiny_options
from exported import images
from safetensors.torch import load_file, save_file
from torch import nn

from ssvit.exchange import reading
from ssvit.exchange.files import ForeignError
from ssvit.models.positions import Rotary, rotate
from ssvit.models.vit_options import ViT

ROTARY = {"positions": "rotary", "registers": 3, "layer_scale": 0.3, "norm_epsilon": 1e-5}
BOTH = {**ROTARY, "mlp": "swiglu"}
SHORT = tiny_options("data", "encoder", "target")


def test_products_of_turned_queries_and_keys_tell_offsets_alone():
    rotary, grid = Rotary(8).double(), (4, 4)
    query, key = torch.randn(2, 8, dtype=torch.float64)
    rotation = rotary(grid, 1)
    logits = rotate(query.expand(1, 1, 17, 8), rotation) @ rotate(key.expand(1, 1, 17, 8), rotation).mT
    patches = logits[0, 0, 1:, 1:].reshape(4, 4, 4, 4)
    torch.testing.assert_close(patches[0, 0, 2, 1], patches[1, 2, 3, 3])
    assert (patches[0, 0, 2, 1] - patches[0, 0, 1, 2]).abs() > 1e-3
    torch.testing.assert_close(logits[0, 0, 0, 0], query @ key)  # prefix tokens are not turned
    assert torch.equal(rotate(query.expand(1, 1, 17, 8), rotation)[0, 0, 0], query)


NAMES = [name for name in peers.PEERS if "dinov3" in name]


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_files_are_of_images_of_any_size(name, tmp_path, capsys):
    peer = peers.PEERS[name](tmp_path)
    encoder = tiny.loaded(peer.path, **peer.told, announce=True)
    other = tiny.loaded(peer.path, **peer.told, image_size=[48, 40])
    mean, std = (torch.tensor(value)[:, None, None] for value in peers.IMAGENET)
    for size in (peer.size, (48, 40), (16, 64)):
        x = images(size)
        expected = peer.tokens((x - mean) / std)
        assert (encoder(x) - expected).abs().max() < 1e-5
        assert torch.equal(other(x), encoder(x))
    assert encoder.arguments["norm_epsilon"] == 1e-5
    assert encoder.arguments["mlp"] == ("swiglu" if "swiglu" in name else "gelu")
    for block in encoder.blocks:
        assert not block.attention.qkv.bias.chunk(3)[1].any()
    told = capsys.readouterr().out
    assert "DINOv3" in told
    assert "positions" not in told


@torch.no_grad()
def test_a_file_without_registers_has_an_empty_tensor(tmp_path):
    peer = peers.hugged(tmp_path, peers.hugging("DINOv3ViTModel", num_register_tokens=0), *peers.IMAGENET)
    assert 0 in load_file(peer.path)["embeddings.register_tokens"].shape
    mean, std = (torch.tensor(value)[:, None, None] for value in peers.IMAGENET)
    x = images(peer.size)
    encoder = tiny.loaded(peer.path, **peer.told)
    assert (encoder(x) - peer.tokens((x - mean) / std)).abs().max() < 1e-5


def test_the_periods_are_the_files(tmp_path):
    ours = Rotary(12).periods
    for name, periods in (("dinov3", ours.bfloat16().float()), ("timm_dinov3", ours)):
        peer = peers.PEERS[name](tmp_path)
        assert torch.equal(reading.read_foreign(peer.path, peer.told).weights()["encoder.rotary.periods"], periods)


@pytest.mark.parametrize("arguments", [{"model_args": {"global_pool": "avg"}}, {"global_pool": "avg"}])
def test_the_pooling_is_that_of_timms_configuration(tmp_path, arguments):
    peer = peers.timm_dinov3(tmp_path)
    (peer.path.parent / "config.json").write_text(json.dumps({"architecture": "vit_small_patch16_dinov3"} | arguments))
    assert reading.read_foreign(peer.path, peer.told).arguments["pooling"] == "patch_mean"


def test_files_of_others_are_refused(tmp_path):
    """timm's Eva with other rotary positions has no registers; one with more tensors is none of DINOv3's."""
    peers.timm_dinov3(tmp_path)
    tensors = load_file(tmp_path / "timm.safetensors")
    for changes, said in (
        ({"reg_token": None}, "timm's layout: "),
        ({"blocks.0.attn.q_norm.weight": torch.ones(12)}, "blocks.0.attn.q_norm.weight"),
        ({"blocks.1.gamma_2": None}, "DINOv3.*: blocks.1.gamma_2"),
        ({"blocks.0.attn.q_bias": torch.ones(48)}, "blocks.0.attn.q_bias"),
    ):
        changed = {name: value for name, value in (tensors | changes).items() if value is not None}
        save_file(changed, tmp_path / "changed.safetensors")
        with pytest.raises(ForeignError, match=said):
            reading.read_foreign(tmp_path / "changed.safetensors", peers.TOLD)


def test_swiglu_has_as_many_weights_by_default_and_begins_as_three_matrices():
    for width, hidden in ((384, 1024), (1536, 4096), (192, 512), (60, 160)):
        with torch.device("meta"):
            encoder = ViT(image_size=8, patch_size=4, width=width, depth=1, heads=1, mlp="swiglu").build()
        assert encoder.blocks[0].contract.in_features == hidden
        assert encoder.architecture["mlp_width"] == hidden
    encoder = ViT(image_size=8, patch_size=4, width=96, depth=1, heads=1, mlp="swiglu").build()
    limit = (6 / (96 + 256)) ** 0.5  # Xavier's, of one matrix
    for matrix in encoder.blocks[0].expand.weight.chunk(2):
        assert 0.98 * limit < matrix.abs().max() <= limit


def test_pretraining_goes_on_from_it(tool, tmp_path):
    peer = peers.PEERS["huggingface_dinov3_swiglu"](tmp_path)
    given = (*TINY[:3], "data.image_size=[32,32]", *SHORT, "objective=mae", "probes=[]", "continuation=null")
    done = tool("pretrain", *given, f"checkpoint={peer.path}", "name=further", "recipe.steps=2", "recipe.warmup=1")
    assert "DINOv3" in done.stdout
    begun = tiny.loaded(peer.path, image_size=[32, 32])
    trained = tiny.loaded(tmp_path / "outputs" / "further", image_size=[32, 32])
    assert trained.arguments["positions"] == "rotary"
    assert torch.equal(trained.rotary.periods, begun.rotary.periods)
    assert not torch.equal(trained.blocks[0].expand.weight, begun.blocks[0].expand.weight)
    assert isinstance(trained.norm, nn.LayerNorm)
