"""Files of other projects: equal outputs, values from options, files or defaults, and no tensor that is lost."""

import argparse
import json
import os
import re

import numpy
import peers
import pytest
import timm
import tiny
import torch
from command import one_line
from exported import images
from safetensors.torch import load_file, save_file

from ssvit.checkpoints import manifest
from ssvit.errors import OptionError, UserError
from ssvit.exchange import files, reading
from ssvit.exchange.files import ForeignError
from ssvit.loading.finding import open_checkpoint
from ssvit.models.vit_options import ViT

LIMIT = 1e-5  # float32, tokens after the last norm


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return peers.timm_plain(tmp_path_factory.mktemp("timm"))


def rewritten(plain, folder, **changes):
    """timm's file with some tensors replaced, or removed where the value is None."""
    tensors = {**load_file(plain.path), **changes}
    save_file({name: value for name, value in tensors.items() if value is not None}, folder / "changed.safetensors")
    return folder / "changed.safetensors"


@pytest.mark.parametrize("name", peers.PEERS)
@torch.no_grad()
def test_outputs_equal_those_of_the_project(name, tmp_path):
    peer = peers.PEERS[name](tmp_path)
    encoder = tiny.loaded(peer.path, **peer.told)
    x = torch.rand(2, 3, *peer.size, generator=torch.Generator().manual_seed(0))
    mean, std = (torch.tensor(value).flatten().expand(3)[:, None, None] for value in (peer.mean, peer.std))
    expected = peer.tokens((x - mean) / std)
    assert encoder(x).shape == expected.shape
    assert expected.std() > 0.5
    assert (encoder(x) - expected).abs().max() < LIMIT
    assert encoder.arguments["heads"] == peers.HEADS
    assert encoder.arguments["mlp_width"] == encoder.blocks[0].contract.in_features


@torch.no_grad()
def test_features_of_several_class_tokens_equal_the_pooled_output_of_pixio(tmp_path):
    model = peers.hugging("PixioModel", image_size=32, n_cls_tokens=3)
    model.save_pretrained(tmp_path)
    encoder = tiny.loaded(tmp_path / "model.safetensors")
    x = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    expected = model(encoder.normalise(x)).pooler_output
    (*_, last), tokens = encoder.layers(x), encoder(x)
    for features in (encoder.represent(x), encoder.pool(tokens), encoder.pooled(encoder.norm(last), "class_token", x)):
        assert (features - expected).abs().max() < LIMIT


@pytest.mark.parametrize("name", peers.PEERS)
def test_each_layout_reports_missing_unknown_and_contradicting_values(name, tmp_path):
    peer = peers.PEERS[name](tmp_path)
    tensors = files.tensors(peer.path, list(files.shapes(peer.path)))
    bias = next(name for name in tensors if re.search(r"1\W.*(norm2|ln_2|layernorm_after|LayerNorm_2)\Wbias$", name))
    without = {name: value for name, value in tensors.items() if name != bias}
    unknown = {**tensors, f"{bias}_2": torch.ones(1)}
    end = "".join(re.split(r"(\W)", bias)[-3:])  # a name may have a prefix, which the message leaves out
    for changed, wrong in ((without, end), (unknown, f"{end}_2")):
        save_file(changed, tmp_path / "changed.safetensors")
        with pytest.raises(ForeignError, match=re.escape(wrong)):
            reading.read_foreign(tmp_path / "changed.safetensors", peer.told)
    with pytest.raises(OptionError, match="heads=5"):
        reading.read_foreign(peer.path, {**peer.told, "heads": 5})


def as_bfloat16(name, value):
    """numpy has no bfloat16 and stores JAX's as two bytes without a type."""
    return name, torch.from_numpy(value).bfloat16().view(torch.int16).numpy().view("V2")


@pytest.mark.parametrize(
    ("suffix", "change"),
    [
        ("safetensors", lambda name, value: (f"module.{name}", value)),
        ("safetensors", lambda name, value: (f"backbone.encoder.{name}", value)),
        ("safetensors", lambda name, value: (name, value.bfloat16())),
        ("npz", lambda name, value: (f"opt/target/{name}", value)),
        ("npz", as_bfloat16),
        ("npz", lambda name, value: (name, value.astype(">f4"))),
        ("npz", lambda name, value: (name, value.astype(numpy.longdouble))),
    ],
    ids=["prefix", "two prefixes", "half", "optimiser's", "JAX's bfloat16", "big-endian", "long double"],
)
def test_variants_of_a_file_contain_the_same_weights(suffix, change, tmp_path):
    rounded = {name: value.bfloat16().float() for name, value in peers.of_timm().state_dict().items()}
    if suffix == "npz":
        rounded = {n: torch.from_numpy(value).bfloat16().float().numpy() for n, value in peers.arrays().items()}
    encoders = []
    for name, state in (("usual", rounded), ("other", dict(change(*item) for item in rounded.items()))):
        path = tmp_path / f"{name}.{suffix}"
        numpy.savez(path, **state) if suffix == "npz" else save_file(state, path)
        encoders.append(reading.read_foreign(path, peers.TOLD))
    usual, other = (encoder.weights() for encoder in encoders)
    assert all(value.dtype == torch.float32 and torch.equal(value, usual[name]) for name, value in other.items())
    assert encoders[0].arguments == encoders[1].arguments


