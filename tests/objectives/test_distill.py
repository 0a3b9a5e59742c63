"""Distillation equals plain formulas in float64, and a student of another architecture learns a teacher's features."""

import itertools
import json
import math
import shutil
import sys

import pytest
import tiny
import torch
import torch.nn.functional as F
from command import tiny_options
from images import picture, put, put_set
from runs import final, kill_after, rows

from ssvit.checkpoints.checkpoint import PRETRAIN
from ssvit.cli import find_command
from ssvit.data.batch import Batch
from ssvit.data.loader import Loader
from ssvit.loading.options import LoadTeacher
from ssvit.models import timm_options
from ssvit.models.timm import Timm
from ssvit.models.vit import ViT
from ssvit.objectives.distill import Distill
from ssvit.training import session as sessions

COUNT = 24
INDICES = torch.tensor([5, 2, 0, 3, 1, 4])


def given(count: int = COUNT) -> Batch:
    """The first pictures, each with its index."""
    return Batch.of_view(tiny.pictures(count), slots=torch.arange(count))._replace(indices=torch.arange(count))


def fitted(**options) -> Distill:
    objective = tiny.shaken(tiny.distill(**options), by=0.3)
    objective.prepare(itertools.repeat(given()))
    return objective.double().eval()


def features_of_teacher(teacher: ViT, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The class token's output and those of the patches on a grid of 4x4, by torch's functions one by one."""
    resized = F.interpolate(images.float() / 255, (24, 24), mode="bicubic", antialias=True).clamp(0, 1)
    outputs = teacher(resized)
    patches = outputs[:, 1:].unflatten(1, (3, 3)).movedim(3, 1)
    return outputs[:, 0], F.interpolate(patches, (4, 4), mode="bilinear", antialias=True).movedim(1, 3)


def mean_of_losses(predictions: list[list[float]], targets: list[list[float]], kind: str) -> float:
    losses = []
    for prediction, target in zip(predictions, targets, strict=True):
        pairs = list(zip(prediction, target, strict=True))
        if kind == "cosine":
            product = sum(x * y for x, y in pairs)
            losses.append(1 - product / math.hypot(*prediction) / math.hypot(*target))
        else:
            differences = [abs(x - y) for x, y in pairs]
            losses.append(sum(x**2 / 2 if x < 1 else x - 0.5 for x in differences) / len(pairs))
    return sum(losses) / len(losses)


@pytest.mark.parametrize("kind", ["cosine", "smooth_l1"])
@pytest.mark.parametrize("features", ["both", "pooled", "patches"])
def test_the_loss_is_that_of_a_plain_loop_on_standardised_targets(features, kind):
    objective = fitted(features=features, loss=kind)
    batch = given(6)
    result = objective(batch)
    everything = features_of_teacher(objective.teacher, tiny.pictures(COUNT))
    outputs = objective.encoder(batch.images)
    expected = {}
    for name, values, output in zip(("pooled", "patches"), everything, (outputs[:, 0], outputs[:, 1:]), strict=True):
        if features in ("both", name):
            every = values.flatten(0, -2).double()
            std, mean = torch.std_mean(every, dim=0, correction=0)
            targets = (values[:6].flatten(0, -2).double() - mean) / std
            head = objective.heads[name]
            predictions = output.flatten(0, -2) @ head.weight.T + head.bias
            expected[name] = mean_of_losses(predictions.tolist(), targets.tolist(), kind)
    assert result["loss"].item() == pytest.approx(sum(expected.values()) / len(expected), rel=1e-4)
    if features == "both":
        assert {name: value.item() for name, value in result.items() if name != "loss"} == pytest.approx(
            expected, rel=1e-4
        )


def test_both_encoders_see_the_same_mixture():
    objective = tiny.distill(mixup=True).eval()
    seen = {}
    for name, encoder in (("student", objective.encoder), ("teacher", objective.teacher)):
        encoder.register_forward_pre_hook(lambda module, inputs, name=name: seen.update({name: inputs[0]}))
    batch = given(6)
    (shares,) = objective.sample(batch.slots, seed=3)
    objective(batch, (shares,))
    images = batch.images / 255
    for number in range(6):
        mixed = shares[number].item() * images[number] + (1 - shares[number].item()) * images[number - 1]
        torch.testing.assert_close(seen["student"][number], mixed)
    resized = F.interpolate(seen["student"], (24, 24), mode="bicubic", antialias=True).clamp(0, 1)
    torch.testing.assert_close(seen["teacher"], resized)
    assert 0 <= shares.min() < 0.5 < shares.max() <= 1


def test_cached_targets_are_those_of_the_first_view_of_each_image(tmp_path):
    views = [given()._replace(views={"image": tiny.pictures(COUNT).flip(-1)}), given()]
    objective = tiny.distill(features="pooled", cached=True)
    objective.prepare(iter([views[0], *itertools.repeat(views[1], 200)]))
    expected, _ = features_of_teacher(objective.teacher, views[0].images)
    torch.testing.assert_close(objective.cached.float(), expected, rtol=1e-3, atol=1e-3)
    del objective._teacher  # is not called again
    batch = Batch.of_view(tiny.pictures(6), slots=torch.arange(6))._replace(indices=INDICES)
    objective.eval()
    target = (objective.cached[INDICES].float() - objective.pooled_mean) / objective.pooled_std
    prediction = objective.heads["pooled"](objective.encoder.represent(batch.images))
    expected = mean_of_losses(prediction.tolist(), target.tolist(), "cosine")
    assert objective(batch)["loss"].item() == pytest.approx(expected, rel=1e-5)


def test_an_unreadable_image_gets_the_mean_of_the_targets(tmp_path):
    for number in range(120):
        put(tmp_path / f"{number:03}.png", b"broken" if number == 7 else picture(number, size=(16, 16)))
    objective = tiny.distill(images=120, cached=True, features="pooled").eval()
    loader = Loader(source=tiny.source(tmp_path), transform=tiny.transform(objective), batch_size=50, seed=0)
    assert "119 images" in objective.prepare(loader.batches(0, sys.maxsize))
    torch.testing.assert_close(objective.cached[7].float(), objective.pooled_mean, rtol=1e-3, atol=1e-3)
    assert not any(row.equal(objective.cached[7]) for number, row in enumerate(objective.cached) if number != 7)


def test_a_student_learns_the_features_and_the_teacher_stays(tmp_path):
    objective = tiny.distill()
    before = {name: value.clone() for name, value in objective.teacher.state_dict().items()}
    tiny.train(tmp_path, objective=objective, steps=100, warmup=10, save_every=100, batch_size=24)
    losses = rows(tmp_path, "train/loss")
    assert losses[100] < 0.6 * losses[1]
    assert all(value.equal(before[name]) for name, value in objective.teacher.state_dict().items())
    assert not any("teacher" in name for name in objective.state_dict())


@pytest.mark.parametrize("model", ["test_resnet", "vit_tiny_patch16_224"])
def test_a_student_and_a_teacher_may_be_models_of_timm(model):
    pytest.importorskip("timm")
    arguments = {"depth": 1, "embed_dim": 24, "num_heads": 2} if "vit" in model else {}
    student, teacher = (Timm(timm_options.Timm(model=model, image_size=32, arguments=arguments)) for _ in range(2))
    objective = Distill(tiny.distill().options, encoder=student, images=COUNT, teacher=teacher)
    batch = Batch.of_view(tiny.pictures(4, 32), slots=torch.arange(4))
    loss = objective(batch)["loss"]
    loss.backward()
    assert all(weight.grad is not None for weight in objective.parameters())
    assert not any(weight.requires_grad for weight in teacher.parameters())


def test_the_image_size_of_the_teacher_suits_the_images(tmp_path):
    peers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 126, "patch_size": 14}
    model = peers.Dinov2Model(peers.Dinov2Config(**sizes)).eval()
    model.save_pretrained(tmp_path)
    for size, expected in ((32, 98), (112, 112), (160, 126)):
        loaded = LoadTeacher(path=tmp_path, side=size).build()
        assert loaded.image_size == (expected, expected)
    images = torch.rand(2, 3, 126, 126)  # of the last size, at which positions are not resized
    with torch.no_grad():
        expected = model((images - loaded.mean[:, None, None]) / loaded.std[:, None, None]).pooler_output
        torch.testing.assert_close(loaded.represent(images), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("options", [("objective.mixup=true",), ("objective.cached=true", "objective.features=pooled")])
@pytest.mark.parametrize("devices", [1, 2])
def test_a_killed_run_continues_to_the_same_bits(options, devices, tool, tmp_path):
    run = tiny_options("target")
    command = [*run, "objective=distill", f"teacher={tiny.TEACHER}", *options, f"launch.devices={devices}"]
    tool("pretrain", *command, "name=whole")
    kill_after(tmp_path, "step 5/", *command, "name=killed")
    assert not (tmp_path / "outputs" / "killed" / "step_00000006").exists()
    tool("pretrain", *command, "name=killed")
    whole, killed = (final(tmp_path / "outputs" / name) for name in ("whole", "killed"))
    assert whole == killed


def test_a_teacher_of_other_weights_ends_the_continuation_of_a_run(outputs, tool):
    run = [*tiny_options("target"), "probes=[]"]
    command = [*run, "objective=distill", "name=run", "recipe.steps=4", f"teacher={outputs / tiny.TEACHER.name}"]
    tool("pretrain", *command)
    shutil.rmtree(outputs / tiny.TEACHER.name / "step_00000006")  # leaves an older checkpoint
    line = tool("pretrain", *command, status=1).stderr
    assert line.startswith("ssvit: teacher: ")


def test_a_run_is_compared_with_its_teacher(outputs, tool, tmp_path):
    put_set(tmp_path / "images", 48, (16, 16), ("train", "test"))
    run = ["objective=distill", f"teacher={outputs / tiny.TEACHER.name}", f"data={tmp_path / 'images'}", "preset=null"]
    size = tiny_options("data=", "data.images", "data.held", "target")
    tool("pretrain", *run, *size, "probes=[knn]", "name=run")
    report = json.loads((outputs / "run" / "evaluation" / "report.json").read_text())
    assert {one["encoder"] for one in report["standings"]} == {"run", tiny.TEACHER.name}


@pytest.mark.parametrize(("limit", "images"), [(10, 20), (1000, 64 + 32)])
def test_the_comparison_with_the_teacher_is_estimated_for_the_images_that_exist(tmp_path, monkeypatch, limit, images):
    monkeypatch.setattr(sessions, "timed", lambda *_, **__: (1.0, None))
    size = tiny_options("target")
    limits = [f"probing.train_images={limit}", f"probing.test_images={limit}"]
    line = ["objective=distill", f"teacher={tiny.TEACHER}", f"outputs={tmp_path}", *size, *limits]
    command = find_command("pretrain")
    options = command.compose(command.line(line)).options
    found = sessions.Session(options, tmp_path, stage=PRETRAIN).estimate(options)
    assert found.ending - sessions._REPORT == 2 * images  # by the student and by the teacher
