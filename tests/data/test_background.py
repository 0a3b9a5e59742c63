"""The background of transparent images is that of the run in every command, and drawings that vanish are reported."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import ssvit
from ssvit.checkpoints import manifest
from ssvit.cli import find_command
from ssvit.data.augment.options import CenterCrop
from ssvit.data.sources import datasets, datasets_options
from ssvit.data.sources.decode import load
from ssvit.data.sources.decode_options import PixelFormat
from ssvit.errors import Failure

MEAN, COLOUR = (0.2, 0.4, 0.6), (51, 102, 153)
RUN = (
    "preset=null", "objective=mae", "objective.decoder.width=16", "objective.decoder.depth=1", "data.image_size=16",
    "encoder.patch_size=4", "encoder.width=16", "encoder.depth=1", "encoder.heads=2", "recipe.precision=32-true",
    "recipe.batch_size=4", "recipe.steps=2", "recipe.warmup=1", "recipe.save_every=2", "recipe.evaluate_every=2",
    "recipe.log_every=1", "probes=[]", "data.fit=pad", "launch.accelerator=cpu", "workers=0", "figures=none",
)  # fmt: skip


def drawing(number: int, colour: int = 0, mode: str = "RGBA") -> Image.Image:
    """A disc of one colour, at a place of its own, on transparency."""
    y, x = np.mgrid[0:20, 0:26]
    alpha = np.clip(255 - 12 * ((y - 8 - number % 4) ** 2 + (x - 9 - number % 7) ** 2), 0, 255).astype(np.uint8)
    return Image.fromarray(np.dstack([np.full_like(alpha, colour)] * 3 + [alpha]), "RGBA").convert(mode)


def composited(picture: Image.Image, colour: tuple[int, ...]) -> Image.Image:
    """The reference: pixel = alpha * colour + (1 - alpha) * background."""
    rgba = np.asarray(picture.convert("RGBA"), float)
    share = rgba[..., 3:] / 255
    return Image.fromarray(np.rint(rgba[..., :3] * share + np.array(colour) * (1 - share)).astype(np.uint8))


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A folder with drawings on transparency, and a run on them whose background is the mean of the data."""
    root = tmp_path_factory.mktemp("background")
    for number in range(12):
        path = root / "set" / "ab"[number % 2] / f"{number:02d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        drawing(number).save(path)
        (root / "flat" / path.parent.name).mkdir(parents=True, exist_ok=True)
        composited(drawing(number), COLOUR).save(root / "flat" / path.parent.name / path.name)
    mean = f"data.mean={list(MEAN)}".replace(" ", "")
    options = [f"data={root}/set", mean, "data.std=0.3", "data.background=mean", f"outputs={root}/outputs", "name=run"]
    find_command("pretrain").call([*options, *RUN])
    return root


def test_every_command_uses_the_background_of_the_run(run, tmp_path):
    checkpoint = manifest.complete(run / "outputs/run")[-1]
    assert manifest.read_manifest(checkpoint)["background"] == "#336699"
    files = [sorted((run / name / "a").glob("*.png")) for name in ("set", "flat")]
    encoder = ssvit.load(checkpoint, precision=32)
    reference, pad = encoder.features(files[1]), CenterCrop(size=16, fit="pad")
    black, crop = (pad.build()([load(str(file)) for file in images]) for images in files)
    assert (encoder.prepare(files[0]).int() - crop).abs().max() <= 1
    assert (encoder.prepare(files[0]).int() - black).abs().max() > 50
    for images in (files[0], [Image.open(file) for file in files[0]]):
        assert (encoder.features(images) - reference).abs().max() < 0.05
    features = encoder.features(files[0])
    common = [f"checkpoint={checkpoint}", f"outputs={run}/outputs", "precision=32"]
    for options in ([str(run / "set/a")], [f"data={run}/set/a", "data.held_out=0.01"]):
        find_command("embed").call([*common, *options, f"output={tmp_path}/{len(options)}.npz"])
        written = np.load(tmp_path / f"{len(options)}.npz")
        rows = {Path(name).name: row for name, row in zip(written["names"], written["features"], strict=True)}
        for file, feature in zip(files[0], features, strict=True):
            assert np.allclose(rows[file.name], feature, atol=1e-5)
    find_command("export").call([f"checkpoint={checkpoint}", "format=safetensors", f"output={tmp_path}/exported"])
    assert "#336699" in (tmp_path / "exported/README.md").read_text()
    assert ssvit.load(tmp_path / "exported/model.safetensors", precision=32).features(files[0]).equal(features)
    for options in ([], [f"data={run}/set", "data.held_out=0.5"]):  # the data set of the run, and any other
        command = find_command("evaluate")
        config = command.compose(command.line([*common, *options]))
        assert (config.options.data.background, config.options.data.channels) == ("#336699", 3)
        assert config.options.data.view == pad
        source = config.options.data.build().train
        assert (source.read(0).int() - load(source.name(0).replace("set/", "flat/"))).abs().max() <= 1
    small = [f"recipe.{name}" for name in ("steps=1", "batch_size=4", "warmup=0", "evaluate_every=1", "save_every=1")]
    tuned = find_command("finetune").call(
        [*common[:2], f"data={run}/set", "name=tuned", "workers=0", "figures=none", "check_frozen=false", *small]
    )
    images = manifest.read_manifest(manifest.complete(tuned)[-1])
    assert (images["background"], images["view"]["fit"]) == ("#336699", "pad")
    with pytest.raises(Failure, match=r"data\.(background|mean)"):
        find_command("pretrain").call(
            [f"data={run}/set", "data.background=white", f"outputs={run}/outputs", "name=run", *RUN]
        )


def test_preset_auto_measures_the_composited_pixels(tmp_path):
    for number in range(4):
        drawing(number, mode="LA").save(tmp_path / f"{number}.png")
    values = np.stack([np.asarray(composited(drawing(number), (255,) * 3))[..., 0] / 255 for number in range(4)])
    config = find_command("pretrain").compose(
        find_command("pretrain").line([f"data={tmp_path}", "data.background=white"])
    )
    assert (config.options.data.channels, config.options.data.background) == (1, "#ffffff")
    assert config.values["data"]["mean"] == pytest.approx([values.mean()], abs=0.002)
    assert config.values["data"]["std"] == pytest.approx([values.std()], abs=0.002)


@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_drawings_that_vanish_are_reported(tmp_path, mode):
    def summary(**options: object) -> str:
        return datasets.folder(datasets_options.Folder(root=str(tmp_path), **options)).summary

    for number in range(3):
        drawing(number, mode=mode).save(tmp_path / f"{number}.png")
    assert "warning" in summary()
    assert "data.background=white" in summary()
    assert "data.background" in summary(background="white")
    assert "warning" not in summary(background="white")
    for number in range(3):
        drawing(number, colour=255, mode=mode).save(tmp_path / f"{number}.png")
    assert "warning" not in summary()
    assert "data.background=black" in summary(background="white")
    for number in range(3):
        drawing(number, mode=mode).convert("RGB").save(tmp_path / f"{number}.png")
    assert "data.background" not in summary()
    assert PixelFormat(background="black") == PixelFormat()
    assert torch.equal(load(str(tmp_path / "0.png")), load(str(tmp_path / "0.png"), PixelFormat(background="white")))
