"""A user-defined encoder class: declared, trained, stored by its name, and built again by the same plug-in."""

import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

import ssvit
from ssvit import cli
from ssvit.checkpoints import manifest
from ssvit.choices import PARTS
from ssvit.errors import Failure, UserError
from ssvit.exchange.export import WEIGHTS
from ssvit.loading.encoder import load_encoder
from ssvit.loading.options import LoadEncoder

TINY = (
    "data=shapes", "data.images=32", "data.held_out_images=16", "data.image_size=16", "recipe.batch_size=8",
    "recipe.steps=4", "recipe.warmup=1", "recipe.save_every=2", "recipe.evaluate_every=4", "recipe.precision=32-true",
    "launch.accelerator=cpu", "figures=none",
)  # fmt: skip
PRETRAIN = (
    "objective=simclr",
    "objective.hidden=8",
    "objective.projection=8",
    "preset=null",
    "probes=[]",
    "name=run",
    *TINY,
)

ONE_STEP = ("recipe.steps=1", "recipe.warmup=0", "recipe.evaluate_every=1")


@pytest.fixture
def conv(tmp_path, monkeypatch):
    """Return the arguments that select the user-defined encoder."""
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (20, 20)).save("picture.png")
    yield ["--plugin", "with_conv"]
    PARTS["encoder"].pop("conv", None)
    for name in [name for name in sys.modules if name.partition(".")[0] == "with_conv"]:
        del sys.modules[name]


def call(command: str, *arguments: str):
    return cli.find_command(command).call(["outputs=outputs", *arguments])


def test_an_encoder_of_the_user_is_carried_through_training_probes_and_export(conv):
    call("pretrain", *conv, "encoder=conv", *PRETRAIN)
    checkpoint = manifest.complete(Path("outputs/run"))[-1]
    stored = manifest.read_manifest(checkpoint)["encoder"]
    assert stored["choice"] == "conv"
    for file in ("config.yaml", "step_00000004/manifest.json"):  # names and values, and no path of a class
        assert "with_" not in Path("outputs/run", file).read_text()
    encoder = load_encoder(LoadEncoder(path=checkpoint))
    images = torch.randint(256, (3, 3, 16, 16), dtype=torch.uint8)
    assert torch.equal(ssvit.load("outputs/run", precision=32).features(list(images)), encoder.represent(images))

    start = (*conv, "checkpoint=outputs/run")
    call("pretrain", *start, *PRETRAIN, *ONE_STEP, "name=goes_on")
    for command, options in {
        "finetune": ("recipe.steps=2", "recipe.warmup=0", "recipe.batch_size=8", "compare=null", "check_frozen=false",
                     "name=tuned"),
        "knn": ("k=[3]", "baselines=false", "report=false"),
    }.items():  # fmt: skip
        call(command, *start, "launch.accelerator=cpu", *options)
    assert manifest.read_manifest(manifest.complete(Path("outputs/tuned"))[-1])["encoder"] == stored
    call("predict", *conv, "checkpoint=outputs/tuned", "picture.png")

    call("export", *start, "format=safetensors", "output=exported")
    exported = load_encoder(LoadEncoder(path=Path("exported", WEIGHTS)))
    assert torch.equal(exported.represent(images), encoder.represent(images))
    for format in ("onnx", "timm"):
        with pytest.raises(Failure, match=f"format={format}: .*Conv"):
            call("export", *start, f"format={format}", "output=other")
    # Convolutions have no weights that depend on the image size.
    assert load_encoder(LoadEncoder(path=checkpoint, image_size=24)).image_size == (24, 24)


def test_a_checkpoint_is_loadable_only_where_its_class_is_declared(conv):
    call("pretrain", *conv, "encoder=conv", *PRETRAIN, *ONE_STEP)
    del PARTS["encoder"]["conv"]
    commands = {"finetune": "recipe.steps=2", "knn": "k=[3]", "export": "format=safetensors", "embed": "output=f.npz"}
    for command, option in commands.items():
        with pytest.raises(Failure, match=r"encoder=conv: .*--plugin") as refused:
            call(command, "checkpoint=outputs/run", option, *(["picture.png"] if command == "embed" else ()))
        assert "\n" not in str(refused.value)
    with pytest.raises(UserError, match="encoder=conv"):
        ssvit.load("outputs/run")


@pytest.mark.parametrize("objective", ["masked_patch", "mae", "dino", "simclr"])
def test_objectives_that_need_patches_reject_it_by_name(conv, objective):
    keeps = ["objective.keep=0.5"] if objective == "simclr" else []
    with pytest.raises(Failure, match=r"^(encoder=|objective\.keep=)"):
        call("pretrain", *conv, "encoder=conv", *PRETRAIN[3:], f"objective={objective}", *keeps)
