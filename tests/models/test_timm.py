"""Models of timm as encoders: outputs, layers and files equal timm's, runs resume, and errors have one line."""

import os
import signal
from types import SimpleNamespace

import pytest
import timm
import tiny
import torch
from composing import composed
from runs import final, states
from timm.optim import param_groups_layer_decay
from torch import nn

import ssvit
from ssvit.data.loader import Loader
from ssvit.errors import OptionError, UserError
from ssvit.loading.finding import open_checkpoint
from ssvit.models import timm_options
from ssvit.models.encoder_options import PATCHES
from ssvit.models.timm import Timm
from ssvit.models.timm_options import timm_models
from ssvit.objectives import classify_options, contrastive_options
from ssvit.objectives.classify import Classify
from ssvit.objectives.contrastive import SimCLR
from ssvit.training import loop
from ssvit.training.state import RunningStatistics

SWIN = {"model": "swin_tiny_patch4_window7_224", "image_size": 32, "arguments": {"depths": [1, 1, 1, 1]}}
MODELS = [
    {"model": "resnet10t", "image_size": [32, 64]},
    {"model": "mixer_s32_224", "image_size": 64},
    SWIN,
    {"model": "vit_tiny_patch16_224", "image_size": [32, 48], "arguments": {"depth": 1}},
]
DATA = {
    "data": "shapes", "data.images": 64, "data.held_out_images": 32, "data.image_size": 32, "precision": "32-true",
    "launch.accelerator": "cpu", "figures": "none",
}  # fmt: skip
SHORT = {**DATA, "batch_size": 8, "steps": 4, "warmup": 1, "save_every": 2, "evaluate_every": 4}


def build(**arguments) -> Timm:
    torch.manual_seed(0)
    return Timm(timm_options.Timm(**{"model": "resnet10t", "image_size": 32, "arguments": {}} | arguments)).eval()


@pytest.mark.parametrize("arguments", MODELS, ids=lambda one: one["model"])
@torch.no_grad()
def test_features_are_timms_own(arguments):
    encoder = build(**arguments, mean=[0.5, 0.4, 0.3], std=0.25)
    images = torch.randint(0, 256, (2, 3, *encoder.image_size), dtype=torch.uint8)
    seen = (images / 255 - torch.tensor([0.5, 0.4, 0.3])[:, None, None]) / 0.25
    tokens = encoder.model.forward_features(seen)
    torch.testing.assert_close(encoder.represent(images), encoder.model(seen))
    assert encoder.represent(images).shape == (2, encoder.width)
    patches = encoder.pooled(next(encoder.layers(images)), PATCHES, images)
    if arguments["model"] == "resnet10t":
        tokens = tokens.permute(0, 2, 3, 1)
    elif arguments["model"] == "vit_tiny_patch16_224":  # which has a class token
        tokens = tokens[:, 1:]
    torch.testing.assert_close(patches.flatten(), tokens.flatten())
    assert patches.shape[1:3] == tuple(
        side // patch for side, patch in zip(encoder.image_size, encoder.patch_size, strict=True)
    )


def test_its_names_are_those_of_timm():
    assert timm_models() == {name.partition(".")[0] for name in timm.list_models()}


@pytest.mark.parametrize("arguments", MODELS, ids=lambda one: one["model"])
def test_layers_decay_as_timms(arguments):
    encoder = build(**arguments)
    groups = Classify(classify_options.Classify(classes=tiny.CLASSES), encoder=encoder).parameter_groups(
        weight_decay=0.1, layer_decay=0.5
    )
    size = {"img_size": encoder.image_size} if arguments["model"] != "resnet10t" else {}
    model = timm.create_model(arguments["model"], num_classes=3, **size, **arguments.get("arguments", {}))
    theirs = param_groups_layer_decay(
        model, 0.1, no_weight_decay_list=getattr(model, "no_weight_decay", set)(), layer_decay=0.5
    )
    expected = {}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for group in theirs:
        expected |= {names[id(one)]: (group["lr_scale"], group["weight_decay"]) for one in group["params"]}
    names = {id(parameter): name for name, parameter in encoder.model.named_parameters()}
    found = {
        names[id(one)]: (group["share"], group["weight_decay"])
        for group in groups
        for one in group["params"]
        if id(one) in names
    }
    assert found.keys() == set(names.values())
    assert len(found) == len(names)
    assert found == {name: expected[name] for name in found}