def nested(prefix, tensors):
    return {f"{prefix}{name}": value for name, value in tensors.items()}


MASK = {"mask_token": torch.ones(1, 1, 8)}
DECODER = {**MASK, "decoder_embed.weight": torch.ones(8, peers.WIDTH)}
# Files with the weights of an encoder and other weights, their options, and the normalisation of their project.
TRAINING_FILES = {
    "dinov2.pth": (lambda x, y: {"teacher": {**nested("backbone.", x | MASK), "dino_head.mlp.0.weight": MASK}}, {}, 1),
    "dino.pth": (lambda x, y: {"student": nested("module.backbone.", y), "teacher": nested("backbone.", x)}, {}, 1),
    "student.pth": (
        lambda x, y: {"student": nested("module.backbone.", x), "teacher": nested("backbone.", y), "epoch": 3},
        {"checkpoint_key": "student"}, 1,
    ),
    "mae_module.pth": (lambda x, y: {"model": nested("module.", x | DECODER)}, {}, 1),
    "mae_compiled.pth": (lambda x, y: {"model": nested("_orig_mod.", x)}, {}, 1),
    "mae_both.pth": (lambda x, y: nested("module._orig_mod.", x | DECODER), {}, 1),
    "lightning.ckpt": (lambda x, y: {"state_dict": nested("model.", x | DECODER), "global_step": 3}, {}, 1),
    "blocks.pth": (lambda x, y: {"model": peers.renamed(x, {"blocks.1.": "blocks.1._orig_mod."})}, {}, 1),
    "moco.pth.tar": (
        lambda x, y: {
            "state_dict": nested("module.base_encoder.", x | {"head.0.weight": torch.ones(8, peers.WIDTH)})
            | nested("module.momentum_encoder.", y)
        }, {}, 1,
    ),
    "ijepa.pth.tar": (
        lambda x, y: {"encoder": nested("module.", y), "target_encoder": nested("module.", x)}, {}, 1,
    ),
    "deit.pth": (lambda x, y: {"model": y, "model_ema": x, "args": argparse.Namespace(lr=1)}, {}, 1),
    "timm.pth.tar": (lambda x, y: {"state_dict": nested("module.", y), "state_dict_ema": nested("module.", x)}, {}, 0),
    "raw.pth.tar": (lambda x, y: {"state_dict": x, "state_dict_ema": y}, {"checkpoint_key": "state_dict"}, 0),
}  # fmt: skip


@pytest.mark.parametrize("name", TRAINING_FILES)
@torch.no_grad()
def test_outputs_of_training_checkpoints_equal_those_of_the_model(name, tmp_path):
    contents, options, is_imagenet = TRAINING_FILES[name]
    model, other = peers.of_timm(num_classes=0), peers.random(peers.of_timm(num_classes=0), seed=1)
    torch.save(contents(dict(model.state_dict()), dict(other.state_dict())), tmp_path / name)
    encoder = tiny.loaded(tmp_path / name, **peers.TOLD, **options)
    x = torch.rand(2, 3, *peers.SIZE, generator=torch.Generator().manual_seed(0))
    mean, std = (torch.tensor(value)[:, None, None] for value in (peers.IMAGENET if is_imagenet else [[0.5] * 3] * 2))
    assert (encoder(x) - model.forward_features((x - mean) / std)).abs().max() < LIMIT


@pytest.mark.parametrize("name", ["huggingface_mae", "timm_dinov3", "dinov3", "torchvision_plain", "pixio", "deit"])
def test_a_wrapped_model_has_the_weights_and_the_options_of_the_model(name, tmp_path):
    peer = peers.PEERS[name](tmp_path)
    tensors = files.tensors(peer.path, list(files.shapes(peer.path)))
    wrapped = peer.path.with_name("wrapped.safetensors")
    save_file(nested("_orig_mod.module.", tensors), wrapped)
    usual, other = (reading.read_foreign(path, peer.told) for path in (peer.path, wrapped))
    assert other.arguments == usual.arguments
    weights = other.weights()
    assert all(torch.equal(value, weights[key]) for key, value in usual.weights().items())


