"""Contrastive tuning equals lightly's NNCLR and plain loops: queue, both phases, several processes, the command."""

import json
import math
from types import SimpleNamespace

import pytest
import tiny
import torch
from command import error_of, tiny_options
from lightly.loss import NTXentLoss
from lightly.models.modules import NNMemoryBankModule
from runs import final
from test_simclr import batch
from torchvision.ops import MLP

from ssvit.checkpoints import storage
from ssvit.checkpoints.checkpoint import Checkpoint
from ssvit.data.batch import Batch
from ssvit.data.sources.base_options import Subset
from ssvit.data.sources.shapes_options import Shapes
from ssvit.objectives import contrastive_options
from ssvit.objectives.contrastive import unit
from ssvit.objectives.schedule import Progress

TRAINED = ("encoder.blocks.1.", "encoder.norm.", "projector.", "predictor.")


def values(gradient: float = 1.0) -> dict[str, torch.Tensor]:
    return {"encoder_gradient": torch.tensor(gradient, dtype=torch.float64)}


def test_the_loss_is_that_of_a_plain_loop_and_made_of_lightlys():
    objective = tiny.contrastive_tuning(temperature=0.15).double()
    projections = tiny.noise(10, 8).double().requires_grad_()
    losses = objective.losses(projections)
    predictions = unit(objective.predictor(projections)).tolist()
    queue = objective.queue.tolist()

    def cosine(one, other):
        return sum(a * b for a, b in zip(one, other, strict=True))

    for i, one in enumerate(unit(projections.detach()).tolist()):
        near = max(queue, key=lambda other: cosine(one, other))
        others = predictions[5:] if i < 5 else predictions[:5]
        weights = [math.exp(cosine(near, other) / 0.15) for other in others]
        assert losses[i].item() == pytest.approx(-math.log(weights[i % 5] / sum(weights)))

    bank = NNMemoryBankModule(size=(20, 8))
    bank.bank = objective.queue.clone()
    near = [bank(part.detach()) for part in projections.split(5)]
    for place in range(2):
        torch.testing.assert_close(near[place], objective.queue[objective.nearest(projections)[place * 5 :][:5]])
    # lightly's loss has negatives from both views: without neighbours, its logits equal NT-Xent's.
    logits = objective.logits(projections, unit(objective.predictor(projections)))
    told = unit(objective.predictor(projections)).split(5)
    torch.testing.assert_close(logits, torch.cat([near[0] @ told[1].T, near[1] @ told[0].T]) / 0.15)
    assert NTXentLoss(0.15)(near[0], told[1]) > losses[:5].mean()
    assert objective.chance(5) == math.log(5)


def test_the_projector_is_torchvisions_with_the_same_names_of_weights():
    projector, x = tiny.contrastive_tuning().projector, torch.randn(4, 16)
    peer = MLP(16, [16, 16, 8], norm_layer=torch.nn.LayerNorm, activation_layer=torch.nn.GELU)
    peer.load_state_dict(projector.state_dict())
    torch.testing.assert_close(projector(x), peer(x), rtol=0, atol=0)


def test_gradients_equal_differences_and_layers_have_their_learning_rates():
    objective = tiny.contrastive_tuning()
    projections = tiny.noise(4, 8).double().requires_grad_()
    assert torch.autograd.gradcheck(tiny.contrastive_tuning().double().losses, projections)
    groups = objective.parameter_groups(weight_decay=0.05, layer_decay=0.5)
    shares = {id(weight): group["share"] for group in groups for weight in group["params"]}
    named = dict(objective.named_parameters())
    assert shares.keys() == {id(weight) for name, weight in named.items() if name.startswith(TRAINED)}
    assert shares[id(named["projector.0.weight"])] == 1
    assert shares[id(named["encoder.blocks.1.expand.weight"])] == 0.5


def test_only_the_heads_are_trained_first():
    objective = tiny.contrastive_tuning()
    for fraction, expected in ((0.2, [0, 0] + [1] * 9), (0, [1] * 11), (1, [0] * 11)):
        schedule = tiny.contrastive_tuning(heads_only=fraction).schedules["encoder_gradient"]
        assert [schedule(Progress(step, 11)) for step in range(11)] == expected
    losses, gradients = [], []
    weights = {name: weight for name, weight in objective.named_parameters() if weight.requires_grad}
    for factor in (1.0, 0.0, 0.25):
        losses.append(objective(batch(), (), values(factor))["loss"])
        gradients.append(torch.autograd.grad(losses[-1], list(weights.values())))
        torch.testing.assert_close(losses[-1], losses[0])
        for name, gradient, whole in zip(weights, gradients[-1], gradients[0], strict=True):
            scale = factor if name.startswith("encoder.") else 1
            torch.testing.assert_close(gradient, scale * whole, rtol=1e-3, atol=1e-6, msg=name)


@torch.no_grad()
def test_after_step_writes_the_first_views_to_the_queue():
    objective, views = tiny.contrastive_tuning().double(), batch().views
    expected = objective.queue.clone()
    expected[[18, 19, 0, 1]] = unit(objective.project(views["global"])[:4])
    outputs = objective(Batch(views, None, torch.arange(18, 22)), (), values())
    mean = {name: value / 2 for name, value in outputs.items()}  # with another process
    objective.after_step(mean, values(), torch.tensor(True))
    torch.testing.assert_close(objective.queue, expected)


def test_the_queue_has_fewer_images_than_the_training():
    tree = SimpleNamespace(subset=None, data=Shapes(images=100), encoder=None, recipe=None, augment=None)
    contrastive_options.ContrastiveTuning(queue=99).check(tree)
    assert error_of(contrastive_options.ContrastiveTuning(queue=100).check, tree).name == "queue"
    tree.subset = Subset(images=50)
    assert error_of(contrastive_options.ContrastiveTuning(queue=50).check, tree).name == "queue"


def test_a_run_interrupted_while_the_heads_alone_are_trained_ends_with_the_same_bits(tmp_path):
    tiny.train(tmp_path / "whole", objective=tiny.contrastive_tuning())
    with pytest.raises(tiny.Interrupted):  # in the third step of three
        tiny.train(tmp_path / "broken", objective=tiny.interrupted(tiny.contrastive_tuning(), 3), save_every=1)
    first = storage.load(Checkpoint.open(tmp_path / "broken"))
    assert first["optimizer"]["encoder.norm.weight/step"] == 0
    assert first["optimizer"]["projector.0.weight/step"] == 2
    tiny.train(tmp_path / "broken", objective=tiny.contrastive_tuning())
    assert final(tmp_path / "broken") == final(tmp_path / "whole")


def test_it_continues_from_a_run(outputs, tool):
    first, run = outputs / "masked_patch_shapes", outputs / "tuned"
    given = ["objective=contrastive_tuning", "objective.hidden=16", "objective.projection=8", "objective.queue=16"]
    short = tiny_options("data", "encoder", "target")
    given += [*short, f"checkpoint={first}", "name=tuned", "probes=[]", "evaluators.held_out.images=16"]
    tool("pretrain", *given)
    found = [json.loads(row) for row in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["train/encoder_gradient"] for row in found if "train/encoder_gradient" in row] == [0] + [1] * 5
    before, after = (storage.load(Checkpoint.open(path))["model"] for path in (first, run))
    for name in (name for name in after if name.startswith("encoder.") and after[name].is_floating_point()):
        assert before[name].equal(after[name]) == (not name.startswith(TRAINED) or not after[name].any()), name
    assert "is finished" in tool("pretrain", *given).stdout
