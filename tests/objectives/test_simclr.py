"""Contrastive learning beside lightly's loss and plain loops, its views, several processes, and the panel."""

import math
import os

import pytest
import tiny
import torch
import torch.nn.functional as F
from lightly.loss import NTXentLoss
from plots import curves
from ranks import child, together

from ssvit.data.augment.crop import CenterCrop
from ssvit.data.batch import Batch
from ssvit.evaluation.panels import contrast, contrast_options
from ssvit.evaluation.panels.contrast import Contrast
from ssvit.objectives.contrastive import similarities, unit


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def batch(count: int = 4, seed: int = 0) -> Batch:
    slots = torch.arange(count)
    return Batch(tiny.transform(tiny.simclr())(tiny.pictures(count), slots, seed), None, slots)


def test_the_loss_is_lightlys_and_that_of_a_plain_double_loop():
    objective = tiny.simclr()
    projections = random(10, 8).requires_grad_()
    losses = objective.losses(projections)
    (gradient,) = torch.autograd.grad(losses.mean(), projections)
    theirs = NTXentLoss(temperature=0.2)(*projections.split(5))
    torch.testing.assert_close(losses.mean(), theirs, rtol=1e-12, atol=0)
    torch.testing.assert_close(gradient, torch.autograd.grad(theirs, projections)[0], rtol=1e-9, atol=1e-12)
    vectors = [vector / vector.norm() for vector in projections.detach()]
    for i, one in enumerate(vectors):
        weights = [math.exp(one @ other / 0.2) if j != i else 0.0 for j, other in enumerate(vectors)]
        assert losses[i].item() == pytest.approx(-math.log(weights[(i + 5) % 10] / sum(weights)))
    alike = torch.ones(10, 8)
    torch.testing.assert_close(objective.losses(alike), torch.full((10,), math.log(9)))
    assert objective.chance(5) == math.log(9)


def test_gradients_equal_differences():
    assert torch.autograd.gradcheck(tiny.simclr().losses, random(6, 3).requires_grad_())


def test_only_kept_patches_are_encoded():
    objective, images, lengths = tiny.simclr().eval(), batch().views["global"], []
    hook = objective.encoder.blocks[0].register_forward_pre_hook(lambda _, inputs: lengths.append(inputs[0].shape[1]))
    ids = objective.sample(torch.arange(4), seed=3)[0]
    assert all(len(set(row)) == 8 for view in ids.tolist() for row in view)
    objective.project(images, (ids,))
    assert lengths == [1 + 8]
    hook.remove()
    every = (torch.arange(16).expand(4, 2, -1),)
    torch.testing.assert_close(objective.project(images, every), objective.project(images), rtol=1e-4, atol=1e-5)
    assert tiny.simclr(keep=1.0).sample(torch.arange(4), seed=3) == ()
    assert tiny.simclr(keep=0.01).sample(torch.arange(4), seed=3)[0].shape[-1] == 1


def test_cosines_are_in_float32_under_autocast():
    with torch.autocast("cpu", torch.bfloat16):
        logits, _ = similarities(unit(random(8, 4).float()), unit(random(8, 4).float()), 0, 0.2)
    assert logits.dtype == torch.float32
    assert not logits.equal(logits.bfloat16().float())


def compiled_in_a_process(rank: int, file: str, world: int) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=world)
    objective, whole = tiny.simclr().double(), batch()
    part = slice(2 * rank, 2 * rank + 2)
    noise = objective.sample(whole.slots[part], seed=0)
    compiled = torch.compile(objective, backend="aot_eager", fullgraph=True)
    loss = compiled(Batch({"global": whole.views["global"][part]}, None, whole.slots[part]), noise)["loss"]
    loss.backward()
    gradients = {name: one.grad for name, one in objective.named_parameters() if one.grad is not None}
    torch.save((loss.detach(), gradients), f"{file}.{rank}")
    os._exit(0)


def test_two_processes_have_ones_gradient_when_compiled(tmp_path):
    file = str(tmp_path / "rendezvous")
    assert together(child(compiled_in_a_process, rank, file, 2) for rank in range(2)) == [0, 0]
    objective = tiny.simclr().double()
    loss = objective(batch(), objective.sample(torch.arange(4), seed=0))["loss"]
    loss.backward()
    parts = [torch.load(f"{file}.{rank}") for rank in range(2)]
    torch.testing.assert_close(sum(part[0] for part in parts) / 2, loss.detach())
    for name, gradient in parts[0][1].items():
        own = objective.get_parameter(name).grad
        torch.testing.assert_close((gradient + parts[1][1][name]) / 2, own, rtol=1e-9, atol=1e-12, msg=name)