@pytest.mark.parametrize("key", ["epoch", "eacher"])
def test_a_key_without_an_encoder_is_named(key, plain, tmp_path):
    path = tmp_path / "dino.pth"
    torch.save({"teacher": load_file(plain.path), "epoch": 3}, path)
    with pytest.raises(OptionError, match=f"checkpoint_key={key}: .*teacher"):
        reading.read_foreign(path, {**plain.told, "checkpoint_key": key})


def test_shapes_are_read_from_the_headers(plain, tmp_path):
    tensors = load_file(plain.path)
    assert files.shapes(plain.path) == {name: tuple(value.shape) for name, value in tensors.items()}
    arrays = peers.arrays() | {"fortran": numpy.asfortranarray(numpy.ones((2, 3))), "scalar": numpy.float32(1)}
    for save in (numpy.savez, numpy.savez_compressed):
        save(tmp_path / "arrays.npz", **arrays)
        assert files.shapes(tmp_path / "arrays.npz") == {name: value.shape for name, value in arrays.items()}


def test_defaults_sizes_and_ignored_tensors_are_printed(tmp_path, capsys):
    model = peers.of_timm(img_size=64, patch_size=16, embed_dim=192, num_heads=3)
    save_file({f"module.{n}": value for n, value in model.state_dict().items()}, tmp_path / "tiny.safetensors")
    encoder = tiny.loaded(tmp_path / "tiny.safetensors", announce=True, image_size=[32, 48])
    assert (encoder.arguments["heads"], encoder.image_size) == (3, (32, 48))
    printed = capsys.readouterr().out
    for part in ("32 of 32", "4x4", "2x3", "timm", "64x64", "heads 3", "mean 0.5", "head.weight"):
        assert part in printed


@pytest.mark.parametrize("name", ["vit_base_patch16_gap_224", "vit_base_patch32_siglip_gap_256"])
@torch.no_grad()
def test_what_timm_defines_in_its_code_alone_is_known(name, tmp_path):
    model = peers.random(timm.create_model(name, depth=1, num_classes=0, img_size=64))
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"architecture": name, "model_args": {"img_size": 64}}))
    encoder = tiny.loaded(tmp_path / "model.safetensors", image_mean=0.5, image_std=0.5)
    x = torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    assert (encoder(x) - model.forward_features(2 * x - 1)).abs().max() < LIMIT


def test_positions_are_resized_as_between_encoders_of_ssvit(plain):
    trained = tiny.loaded(plain.path, **plain.told)
    expected = ViT(**{**trained.arguments, "image_size": [48, 64]}).build()
    expected.load_weights_from(trained, how="paper")
    resized = tiny.loaded(plain.path, image_size=[48, 64], **plain.told)
    assert torch.equal(resized.positions[0].embedding, expected.positions[0].embedding)


@torch.no_grad()
def test_positions_of_another_image_size_are_timms(tmp_path):
    model = peers.of_timm(init_values=1e-5, reg_tokens=3, no_embed_class=True, dynamic_img_size=True)
    save_file(model.state_dict(), tmp_path / "timm.safetensors")
    size = (48, 40)
    encoder = tiny.loaded(tmp_path / "timm.safetensors", **peers.TOLD, image_size=size, resize="timm")
    x = torch.rand(2, 3, *size, generator=torch.Generator().manual_seed(0))
    mean, std = (torch.tensor(value)[:, None, None] for value in peers.IMAGENET)
    assert (encoder(x) - model.forward_features((x - mean) / std)).abs().max() < 1e-5


def test_options_precede_neighbouring_files_and_these_precede_defaults(tmp_path):
    peer = peers.huggingface(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(
        json.dumps({"image_mean": [0.1, 0.2, 0.3], "image_std": [0.2] * 3})
    )
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"layer_norm_eps": 1e-12}))
    arguments = reading.read_foreign(peer.path, {"mean": 0.25}).arguments
    assert (arguments["mean"], arguments["std"], arguments["norm_epsilon"]) == (0.25, [0.2] * 3, 1e-12)
    assert (arguments["heads"], tuple(arguments["image_size"])) == (peers.HEADS, peers.SIZE)


def test_images_of_a_model_without_normalisation_are_not_normalised(tmp_path):
    peer = peers.huggingface(tmp_path)
    described = {"do_normalize": False, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(described))
    arguments = reading.read_foreign(peer.path, {}).arguments
    assert (arguments["mean"], arguments["std"]) == (0, 1)


