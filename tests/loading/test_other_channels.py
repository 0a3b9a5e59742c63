"""Weights that start an encoder of another number of channels: the projection, its normalisation, and the commands."""

import json
import re

import exported
import numpy
import peers
import pytest
import tifffile
import timm
import tiny
import torch
import yaml
from safetensors.torch import save_file
from timm.models._manipulate import adapt_input_conv

from ssvit.checkpoints import manifest, storage
from ssvit.cli import find_command
from ssvit.errors import OptionError, UserError
from ssvit.loading.encoder import load_encoder
from ssvit.loading.options import LoadEncoder
from ssvit.models import timm_options, vit_options
from ssvit.models.timm import Timm
from ssvit.models.vit import ViT, adapted
from ssvit.retrieval.options import encoder_of
from ssvit.retrieval.store import Store

D, P, Q = 5, 2, 3
SOURCE = {"image_mean": 0.4, "image_std": 0.2}
SHORT = ("recipe.warmup=1", "recipe.precision=32-true", "recipe.batch_size=8", "recipe.steps=2", "recipe.save_every=2",
         "recipe.evaluate_every=2", "launch.accelerator=cpu", "workers=1", "figures=none")  # fmt: skip


@pytest.mark.parametrize("count", range(1, 17))
def test_repeated_channels_are_those_of_timm(count):
    weight = tiny.noise(D, 3, P, Q)
    expected = adapt_input_conv(count, weight).flatten(1)
    torch.testing.assert_close(adapted(weight.flatten(1), 3, count, "repeat"), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("channels", "count"), [(3, 1), (3, 4), (3, 16), (4, 3), (1, 3), (5, 2)])
def test_every_channel_gets_the_scaled_mean(channels, count):
    weight = tiny.noise(D, channels, P, Q).double()
    converted = adapted(weight.flatten(1), channels, count, "mean").view(D, count, P, Q)
    for d, c, y, x in numpy.ndindex(D, count, P, Q):
        mean = sum(float(weight[d, other, y, x]) for other in range(channels)) / channels
        assert float(converted[d, c, y, x]) == pytest.approx(mean * channels / count, rel=1e-12)


