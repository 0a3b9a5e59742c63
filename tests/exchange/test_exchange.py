"""Foreign files: outputs are the peer's, what is not told is found or asked for, what has no place is refused."""

import json
import os
import re

import exported
import numpy
import peers
import pytest
import timm
import torch
from command import one_line
from safetensors.torch import load_file, save_file

from ssvit.checkpoints import manifest
from ssvit.exchange import files, reading, writing
from ssvit.exchange.files import ForeignError
from ssvit.exchange.timm import TIMM
from ssvit.loading import encoder as loading
from ssvit.loading import encoder_options as loading_options
from ssvit.loading.finding import open_checkpoint
from ssvit.models import vit_options
from ssvit.models.vit import ViT
from ssvit.models.vit_options import EPSILONS
from ssvit.options import OptionError, UserError

LIMIT = 1e-5  # float32, tokens after the last norm


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return peers.timm_plain(tmp_path_factory.mktemp("timm"))


def rewritten(plain, folder, **changes):
    """timm's file with some tensors replaced, or taken out where None stands."""
    tensors = {**load_file(plain.path), **changes}
    save_file({name: value for name, value in tensors.items() if value is not None}, folder / "changed.safetensors")
    return folder / "changed.safetensors"


def images(peer, seed=0):
    """Images in [0, 1] of the size that the file is for, and the same less mean, over std."""
    x = torch.rand(2, 3, *peer.size, generator=torch.Generator().manual_seed(seed))
    mean, std = (torch.tensor(value).flatten().expand(3)[:, None, None] for value in (peer.mean, peer.std))
    return x, (x - mean) / std


@pytest.mark.parametrize("name", peers.PEERS)
@torch.no_grad()
def test_outputs_are_the_peers(name, tmp_path):
    peer = peers.PEERS[name](tmp_path)
    encoder = loading.load_encoder(loading_options.LoadEncoder(path=peer.path, **peer.told))
    x, normalised = images(peer)
    expected = peer.tokens(normalised)
    assert encoder(x).shape == expected.shape
    assert expected.std() > 0.5
    assert (encoder(x) - expected).abs().max() < LIMIT
    assert encoder.arguments["heads"] == peers.HEADS
    assert encoder.arguments["mlp_width"] == encoder.blocks[0].contract.in_features


@pytest.mark.parametrize(("name", "epsilons"), [("google_hybrid", "authors"), ("timm_hybrid", "timm")])
def test_a_stem_has_the_epsilons_of_its_framework(name, epsilons, tmp_path):
    peer = peers.PEERS[name](tmp_path)
    stem = reading.read(peer.path, peer.told).arguments["stem"]
    assert stem == {"layers": [2, 1], "width": 32, "epsilons": epsilons}


@pytest.mark.parametrize(
    ("name", "patch"),
    [("vit_tiny_r_s16_p8_224", 32), pytest.param("vit_base_r50_s16_224", 16, marks=pytest.mark.slow)],
)
@torch.no_grad()
def test_timms_hybrids_are_exact_both_ways(name, patch, tmp_path):
    size = (10 * patch, 7 * patch)
    model = peers.random(timm.create_model(name, img_size=size, num_classes=0))
    save_file(model.state_dict(), tmp_path / "hybrid.safetensors")
    peer = peers.Peer(tmp_path / "hybrid.safetensors", model.forward_features, {"trained_size": list(size)}, size=size)
    encoder = loading.load_encoder(loading_options.LoadEncoder(path=peer.path, **peer.told))
    x, normalised = images(peer)
    expected = peer.tokens(normalised)
    assert (encoder(x) - expected).abs().max() < LIMIT
    folder, said = exported.written(encoder, tmp_path, "timm")
    assert not any("differ" in line for line in said)
    assert torch.equal(timm.create_model(f"local-dir:{folder}", pretrained=True).forward_features(normalised), expected)


@torch.no_grad()
def test_a_hybrid_of_ours_is_timms(tmp_path):
    stem = {"layers": [2, 1], "width": 32, "epsilons": "timm"}
    ours = exported.encoder(image_size=peers.SIZE, stem=stem)
    theirs = peers.hybrid_of_timm()
    theirs.load_state_dict(theirs.state_dict() | writing.tensors(TIMM, ours))
    x = exported.images(peers.SIZE)
    expected = theirs.forward_features(ours.normalise(x))
    assert (ours(x) - expected).abs().max() < LIMIT
    other = ViT(vit_options.ViT(**{**ours.arguments, "stem": {**stem, "epsilons": "authors"}}))
    other.load_state_dict(ours.state_dict())
    assert (other(x) - expected).abs().max() > LIMIT


