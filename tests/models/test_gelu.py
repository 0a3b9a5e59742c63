"""GELU by tanh: the authors' checkpoints by a plain float64 reference of their code, and where the option goes."""

import json

import exported
import numpy
import peers
import pytest
import timm
import torch
import transformers
from safetensors.torch import save_file
from scipy.special import erf

from ssvit.exchange import reading
from ssvit.loading import encoder as loading
from ssvit.loading import encoder_options as loading_options
from ssvit.loading.finding import open_checkpoint
from ssvit.models import vit_options
from ssvit.models.block import Block
from ssvit.models.vit import ViT
from ssvit.objectives.base import Objective
from ssvit.options import OptionError, UserError


def by_tanh(x):
    """flax.linen.gelu, as vit_jax and big_vision call it."""
    return 0.5 * x * (1 + numpy.tanh(numpy.sqrt(2 / numpy.pi) * (x + 0.044715 * x**3)))


def by_erf(x):
    return 0.5 * x * (1 + erf(x / numpy.sqrt(2)))


def authors_tokens(arrays, images, gelu):
    """vit_jax's VisionTransformer in float64: normalised images (b, y, x, c) -> tokens after the last norm."""
    weights = {name: value.astype(numpy.float64) for name, value in arrays.items()}

    def dense(x, name, axes="...d,dm->...m"):
        return numpy.einsum(axes, x, weights[f"{name}/kernel"]) + weights[f"{name}/bias"]

    def norm(x, name):
        x = (x - x.mean(-1, keepdims=True)) / numpy.sqrt(x.var(-1, keepdims=True) + 1e-6)
        return x * weights[f"{name}/scale"] + weights[f"{name}/bias"]

    p = peers.PATCH
    b, height, width, _ = images.shape
    patches = images.reshape(b, height // p, p, width // p, p, 3)
    x = numpy.einsum("bypxqc,pqcd->byxd", patches, weights["embedding/kernel"]) + weights["embedding/bias"]
    x = x.reshape(b, -1, peers.WIDTH)
    x = numpy.concatenate([numpy.tile(weights["cls"], (b, 1, 1)), x], 1)
    x = x + weights["Transformer/posembed_input/pos_embedding"]
    for layer in range(peers.DEPTH):
        block = f"Transformer/encoderblock_{layer}"
        attention = f"{block}/MultiHeadDotProductAttention_1"
        y = norm(x, f"{block}/LayerNorm_0")
        q, k, v = (dense(y, f"{attention}/{part}", "btd,dhk->bthk") for part in ("query", "key", "value"))
        logits = numpy.einsum("bqhk,bthk->bhqt", q, k) / numpy.sqrt(q.shape[-1])
        shares = numpy.exp(logits - logits.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        x = x + dense(numpy.einsum("bhqt,bthk->bqhk", shares, v), f"{attention}/out", "bthk,hkd->btd")
        y = norm(x, f"{block}/LayerNorm_2")
        x = x + dense(gelu(dense(y, f"{block}/MlpBlock_3/Dense_0")), f"{block}/MlpBlock_3/Dense_1")
    return norm(x, "Transformer/encoder_norm")


@torch.no_grad()
def test_the_authors_files_give_their_codes_tokens(tmp_path):
    # Larger than in training, so that the two GELUs tell themselves apart.
    arrays = {name: 4 * value if "MlpBlock" in name else value for name, value in peers.arrays().items()}
    numpy.savez(tmp_path / "authors.npz", **arrays)
    images = torch.rand(2, 3, *peers.SIZE, generator=torch.Generator().manual_seed(0))
    encoder = loading.load_encoder(loading_options.LoadEncoder(path=tmp_path / "authors.npz", **peers.TOLD))
    assert encoder.arguments["gelu"] == "tanh"
    found = encoder(images).double().numpy()
    normalised = (images.double().numpy().transpose(0, 2, 3, 1) - 0.5) / 0.5
    gaps = {gelu: abs(found - authors_tokens(arrays, normalised, gelu)).max() for gelu in (by_tanh, by_erf)}
    assert gaps[by_tanh] < 1e-5
    assert gaps[by_erf] > 20 * gaps[by_tanh]


def test_it_is_said_of_the_authors_files_alone(tmp_path):
    google, plain = peers.google(tmp_path), peers.timm_plain(tmp_path)
    assert "gelu tanh, as Google's" in reading.read(google.path, google.told).notes
    found = reading.read(plain.path, plain.told)
    assert not any("gelu" in note for note in found.notes)
    assert open_checkpoint(plain.path, plain.told).encoder["gelu"] == "exact"


def test_both_ways_are_torchs():
    x = torch.linspace(-6, 6, 1000, dtype=torch.float64)
    for gelu, reference in (("exact", by_erf), ("tanh", by_tanh)):
        block = Block(width=1, heads=1, mlp_width=1, dropout=0.0, drop=0.0, relative=None, gelu=gelu).double()
        for layer in (block.expand, block.contract):
            torch.nn.init.ones_(layer.weight)
            torch.nn.init.zeros_(layer.bias)
        found = block.mlp(x[None, :, None])[0, :, 0].detach().numpy()
        numpy.testing.assert_allclose(found, reference(x.numpy()), rtol=0, atol=1e-12)


def test_weights_move_between_encoders_of_one_gelu_alone():
    exact, tanh = exported.encoder(), exported.encoder(gelu="tanh")
    exported.encoder(gelu="tanh", image_size=[16, 16]).take(tanh)
    with pytest.raises(OptionError, match="gelu=tanh: must be exact"):
        tanh.take(exact)
    with pytest.raises(OptionError, match="gelu=relu: must be one of exact, tanh"):
        ViT(vit_options.ViT(**{**exported.SHAPE, "gelu": "relu"}))


def test_a_checkpoint_has_the_choice():
    for gelu in ("exact", "tanh"):
        objective = Objective()
        objective.encoder = exported.encoder(gelu=gelu)
        facts = objective.facts["encoder"]
        assert ViT(vit_options.ViT(**facts)).arguments["gelu"] == gelu


@pytest.mark.parametrize(
    "changes",
    [{}, {"distillation_token": True}, {"stem": {"layers": [], "width": 64, "epsilons": "timm"}}],
    ids=["plain", "distilled", "hybrid"],
)
@torch.no_grad()
def test_timm_reads_it_and_writes_it_back(changes, tmp_path):
    ours, x = exported.encoder(gelu="tanh", **changes), exported.images()
    folder, _ = exported.written(ours, tmp_path, "timm")
    model = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    assert (model.forward_features(ours.normalise(x)) - ours(x)).abs().max() < exported.LIMIT
    back = loading.load_encoder(
        loading_options.LoadEncoder(path=folder / "model.safetensors", heads=4, trained_size=[32, 48])
    )
    assert back.arguments["gelu"] == "tanh"


@torch.no_grad()
def test_hugging_face_reads_it_and_writes_it_back(tmp_path):
    ours, x = exported.encoder(gelu="tanh"), exported.images()
    folder, _ = exported.written(ours, tmp_path, "huggingface")
    model = transformers.ViTModel.from_pretrained(folder, add_pooling_layer=False).eval()
    assert (model(ours.normalise(x)).last_hidden_state - ours(x)).abs().max() < exported.LIMIT
    assert (
        loading.load_encoder(loading_options.LoadEncoder(path=folder / "model.safetensors")).arguments["gelu"] == "tanh"
    )
    config = json.loads((folder / "config.json").read_text())
    for name, gelu in (("gelu", "exact"), ("gelu_new", "tanh"), ("gelu_pytorch_tanh", "tanh")):
        (folder / "config.json").write_text(json.dumps(config | {"hidden_act": name}))
        assert (
            loading.load_encoder(loading_options.LoadEncoder(path=folder / "model.safetensors")).arguments["gelu"]
            == gelu
        )
    (folder / "config.json").write_text(json.dumps(config | {"hidden_act": "quick_gelu"}))
    with pytest.raises(UserError, match="hidden_act 'quick_gelu' is no GELU"):
        reading.read(folder / "model.safetensors", {})


def test_timms_other_activations_are_refused(tmp_path):
    save_file(peers.of_timm().state_dict(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_args": {"act_layer": "quick_gelu"}}))
    with pytest.raises(UserError, match="act_layer 'quick_gelu' is no GELU"):
        reading.read(tmp_path / "model.safetensors", peers.TOLD)


@torch.no_grad()
def test_programs_compute_it(tmp_path):
    """The export to ONNX runs the file, and is refused if its outputs are not torch's."""
    ours = exported.encoder(gelu="tanh")
    with torch.no_grad():
        for block in ours.blocks:
            block.expand.weight *= 20
    _, said = exported.written(ours, tmp_path, "onnx")
    assert any("largest difference" in line for line in said)
    folder, _ = exported.written(ours, tmp_path, "torch_export")
    tokens, _ = torch.export.load(folder / "model.pt2").module()(exported.images())
    assert (tokens - ours(exported.images())).abs().max() < exported.LIMIT