def test_the_encoder_of_a_model_with_a_decoder_is_read(tmp_path):
    peer = peers.huggingface(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    expected = tiny.loaded(peer.path)(images(peer.size))
    tensors = {
        name.replace("vit.", "encoder."): tensor for name, tensor in load_file(peer.path).items() if "vit." in name
    }
    save_file(tensors | {"decoder.weight": torch.zeros(3)}, tmp_path / "model.safetensors")
    both = {"model_type": "vision-encoder-decoder", "encoder": config, "decoder": {}}
    (tmp_path / "config.json").write_text(json.dumps(both))
    assert torch.equal(tiny.loaded(peer.path)(images(peer.size)), expected)


def test_a_file_is_read_once_until_it_or_an_option_changes(plain, tmp_path, monkeypatch):
    path, digests = rewritten(plain, tmp_path), []
    digest = files.digest
    monkeypatch.setattr(files, "digest", lambda path: digests.append(path) or digest(path))
    first = open_checkpoint(path, plain.told)
    assert open_checkpoint(str(path), plain.told) == first
    tiny.loaded(path, **plain.told)
    assert digests == [path]
    assert open_checkpoint(path, plain.told | {"mean": 0.3}).checksum != first.checksum
    tensors = load_file(path)
    save_file({**tensors, "cls_token": tensors["cls_token"] + 1}, path)
    os.utime(path, ns=(0, 0))
    assert open_checkpoint(path, plain.told).checksum != first.checksum


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"pos_embed": None}, "pos_embed"),
        ({"blocks.0.ls1.gamma": torch.ones(48)}, "blocks.0.ls2.gamma, blocks.1.ls1.gamma"),
        ({"reg_tokens": torch.ones(1, 4, 48), "norm_pre.bias": torch.ones(3)}, "norm_pre.bias, reg_tok"),
        ({"blocks.3.norm1.weight": torch.ones(48)}, "blocks.2.attn.proj.bias, .* more"),
        ({"blocks.999999999.norm1.weight": torch.ones(48)}, "blocks.2.attn.proj.bias, .* more"),
        ({"other.patch_embed.proj.weight": torch.ones(48, 3, 8, 8)}, r"^checkpoint_key=null: .*\b2\b.*\bother\b"),
        ({"patch_embed.proj.weight": None}, r"changed\.safetensors: "),
        ({"patch_embed.proj.weight": torch.ones(48, 192)}, r"changed\.safetensors: "),
        ({"norm.weight": torch.full((48,), torch.nan)}, "norm.weight"),
        ({"norm.weight": torch.ones(48, dtype=torch.int64)}, "norm.weight"),
        ({"norm.weight": torch.full((48,), 1e300, dtype=torch.float64)}, "norm.weight"),
        ({"blocks.0.norm1.bias": torch.ones(47)}, "blocks.0.norm1.bias: .*47.*48"),
    ],
)  # fmt: skip
def test_a_file_that_fits_no_encoder_is_rejected_in_one_line(changes, named, plain, tmp_path):
    with pytest.raises(UserError, match=named) as caught:
        tiny.loaded(rewritten(plain, tmp_path, **changes), **plain.told)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({}, "heads=null: "),
        ({"heads": 5, "trained_size": [32, 56]}, "heads=5: "),
        ({"heads": 4}, "trained_size=null: "),
        ({"heads": 4, "trained_size": [48, 48]}, "trained_size=[48,48]: "),
        ({"heads": 4, "trained_size": [32, 50]}, "patch_size=[8,8]: "),
        ({**peers.TOLD, "mean": [0.5, 0.5]}, "mean="),
    ],
)
def test_a_required_or_wrong_option_is_named(options, named, plain, tmp_path):
    with pytest.raises(OptionError, match=re.escape(named)):
        reading.read_foreign(rewritten(plain, tmp_path), options)


def test_commands_validate_a_file_before_torch_is_imported(tool, plain, tmp_path, no_torch):
    (tmp_path / "weights.txt").touch()
    heads, size = "encoder.heads=4", "encoder.trained_size=[32,56]"
    for options, named in (
        ([f"checkpoint={plain.path}"], "encoder.heads=null: "),
        ([f"checkpoint={plain.path}", heads], "encoder.trained_size=null: "),
        ([f"checkpoint={plain.path}", heads, size, "batch_size=0"], "batch_size=0: "),
        (["checkpoint=weights.txt"], "checkpoint=weights.txt: "),
    ):
        done = tool("knn", *options, "data=shapes", "data.image_size=16", status=2, PYTHONPATH=no_torch)
        assert one_line(done).startswith(f"ssvit: {named}")


@pytest.mark.slow
def test_a_foreign_file_is_fine_tuned(tool, plain, tmp_path):
    tool(
        "finetune", f"checkpoint={plain.path}", "encoder.heads=4", "encoder.trained_size=[32,56]", "data=shapes",
        "data.images=64", "data.held_out_images=32", "data.image_size=16", "recipe.steps=2", "recipe.warmup=1",
        "recipe.batch_size=8", "recipe.precision=32-true", "launch.accelerator=cpu",
    )  # fmt: skip
    facts = manifest.read_manifest(tmp_path / "outputs" / "finetune_timm_shapes" / "step_00000002")
    assert facts["encoder"]["heads"] == 4
    assert facts["encoder"]["image_size"] == 16