@pytest.mark.parametrize("epsilons", EPSILONS)
def test_only_the_authors_stem_is_said_to_differ_in_timm(epsilons, tmp_path):
    stem = {"layers": [], "width": 64, "epsilons": epsilons}
    _, said = exported.written(exported.encoder(stem=stem), tmp_path, "timm")
    assert any("outputs differ" in line for line in said) == (epsilons == "authors")


def linen(name):
    """A tensor's name in the authors' code since flax.linen, of its name in their first files."""
    for before, today in (("MultiHeadDotProductAttention_1", "MultiHeadDotProductAttention_0"),
                          ("LayerNorm_2", "LayerNorm_1"), ("MlpBlock_3", "MlpBlock_0")):  # fmt: skip
        name = name.replace(before, today)
    return name


def as_bfloat16(name, value):
    """numpy, which does not know JAX's bfloat16, stores it as two bytes of no type."""
    return name, torch.from_numpy(value).bfloat16().view(torch.int16).numpy().view("V2")


@pytest.mark.parametrize(
    ("suffix", "change"),
    [
        ("safetensors", lambda name, value: (f"module.{name}", value)),
        ("safetensors", lambda name, value: (f"backbone.encoder.{name}", value)),
        ("safetensors", lambda name, value: (name, value.bfloat16())),
        ("npz", lambda name, value: (f"opt/target/{name}", value)),
        ("npz", lambda name, value: (linen(name), value)),
        ("npz", as_bfloat16),
        ("npz", lambda name, value: (name, value.astype(">f4"))),
        ("npz", lambda name, value: (name, value.astype(numpy.longdouble))),
    ],
    ids=["prefix", "two prefixes", "half", "optimiser's", "of today", "JAX's bfloat16", "big-endian", "long double"],
)
def test_variants_of_a_file_hold_the_same_weights(suffix, change, tmp_path):
    rounded = {name: value.bfloat16().float() for name, value in peers.of_timm().state_dict().items()}
    if suffix == "npz":
        rounded = {n: torch.from_numpy(value).bfloat16().float().numpy() for n, value in peers.arrays().items()}
    found = []
    for name, state in (("usual", rounded), ("other", dict(change(*item) for item in rounded.items()))):
        path = tmp_path / f"{name}.{suffix}"
        numpy.savez(path, **state) if suffix == "npz" else save_file(state, path)
        found.append(reading.read(path, peers.TOLD))
    usual, other = (file.weights() for file in found)
    assert all(value.dtype == torch.float32 and torch.equal(value, usual[name]) for name, value in other.items())
    assert found[0].arguments == found[1].arguments


def test_torchvisions_older_names_are_the_same(tmp_path):
    (tmp_path / "old").mkdir()
    new, old = peers.torchvision_plain(tmp_path), peers.torchvision_plain(tmp_path / "old", old=True)
    states = [reading.read(peer.path, peer.told).weights() for peer in (new, old)]
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


def test_what_is_beside_the_encoder_is_left_behind(plain, tmp_path):
    tensors = {f"module.{name}": value for name, value in load_file(plain.path).items()} | {"queue": torch.ones(3)}
    save_file(tensors, tmp_path / "prefixed.safetensors")
    assert "left behind: head, queue" in reading.read(tmp_path / "prefixed.safetensors", plain.told).notes


def test_headers_tell_the_shapes(plain, tmp_path):
    tensors = load_file(plain.path)
    assert files.shapes(plain.path) == {name: tuple(value.shape) for name, value in tensors.items()}
    arrays = peers.arrays(layers=(1,)) | {
        "fortran": numpy.asfortranarray(numpy.ones((2, 3))),
        "scalar": numpy.float32(1),
    }
    for save in (numpy.savez, numpy.savez_compressed):
        save(tmp_path / "arrays.npz", **arrays)
        assert files.shapes(tmp_path / "arrays.npz") == {name: value.shape for name, value in arrays.items()}