def panel(objective, **given) -> Contrast:
    given = {"images": 20, "batch_size": 8, **given}
    return Contrast(
        contrast_options.Contrast(**given),
        source=tiny.source(),
        transform=CenterCrop(size=16),
        augment=tiny.transform(objective),
    )


@torch.no_grad()
def test_the_panel_is_what_plain_loops_give():
    objective = tiny.simclr().double().eval()
    metrics = panel(objective)(objective).metrics
    images, slots = (torch.cat(parts) for parts in zip(*panel(objective).batches, strict=True))
    views = tiny.transform(objective)(images, slots, 0)["global"]
    projections = objective.head(objective.encoder.represent(views.transpose(0, 1).flatten(0, 1)))
    vectors = [vector / vector.norm() for vector in projections]
    found = []
    for i, one in enumerate(vectors):
        cosine = [-2.0 if i == j else (one @ other).item() for j, other in enumerate(vectors)]
        found.append(cosine.index(max(cosine)) == (i + 20) % 40)
    apart = [
        [((one - other) ** 2).sum().item() for i, one in enumerate(part) for other in part[:i]]
        for part in (vectors[:20], vectors[20:])
    ]
    logs = [math.log(sum(math.exp(-2 * distance) for distance in part) / 190) for part in apart]
    features = F.normalize(objective.encoder.represent(images), dim=-1)
    expected = {
        "loss": NTXentLoss(temperature=0.2)(*projections.split(20)).item(),
        "loss_by_chance": math.log(39),
        "top1": sum(found) / 40,
        "top1_by_chance": 1 / 39,
        "alignment": sum(((one - two) ** 2).sum().item() for one, two in zip(vectors, vectors[20:], strict=False)) / 20,
        "distance": sum(map(sum, apart)) / 380,
        "uniformity": sum(logs) / 2,
        "feature_std": math.sqrt(sum(features.var(0, correction=0).tolist())),
        "feature_cosine": ((features @ features.T).sum().item() - 20) / 380,
    }
    assert metrics == pytest.approx(expected, rel=1e-5, abs=1e-7)
    assert panel(objective, batch_size=20)(objective).metrics == pytest.approx(metrics, rel=1e-5)
    assert panel(objective, seed=1)(objective).metrics["loss"] != metrics["loss"]


@torch.no_grad()
def test_the_panel_draws_what_it_measured():
    objective = tiny.simclr().eval()
    first = panel(objective)(objective).metrics
    found = panel(objective)(objective, [{"step": 0, **first}, {"step": 5}])
    assert set(found.figures) == {"learning", "neighbours"}
    lines = curves(found.figures["learning"])
    assert lines["by chance"] == pytest.approx([100 / 39] * 2)
    assert lines["of different images"] == [first["distance"]] * 2
    assert lines["chance, held-out"] == math.log(39)
    images = torch.cat([images for images, _ in panel(objective).batches])
    for place, row in enumerate(found.figures["neighbours"].rows):
        torch.testing.assert_close(row[0].image, images[place * 20 // 8] / 255)


def test_words_say_whether_it_has_learned_or_collapsed():
    apart = F.normalize(random(40, 16, seed=1), dim=-1)
    alike = F.normalize(1 + apart / 100, dim=-1)
    pairs, strangers = apart.repeat(2, 1), F.normalize(random(80, 16), dim=-1)
    cases = {
        "the model tells images apart, better": (pairs, apart, 1.0, {}),
        "the model tells": (pairs, apart, 1.0, {"loss": 3.0, "top1": 0.1}),
        "the loss has fallen, but views find each other NO more often": (pairs, apart, 1.0, {"loss": 3.0, "top1": 1.0}),
        "the model does NOT tell images apart": (pairs, apart, 1.0, {"loss": 0.5, "top1": 1.0}),
        "the model does NOT": (strangers, apart, 9.0, {}),
        "COLLAPSED, or hardly begun: all features": (pairs, alike, 1.0, {}),
    }
    for words, (projections, features, loss, start) in cases.items():
        metrics = contrast.measure(projections) | contrast.spread_of(features)
        told = contrast.describe({"loss": loss, "loss_by_chance": math.log(79), **metrics}, start)
        assert told[-1].startswith(words)
        assert ["at step 0" in line for line in told[:2]] == [bool(start)] * 2
        assert ("NO better than chance" in told[0]) == (loss == 9)