@pytest.mark.parametrize(("count", "how"), [(1, "mean"), (1, "repeat"), (2, "mean"), (4, "mean"), (16, "mean")])
@torch.no_grad()
def test_grey_images_keep_their_tokens(count, how):
    options = {"mean": 0.4, "std": 0.2}
    trained = exported.encoder(**options).double()
    other = ViT(vit_options.ViT(**{**trained.arguments, "channels": count})).double().eval()
    other.load_weights_from(trained, adapt=how)
    grey = torch.rand(2, 1, *trained.image_size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    tokens = other(grey.expand(-1, count, -1, -1))
    torch.testing.assert_close(tokens, trained(grey.expand(-1, 3, -1, -1)), rtol=1e-12, atol=1e-12)


@torch.no_grad()
def test_foreign_weights_are_converted_as_timm_converts_them(tmp_path):
    arguments = {"img_size": 32, "depth": 2, "num_classes": 5}
    peer = peers.random(timm.create_model("vit_tiny_patch16_224", **arguments))
    path = tmp_path / "timm.safetensors"
    save_file(peer.state_dict(), path)
    overlay = {"file": str(path), "num_classes": 5, "custom_load": False}
    expected = timm.create_model(
        "vit_tiny_patch16_224", **arguments, in_chans=4, pretrained=True, pretrained_cfg_overlay=overlay
    )
    mean, std = [0.1, 0.2, 0.3, 0.4], [0.2, 0.3, 0.2, 0.3]
    loading = LoadEncoder(path=path, channels=4, adapt_channels="repeat", image_mean=mean, image_std=std)
    encoder = load_encoder(loading)
    images = torch.rand(2, 4, 32, 32, generator=torch.Generator().manual_seed(0))
    normalised = (images - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]
    assert (encoder(images) - expected.eval().forward_features(normalised)).abs().max() < 1e-5
    assert (encoder.arguments["mean"], encoder.arguments["std"]) == (mean, std)


@pytest.mark.parametrize(
    ("encoder", "options", "name"),
    [
        ({}, {"channels": 4, "image_std": 0.2}, "image_mean"),
        ({}, {"channels": 4, **SOURCE, "image_std": [0.2] * 3}, "image_std"),
        ({"stem": {"layers": [1], "width": 32}}, {"channels": 4, **SOURCE}, "channels"),
        ("timm", {"channels": 4, **SOURCE}, "channels"),
    ],
)
def test_a_wrong_conversion_is_named(encoder, options, name, tmp_path):
    if encoder == "timm":
        model = Timm(timm_options.Timm(model="resnet10t", image_size=32))
    else:
        model = exported.encoder(**encoder)
    state = {f"encoder.{key}": value for key, value in model.state_dict().items()}
    storage.save(
        tmp_path, 1, {"model": state}, {"encoder": model.arguments, "stage": "pretrain", "backbone": "encoder"}
    )
    with pytest.raises(OptionError) as caught:
        LoadEncoder(path=tmp_path, **options).loaded()
    assert caught.value.name == name
    assert LoadEncoder(path=tmp_path, channels=3, **SOURCE).loaded() == model.options


def test_a_run_of_ssvit_starts_an_encoder_of_other_channels(tmp_path):
    tiny.train(tmp_path / "run", steps=4)
    trained = load_encoder(LoadEncoder(path=tmp_path / "run"))
    encoder = load_encoder(LoadEncoder(path=tmp_path / "run", channels=2, **SOURCE))
    assert torch.equal(encoder.patch.weight, adapted(trained.patch.weight, 3, 2, "mean"))
    assert torch.equal(encoder.mean, torch.tensor([0.4, 0.4]))
    unchanged = trained.state_dict().keys() - {"patch.weight", "mean", "std"}
    assert all(torch.equal(encoder.state_dict()[name], trained.state_dict()[name]) for name in unchanged)


@pytest.fixture(scope="module", params=[1, 4])
def rasters(request, tmp_path_factory):
    """A folder with images of this number of channels, their measured normalisation, and weights of three channels."""
    folder, channels = tmp_path_factory.mktemp("rasters"), request.param
    generator = numpy.random.default_rng(0)
    for number in range(24):
        (folder / "set" / "ab"[number % 2]).mkdir(parents=True, exist_ok=True)
        array = (generator.random((channels, 16, 16)) * 4000 / (1 + number % 2)).astype("uint16")
        stored = {"planarconfig": "separate"} if channels > 1 else {}
        path = folder / "set" / "ab"[number % 2] / f"{number}.tif"
        tifffile.imwrite(path, array.squeeze(), photometric="minisblack", metadata=None, **stored)
    save_file(peers.of_timm(img_size=16, patch_size=4).state_dict(), folder / "rgb.safetensors")
    find_command("normalization").call([f"data={folder}/set", f"output={folder}/bands.yaml"])
    return folder, channels


def test_commands_start_from_weights_of_other_channels(rasters, capsys):
    folder, channels = rasters
    start = [f"checkpoint={folder}/rgb.safetensors", "encoder.heads=4", f"data={folder}/set", f"outputs={folder}"]
    measured = [*start, f"data.normalization={folder}/bands.yaml", "data.image_size=16"]
    run = find_command("pretrain").call([*measured, "objective=mae", "name=run", "probes=[]", *SHORT])
    capsys.readouterr()
    facts = manifest.read_manifest(manifest.complete(run)[-1])
    assert facts["encoder"]["channels"] == channels
    values = re.search(r"mean: (.*)\nstd: (.*)\n", (folder / "bands.yaml").read_text())
    assert [facts["encoder"][name] for name in ("mean", "std")] == [json.loads(text) for text in values.groups()]
    short = [*SHORT, "check_frozen=false"]
    tuned = find_command("finetune").call([*measured, "encoder.adapt_channels=repeat", "name=tuned", *short])
    assert manifest.read_manifest(manifest.complete(tuned)[-1])["encoder"]["channels"] == channels
    again = find_command("finetune").call([f"checkpoint={run}", f"outputs={folder}", "name=again", *short])
    assert manifest.read_manifest(manifest.complete(again)[-1])["encoder"]["mean"] == facts["encoder"]["mean"]
    report = find_command("evaluate").call([*measured, "probes=[knn]", *SHORT[-3::2], f"output={folder}/report"])
    assert (report / "report.json").is_file()


@pytest.fixture(scope="module")
def three_bands(tmp_path_factory):
    """A folder with 24 images of three 16-bit channels, their measured normalisation and weights for colour images.

    Returns the folder, the options, the images in [0, 1] (24, 3, 16, 16) and their files.
    """
    folder, generator = tmp_path_factory.mktemp("three"), numpy.random.default_rng(0)
    arrays = generator.integers(500, 4000, (24, 3, 16, 16)).astype("uint16")
    files = [folder / "set" / "ab"[number % 2] / f"{number:02d}.tif" for number in range(24)]
    for path, array in zip(files, arrays, strict=True):
        path.parent.mkdir(parents=True, exist_ok=True)
        tifffile.imwrite(path, array, photometric="minisblack", planarconfig="separate", metadata=None)
    save_file(peers.of_timm(img_size=16, patch_size=4).state_dict(), folder / "rgb.safetensors")
    find_command("normalization").call([f"data={folder}/set", f"output={folder}/bands.yaml"])
    options = [f"checkpoint={folder}/rgb.safetensors", "encoder.heads=4", f"data={folder}/set",
               f"data.normalization={folder}/bands.yaml", "data.image_size=16"]  # fmt: skip
    measured = yaml.safe_load((folder / "bands.yaml").read_text())
    low, high = (torch.tensor(end)[:, None, None] for end in measured["range"])
    images = ((torch.from_numpy(arrays.astype("float32")) - low) / (high - low)).clamp(0, 1)
    return folder, options, images, files


def test_a_measured_normalisation_of_as_many_channels_standardises_the_pixels(three_bands):
    folder, options, images, _ = three_bands
    run = find_command("pretrain").call(
        [*options, f"outputs={folder}", "objective=mae", "name=run", "probes=[]", *SHORT]
    )
    encoder = load_encoder(LoadEncoder(path=run))
    pixels = encoder.normalise(images)
    assert pixels.mean((0, 2, 3)).abs().max() < 0.15
    assert (pixels.std((0, 2, 3)) - 1).abs().max() < 0.1


@pytest.mark.parametrize("typed", [("mean", "std"), ("mean",)])
@torch.no_grad()
def test_embed_and_retrieve_normalise_as_typed(three_bands, typed, tmp_path):
    """The features are those of timm's model for pixels with the range, mean and deviation of the options."""
    folder, options, images, files = three_bands
    measured = yaml.safe_load((folder / "bands.yaml").read_text())
    if typed == ("mean",):  # the deviation is then that of the weights, 0.5 for timm's
        written = {f"data.{name}": json.dumps(measured[name]) for name in ("channels", "range", "mean")}
        given = [f"{name}={value.replace(' ', '')}" for name, value in written.items()]
        options, measured = [*options[:3], *given, options[4]], {**measured, "std": [0.5] * 3}
    mean, std = (torch.tensor(measured[name])[:, None, None] for name in ("mean", "std"))
    expected = peers.of_timm(img_size=16, patch_size=4).eval().forward_features((images - mean) / std)[:, 0]
    common = [*options, f"outputs={tmp_path}", "precision=32", "features.pooling=class_token"]
    find_command("embed").call([*common, f"output={tmp_path}/f.npz"])
    written = numpy.load(tmp_path / "f.npz")
    rows = dict(zip(written["names"].tolist(), written["features"], strict=True))
    assert numpy.abs(numpy.stack([rows[str(file)] for file in files]) - expected.numpy()).max() < 1e-4
    find_command("retrieve").call([*common, "action=index", f"store={tmp_path}/store", "data.held_out=0.5"])
    store = Store.open(tmp_path / "store", encoder_of(tmp_path / "store"))
    for name, row in store.row_of.items():
        assert numpy.allclose(store.features[row], rows[name], atol=1e-5)
    query = ["action=query", f"store={tmp_path}/store", str(files[0]), "k=1", f"output={tmp_path}/n.json"]
    find_command("retrieve").call([*common, *query])
    with pytest.raises(UserError, match=str(tmp_path)):  # a store of features of another normalisation
        find_command("retrieve").call([*options[:3], *common[-3:], *query])


@pytest.mark.parametrize(("name", "value"), [("mean", "[0.1,0.2]"), ("std", "0")])
def test_a_normalisation_of_pictures_that_does_not_fit_is_named(three_bands, name, value, tmp_path):
    _, options, _, _ = three_bands
    with pytest.raises(UserError, match=rf"^data\.{name}="):
        find_command("embed").call([*options[:3], f"data.{name}={value}", f"output={tmp_path}/f.npz"])


@pytest.mark.parametrize("command", ["pretrain", "finetune", "evaluate"])
def test_a_typed_mean_alone_keeps_the_deviation_of_the_weights(three_bands, command):
    folder, options, _, _ = three_bands
    found = find_command(command)
    config = found.compose(found.line([*options[:3], "data.mean=0.25", "data.image_size=16", f"outputs={folder}/no"]))
    encoder = load_encoder(config.options.encoder)
    assert torch.equal(encoder.mean, torch.full((3,), 0.25))
    assert torch.equal(encoder.std, torch.full((3,), 0.5))


@pytest.mark.parametrize("command", ["pretrain", "finetune", "evaluate"])
def test_the_normalisation_of_other_channels_is_required(rasters, command):
    folder, channels = rasters
    options = [f"checkpoint={folder}/rgb.safetensors", "encoder.heads=4", f"data={folder}/set", f"outputs={folder}/no",
               f"data.channels={channels}", "data.range=[0,4000]", "data.image_size=16"]  # fmt: skip
    with pytest.raises(UserError, match=r"data\.mean=\[0\.485,0\.456,0\.406\]"):
        find_command(command).call(options)