def test_what_is_usual_is_taken_and_said(tmp_path, capsys):
    model = peers.of_timm(img_size=64, patch_size=16, embed_dim=192, num_heads=3)
    save_file(model.state_dict(), tmp_path / "tiny.safetensors")
    encoder = loading.load_encoder(
        loading_options.LoadEncoder(path=tmp_path / "tiny.safetensors", announce=True, image_size=[32, 48])
    )
    assert (encoder.arguments["heads"], encoder.image_size) == (3, (32, 48))
    said = capsys.readouterr().out
    for part in ("loaded 32 of 32", "from 4x4 to 2x3", "timm's layout", "64x64", "heads 3 as usual",
                 "mean 0.5 as usual", "left behind: head"):  # fmt: skip
        assert part in said


def test_positions_are_resized_as_between_encoders_of_ours(plain):
    trained = loading.load_encoder(loading_options.LoadEncoder(path=plain.path, **plain.told))
    for how in ("paper", "timm"):
        right = ViT(vit_options.ViT(**{**trained.arguments, "image_size": [48, 64]}))
        right.take(trained, how=how)
        found = loading.load_encoder(
            loading_options.LoadEncoder(path=plain.path, resize=how, image_size=[48, 64], **plain.told)
        )
        assert torch.equal(found.positions[0].embedding, right.positions[0].embedding)


def test_what_is_told_comes_before_what_the_files_beside_tell(tmp_path):
    peer = peers.huggingface(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(
        json.dumps({"image_mean": [0.1, 0.2, 0.3], "image_std": [0.2] * 3})
    )
    found = reading.read(peer.path, {"mean": 0.25})
    assert (found.arguments["mean"], found.arguments["std"]) == (0.25, [0.2] * 3)
    assert found.arguments["image_size"] == list(peers.SIZE)
    assert {"mean 0.25 as told", "heads 4 as it says"} <= set(found.notes)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"layer_norm_eps": 1e-12}))
    assert any("1e-12" in note for note in reading.read(peer.path, {}).notes)
    (tmp_path / "config.json").write_text(json.dumps(config | {"hidden_act": "quick_gelu"}))
    with pytest.raises(UserError, match="quick_gelu"):
        reading.read(peer.path, {})


def test_another_told_value_is_another_checkpoint(plain):
    seals = {open_checkpoint(plain.path, plain.told | {"mean": mean}).checksum for mean in (None, 0.3, 0.4)}
    assert len(seals) == 3


def test_a_foreign_file_is_read_once_as_long_as_it_does_not_change(plain, tmp_path, monkeypatch):
    path, digests = rewritten(plain, tmp_path), []
    digest = files.digest
    monkeypatch.setattr(files, "digest", lambda path: digests.append(path) or digest(path))
    first = open_checkpoint(path, plain.told)
    assert open_checkpoint(str(path), plain.told) == first
    assert (
        len(loading.load_encoder(loading_options.LoadEncoder(path=path, **plain.told)).blocks) == first.encoder["depth"]
    )
    assert digests == [path]
    tensors = load_file(path)
    save_file({**tensors, "cls_token": tensors["cls_token"] + 1}, path)
    os.utime(path, ns=(0, 0))
    assert open_checkpoint(path, plain.told).checksum != first.checksum