def classify(**arguments) -> Classify:
    torch.manual_seed(0)
    encoder = Timm(
        timm_options.Timm(model="test_resnet", image_size=16, arguments={"drop_path_rate": 0.2}, **arguments)
    )
    return Classify(classify_options.Classify(classes=tiny.CLASSES), encoder=encoder)


def simclr() -> SimCLR:
    torch.manual_seed(0)
    encoder = Timm(timm_options.Timm(model="test_resnet", image_size=16, arguments={"drop_path_rate": 0.2}))
    return SimCLR(contrastive_options.SimCLR(hidden=16, projection=8), encoder=encoder)


@pytest.mark.parametrize("build", [classify, simclr])
def test_a_run_that_was_interrupted_ends_with_the_same_bits(tmp_path, build):
    tiny.train(tmp_path / "whole", objective=build(), steps=6)
    with pytest.raises(tiny.Interrupted):
        tiny.train(tmp_path / "parts", objective=tiny.interrupted(build(), 6), steps=6)
    tiny.train(tmp_path / "parts", objective=build(), steps=6)
    assert final(tmp_path / "parts") == final(tmp_path / "whole")
    first = build().state_dict()["encoder.model.bn1.running_var"]
    assert not torch.equal(states(tmp_path / "whole")["model"]["encoder.model.bn1.running_var"], first)


def test_a_run_that_was_stopped_between_two_micro_batches_ends_with_the_same_bits(tmp_path, monkeypatch):
    tiny.train(tmp_path / "whole", objective=classify(), steps=6, accumulate=2)
    read = Loader.batches

    def signalled(self, *steps):
        for place, batch in enumerate(read(self, *steps)):
            if place == 4 * 2 + 1:  # the second micro-batch of step 4, after which no checkpoint is due
                os.kill(os.getpid(), signal.SIGTERM)
            yield batch

    monkeypatch.setattr(Loader, "batches", signalled)
    with pytest.raises(loop.Stopped, match=r"\b4\b"):
        tiny.train(tmp_path / "parts", objective=classify(), steps=6, accumulate=2)
    monkeypatch.setattr(Loader, "batches", read)
    tiny.train(tmp_path / "parts", objective=classify(), steps=6, accumulate=2)
    assert final(tmp_path / "parts") == final(tmp_path / "whole")


def test_running_statistics_are_means_over_processes_and_stay_where_an_update_is_skipped():
    """Statistics equal torch's after the same images; the second process is simulated."""
    model, alone = (nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)) for _ in range(2))
    alone.load_state_dict(model.state_dict())
    other = torch.arange(8.0)
    processes = SimpleNamespace(mean=lambda value: (value + other) / 2)
    statistics, images = RunningStatistics(model), torch.rand(2, 3, 5, 5)
    model(images)
    statistics.follow(processes, torch.tensor(False))
    assert model[1].running_mean.equal(torch.zeros(4))
    assert model[1].running_var.equal(torch.ones(4))
    model(images)
    alone(images)
    statistics.follow(processes, torch.tensor(True))
    assert torch.equal(model[1].running_mean, (alone[1].running_mean + other[:4]) / 2)
    assert torch.equal(model[1].running_var, (alone[1].running_var + other[4:]) / 2)


def test_a_model_of_timm_is_trained_and_commands_read_the_run(tmp_path):
    outputs, model = tmp_path / "outputs", {"encoder": "timm", "encoder.model": "test_resnet"}
    own = {"outputs": outputs, "verbose": False}
    run = ssvit.finetune("scratch", **SHORT, **model, **own, ema=0.9)
    assert run.folder.name == "scratch_test_resnet_shapes"
    assert "test/accuracy" in run.metrics
    assert open_checkpoint(run.folder).encoder["model"] == "test_resnet"
    pictures = torch.randint(0, 256, (3, 3, 32, 32), dtype=torch.uint8)
    classifier = run.classifier(precision=32)
    assert classifier.probabilities(pictures).shape == (3, 10)
    encoder = run.encoder(precision=32)
    torch.testing.assert_close(encoder.features(pictures), classifier.module.encoder.represent(pictures).detach())
    assert encoder.patch_features(pictures).shape == (3, 1, 1, 96)
    again = ssvit.finetune(run, **SHORT, **own, name="again", check_frozen=False)
    assert again.history[-1]["step"] == 4
    with pytest.raises(UserError, match=r"\btest_resnet\b"):
        run_tool("visualize", f"checkpoint={run.folder}", f"outputs={outputs}")


