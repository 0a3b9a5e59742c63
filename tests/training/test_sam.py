"""SAM: an update by plain torch, one and several processes, accumulation, a loss that is not finite, resume."""

import pytest
import tiny
import torch
from runs import spread

from ssvit.checkpoints import storage
from ssvit.checkpoints.checkpoint import Checkpoint
from ssvit.data.batch import Batch
from ssvit.data.loader import Loader
from ssvit.objectives.base import Objective
from ssvit.training import loop, runtime
from ssvit.training.recipe import Recipe
from ssvit.training.state import State

RHO = 0.3


def made(objective, **options):
    recipe = Recipe(**{**tiny.RECIPE, "precision": "64-true", "ema": 0.0, "backend": "eager", "sam": RHO, **options})
    fabric = runtime.start(recipe, accelerator="cpu")
    loader = Loader(
        source=tiny.source(), transform=tiny.transform(objective), seed=0, batch_size=8, accumulate=recipe.accumulate
    )
    return State(fabric, objective.double(), recipe), loader


def gradients(objective: Objective, batch: Batch) -> list[torch.Tensor]:
    weights = list(objective.parameters())
    return torch.autograd.grad(objective(batch, objective.sample(batch.slots, seed=0))["loss"], weights)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_an_update_takes_the_gradient_of_the_point_up_the_hill(accumulate):
    state, loader = made(tiny.model(), accumulate=accumulate, clip=0.0, optimizer="sgd", momentum=0.0, warmup=0)
    loop.update(state, loader.batches(0, 1), 0)
    plain = tiny.model().double()
    before = [weight.detach().clone() for weight in plain.parameters()]
    (batch,) = made(tiny.model())[1].batches(0, 1)
    first = gradients(plain, batch)
    norm = sum(one.square().sum() for one in first).sqrt()
    with torch.no_grad():
        for weight, one in zip(plain.parameters(), first, strict=True):
            weight += RHO * one / norm
    second = gradients(plain, batch)
    decays = {id(weight) for group in state.optimizer.param_groups if group["decays"] for weight in group["params"]}
    for weight, old, one in zip(state.objective.parameters(), before, second, strict=True):
        decay = 0.05 if id(weight) in decays else 0.0
        torch.testing.assert_close(weight.detach(), old - state.recipe.lr * (one + decay * old), rtol=1e-9, atol=1e-12)


def test_a_step_that_is_skipped_leaves_the_weights_bit_for_bit():
    state, loader = made(tiny.model())
    before = {name: weight.detach().clone() for name, weight in state.objective.named_parameters()}
    forward = type(state.objective).forward

    def broken(self, *inputs):
        return {name: value * float("inf") for name, value in forward(self, *inputs).items()}

    state.objective.__class__ = type("Broken", (type(state.objective),), {"forward": broken})
    numbers = loop.update(state, loader.batches(0, 1), 0)
    assert not numbers.applied
    for name, weight in state.objective.named_parameters():
        assert torch.equal(weight, before[name]), name


@pytest.mark.parametrize("strategy", ["auto", "fsdp"])
def test_two_processes_train_as_one_does(tmp_path, strategy):
    options = {"steps": 6, "sam": RHO, "precision": "64-true", "ema": 0.5}
    tiny.train(tmp_path / "one", **options)
    assert spread(tmp_path / "two", 2, strategy=strategy, **options) == [0, 0]
    one, two = (storage.load(Checkpoint.open(tmp_path / name / "step_00000006"))["model"] for name in ("one", "two"))
    torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-8)