@pytest.mark.parametrize("name", peers.PEERS)
def test_every_format_names_what_is_missing_in_surplus_or_told_wrongly(name, tmp_path):
    peer = peers.PEERS[name](tmp_path)
    encoder = reading.read(peer.path, peer.told)
    bias = next(encoder.names[place.theirs[0]] for place in encoder.places if place.ours == "blocks.1.norm2.bias")
    tensors = files.tensors(peer.path, list(files.shapes(peer.path)))
    without = {name: value for name, value in tensors.items() if name != bias}
    for changed, wrong in ((without, bias), ({**tensors, f"{bias}_2": torch.ones(1)}, f"{bias}_2")):
        save_file(changed, tmp_path / "changed.safetensors")
        with pytest.raises(ForeignError) as refused:
            reading.read(tmp_path / "changed.safetensors", peer.told)
        assert re.split(r"[./]", wrong)[-1] in str(refused.value)
    with pytest.raises(OptionError, match="heads=5"):
        reading.read(peer.path, {**peer.told, "heads": 5})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"blocks.1.attn.qkv.bias": None}, "wants blocks.1.attn.qkv.bias"),
        ({"pos_embed": None}, "wants pos_embed"),
        ({"blocks.0.ls1.gamma": torch.ones(48)}, "wants blocks.0.ls2.gamma, blocks.1.ls1.gamma"),
        ({"reg_tokens": torch.ones(1, 4, 48), "norm_pre.bias": torch.ones(3)}, "no place for norm_pre.bias, reg_tok"),
        ({"blocks.3.norm1.weight": torch.ones(48)}, "wants blocks.2.attn.proj.bias, .* more"),
        ({"blocks.999999999.norm1.weight": torch.ones(48)}, "wants blocks.2.attn.proj.bias, .* more"),
        ({"teacher.patch_embed.proj.weight": torch.ones(48, 3, 8, 8)}, "holds 2 encoders"),
        ({"patch_embed.proj.weight": None}, "in none of the layouts .* begins with"),
        ({"patch_embed.proj.weight": torch.ones(48, 192)}, "other shapes"),
        ({"norm.weight": torch.full((48,), torch.nan)}, "norm.weight is not made of finite numbers"),
        ({"norm.weight": torch.ones(48, dtype=torch.int64)}, "norm.weight is not made of finite numbers"),
        ({"blocks.0.norm1.bias": torch.ones(47)}, "blocks.0.norm1.bias of 47, and the others need 48"),
    ],
)  # fmt: skip
def test_what_has_no_place_is_refused_in_one_line(changes, said, plain, tmp_path):
    with pytest.raises(UserError, match=said) as caught:
        loading.load_encoder(loading_options.LoadEncoder(path=rewritten(plain, tmp_path, **changes), **plain.told))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({}, "heads=null: an encoder of width 48 may have any"),
        ({"heads": 5, "trained_size": [32, 56]}, "heads=5: must divide width=48"),
        ({"heads": 4}, "trained_size=null: changed.safetensors has 29 positions"),
        ({"heads": 4, "trained_size": [48, 48]}, "is 6x6 patches"),
        ({"heads": 4, "trained_size": [32, 50]}, "must divide"),
        ({**peers.TOLD, "mean": [0.5, 0.5]}, "mean="),
    ],
)
def test_what_must_be_told_is_asked_for(told, said, plain, tmp_path):
    with pytest.raises(OptionError, match=re.escape(said)):
        reading.read(rewritten(plain, tmp_path), told)