def test_simclr_pre_trains_a_model_of_timm_and_continues(tmp_path):
    short = {"steps": 1, "warmup": 0, "data.images": 16, "data.held_out_images": 8, "probes": [], "evaluator": []}
    options = {**SHORT, **short, "objective": "simclr", "outputs": tmp_path, "verbose": False}
    model = {f"encoder.{name}": value for name, value in SWIN.items() if name != "image_size"}
    run = ssvit.pretrain(encoder="timm", **model, **options)
    assert "held_out/top1" in run.metrics
    again = ssvit.pretrain(checkpoint=run, name="again", **options)
    weights = [states(folder)["model"] for folder in (run.folder, again.folder)]
    assert weights[0].keys() == weights[1].keys()
    assert not all(map(torch.equal, *(of_run.values() for of_run in weights)))
    pictures = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    trained = {name.removeprefix("encoder."): value for name, value in weights[1].items() if "head" not in name}
    model = build(**SWIN)
    model.load_state_dict(trained)
    torch.testing.assert_close(again.encoder(precision=32).features(pictures), model.represent(pictures).detach())


@pytest.mark.parametrize("model", ["test_resnet", "vit_tiny_patch16_224"])
def test_the_kernels_can_be_chosen_and_train_as_torch_does(model, tmp_path):
    composed("encoder=timm", f"encoder.model={model}", "objective=supervised", "recipe.backend=kernels").check()
    options = timm_options.Timm(model=model, image_size=16, arguments={} if model == "test_resnet" else {"depth": 1})
    for backend in ("kernels", "eager"):
        torch.manual_seed(0)
        objective = Classify(classify_options.Classify(classes=tiny.CLASSES), encoder=Timm(options))
        tiny.train(tmp_path / backend, objective=objective, steps=4, backend=backend, optimizer="sgd")
    trained = [states(tmp_path / backend)["model"] for backend in ("kernels", "eager")]
    torch.testing.assert_close(*trained, rtol=1e-3, atol=1e-5)


def test_an_argument_of_the_model_is_an_option():
    options = composed(
        "encoder=timm", "encoder.model=resnet10t", "objective=supervised", "encoder.arguments.drop_rate=0.2"
    )
    assert options.encoder.arguments == {"drop_rate": 0.2}


def run_tool(name: str, *options: str) -> object:
    from ssvit.cli import find_command

    return find_command(name).call(list(options))


@pytest.mark.parametrize(
    ("command", "options", "said"),
    [
        ("finetune", {"encoder.model": "resnet18dd"},
         "encoder.model=resnet18dd: "),
        ("finetune", {}, "encoder.model: "),
        ("finetune", {"encoder.model": "resnet10t", "checkpoint": None}, "encoder=timm: "),
        ("finetune", {"encoder.model": "resnet10t", "objective.trained": 1}, "objective.trained=1: "),
        ("finetune", {"encoder.model": "resnet10t", "encoder.arguments": {"num_classes": 3}},
         "encoder.arguments.num_classes=3: "),
        ("finetune", {"encoder.model": "resnet10t", "launch.strategy": "fsdp"}, "launch.strategy=fsdp: "),
        ("pretrain", {"encoder.model": "resnet10t", "checkpoint": None}, "objective=masked_patch: "),
        ("pretrain", {"encoder.model": "resnet10t", "checkpoint": None, "objective": "mae"}, "objective=mae: "),
    ],
)  # fmt: skip
def test_what_cannot_be_is_told_in_one_line(command, options, said, tmp_path):
    with pytest.raises(UserError) as refused:
        getattr(ssvit, command)(
            **{"checkpoint": "scratch", "encoder": "timm", **SHORT, **options}, outputs=tmp_path, verbose=False
        )
    assert str(refused.value).startswith(said)
    assert "\n" not in str(refused.value)


def test_without_timm_the_extra_is_named(monkeypatch):
    timm_models.cache_clear()
    monkeypatch.setattr("ssvit.models.timm_options.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"^encoder=timm: .*pip install timm"):
        build()


def test_a_list_of_outputs_has_no_features_of_patches():
    encoder = build(model="coat_tiny")
    images = torch.zeros(1, 3, 32, 32)
    with pytest.raises(UserError, match="coat_tiny"), torch.no_grad():
        encoder.pooled(next(encoder.layers(images)), PATCHES, images)


def test_timm_says_what_it_refuses():
    with pytest.raises(OptionError, match=r"^model=resnet10t: .*\bfoo\b"):
        build(arguments={"foo": 1})