class Harm:
    """Unpickled, it would leave a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (self.path, "w"))


def test_nothing_loaded_runs_code(tmp_path):
    trace = tmp_path / "trace"
    torch.save({"model": Harm(str(trace))}, tmp_path / "harm.pth")
    numpy.savez(tmp_path / "harm.npz", **{**peers.arrays(), "cls": numpy.array([Harm(str(trace))], dtype=object)})
    for name in ("harm.pth", "harm.npz"):
        with pytest.raises(ForeignError):
            reading.read(tmp_path / name, peers.TOLD)
    assert not trace.exists()


@pytest.mark.parametrize("suffix", [".safetensors", ".npz", ".pth"])
def test_damage_is_told_in_one_line(suffix, tmp_path):
    path = tmp_path / f"weights{suffix}"
    for content in (b"", b"nonsense" * 100, b"\xff" * 8 + b"{}", (10).to_bytes(8, "little") + b"[1, 2, 3] "):
        path.write_bytes(content)
        with pytest.raises(ForeignError, match=re.escape(str(path))) as caught:
            reading.read(path, {})
        assert "\n" not in str(caught.value)


def test_tools_take_a_file_and_ask_before_torch_is_loaded(tool, plain, tmp_path, no_torch):
    asked = (f"checkpoint={plain.path}", "data=synthetic", "data.image_size=16")
    line = one_line(tool("knn", *asked, status=2, PYTHONPATH=no_torch))
    assert line == "ssvit: encoder.heads=null: an encoder of width 48 may have any; how many has timm.safetensors?"
    line = one_line(tool("knn", *asked, "encoder.heads=4", status=2, PYTHONPATH=no_torch))
    assert line.startswith("ssvit: encoder.trained_size=null: ")
    told = ("encoder.heads=4", "encoder.trained_size=[32,56]")
    line = one_line(tool("knn", *asked, *told, "batch_size=0", status=2, PYTHONPATH=no_torch))
    assert line.startswith("ssvit: batch_size=0")
    (tmp_path / "weights.txt").touch()
    line = one_line(tool("knn", "checkpoint=weights.txt", "data=synthetic", status=2, PYTHONPATH=no_torch))
    assert "ends in .safetensors, .npz" in line


@pytest.mark.slow
def test_a_foreign_file_is_fine_tuned(tool, plain, tmp_path):
    done = tool(
        "finetune", f"checkpoint={plain.path}", "encoder.heads=4", "encoder.trained_size=[32,56]", "data=synthetic",
        "data.images=64", "data.held_out_images=32", "data.image_size=16", "recipe.steps=2", "recipe.warmup=1",
        "recipe.batch_size=8", "recipe.precision=32-true", "fabric.accelerator=cpu",
    )  # fmt: skip
    assert "left behind: head" in done.stdout
    facts = manifest.read(tmp_path / "outputs" / "finetune_timm_synthetic" / "step_00000002")
    assert facts["encoder"]["heads"] == 4
    assert facts["encoder"]["image_size"] == 16


def test_one_tensor_by_two_names_is_refused(tmp_path):
    arrays = peers.arrays()
    name = "Transformer/encoderblock_0/LayerNorm_2/scale"
    numpy.savez(tmp_path / "both.npz", **arrays, **{linen(name): arrays[name]})
    with pytest.raises(ForeignError, match="holds under two names"):
        reading.read(tmp_path / "both.npz", peers.TOLD)


@pytest.mark.parametrize("place", ["", "Transformer/"])
@torch.no_grad()
def test_big_visions_plain_vits_are_read(place, tmp_path):
    """Its positions stand at the top (before 2022 in the Transformer), and the class token comes after them."""
    first = peers.arrays()
    positions = first.pop("Transformer/posembed_input/pos_embedding")
    arrays = {linen(name): value for name, value in first.items()} | {f"{place}pos_embedding": positions[:, 1:]}
    numpy.savez(tmp_path / "first.npz", **first, **{"Transformer/posembed_input/pos_embedding": positions})
    numpy.savez(tmp_path / "big_vision.npz", **{f"params/{name}": value for name, value in arrays.items()})
    whole = loading.load_encoder(loading_options.LoadEncoder(path=tmp_path / "first.npz", **peers.TOLD))
    found = loading.load_encoder(loading_options.LoadEncoder(path=tmp_path / "big_vision.npz", **peers.TOLD))
    whole.positions[0].embedding[0] = 0
    x, _ = images(peers.Peer(tmp_path, whole))
    assert torch.equal(found(x), whole(x))


def test_an_image_tower_is_read_without_its_pooling_head(tmp_path):
    arrays = {linen(name): value for name, value in peers.arrays().items()}
    arrays = {name: value for name, value in arrays.items() if not re.match("cls|head|pre_logits", name)}
    arrays["pos_embedding"] = arrays.pop("Transformer/posembed_input/pos_embedding")[:, 1:]
    arrays |= {"MAPHead_0/probe": numpy.ones((1, 1, 48)), "MAPHead_0/LayerNorm_0/scale": numpy.ones(48)}
    text = {"params/txt/Embed_0/embedding": numpy.ones((9, 48)), "params/t": numpy.ones(1)}
    named = {f"params/img/{name}": value.astype(numpy.float32) for name, value in arrays.items()}
    numpy.savez(tmp_path / "towers.npz", **named, **text)
    found = reading.read(tmp_path / "towers.npz", peers.TOLD)
    assert (found.arguments["class_token"], found.arguments["pooling"]) == (False, "patch_mean")
    assert "left behind: MAPHead_0, t, txt" in found.notes
    assert any("what MAPHead_0 makes of" in note for note in found.notes)
    found.weights()


def test_a_layer_behind_the_representation_is_told(tmp_path):
    numpy.savez(tmp_path / "with.npz", **peers.arrays())
    numpy.savez(tmp_path / "without.npz", **{n: v for n, v in peers.arrays().items() if not n.startswith("pre_")})
    told = {}
    for name in ("with", "without"):
        found = reading.read(tmp_path / f"{name}.npz", peers.TOLD)
        assert found.arguments["pooling"] == "class_token"
        told[name] = [note for note in found.notes if "representation" in note]
    assert told["without"] == []
    assert "pre_logits" in told["with"][0]
