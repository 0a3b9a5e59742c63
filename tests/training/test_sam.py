"""SAM: an update equals the two-step formula, with accumulation and in two processes; a skipped step has no effect."""

import pytest
import tiny
import torch
from runs import assert_close, train_in_processes

from ssvit.data.batch import Batch
from ssvit.models import timm_options
from ssvit.objectives import classify_options
from ssvit.objectives.base import Objective
from ssvit.objectives.classify import Classify
from ssvit.training import loop

RHO = 0.3
OPTIONS = {"sam": RHO, "precision": "64-true", "ema": 0.0, "backend": "eager"}


def gradients(objective: Objective, batch: Batch) -> list[torch.Tensor]:
    loss = objective(batch, objective.sample(batch.slots, seed=0))["loss"]
    return list(torch.autograd.grad(loss, list(objective.parameters())))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_an_update_uses_the_gradient_at_the_perturbed_weights(accumulate):
    options = {**OPTIONS, "clip": 0.0, "optimizer": "sgd", "warmup": 0}
    state, loader = tiny.state(tiny.model().double(), **options, accumulate=accumulate)
    loop.update(state, loader.batches(0, 1), 0)
    plain = tiny.model().double()
    before = [weight.detach().clone() for weight in plain.parameters()]
    (batch,) = tiny.state(tiny.model().double(), **options, accumulate=1)[1].batches(0, 1)
    first = gradients(plain, batch)
    norm = sum(gradient.square().sum() for gradient in first).sqrt()
    with torch.no_grad():
        for weight, gradient in zip(plain.parameters(), first, strict=True):
            weight += RHO * gradient / norm
    second = gradients(plain, batch)
    decays = {id(weight) for group in state.optimizer.param_groups if group["decays"] for weight in group["params"]}
    for weight, old, gradient in zip(state.objective.parameters(), before, second, strict=True):
        decay = state.recipe.weight_decay if id(weight) in decays else 0.0
        expected = old - state.recipe.lr * (gradient + decay * old)
        torch.testing.assert_close(weight.detach(), expected, rtol=1e-9, atol=1e-12)


def test_a_skipped_step_restores_the_weights_exactly():
    objective = tiny.model().double()
    forward = type(objective).forward

    def not_finite(self, *inputs):
        return tiny.not_finite(forward(self, *inputs))

    state, loader = tiny.state(objective, **OPTIONS)
    before = {name: weight.detach().clone() for name, weight in state.objective.named_parameters()}
    state.objective.__class__ = type("NotFinite", (type(objective),), {"forward": not_finite})
    assert not loop.update(state, loader.batches(0, 1), 0).applied
    for name, weight in state.objective.named_parameters():
        assert torch.equal(weight, before[name]), name


@pytest.mark.parametrize("accumulate", [1, 2])
def test_batch_norm_statistics_are_those_of_the_forward_pass_at_the_unperturbed_weights(accumulate):
    statistics = []
    for sam in (0.0, RHO):
        torch.manual_seed(0)
        encoder = timm_options.Timm(model="test_resnet", image_size=16).build()
        objective = Classify(classify_options.Classify(classes=tiny.CLASSES), encoder=encoder)
        state, loader = tiny.state(objective, **OPTIONS | {"sam": sam}, accumulate=accumulate)
        first = state.objective.encoder.model.bn1.running_var.clone()
        loop.update(state, loader.batches(0, 1), 0)
        norms = [module for module in objective.modules() if isinstance(module, torch.nn.BatchNorm2d)]
        assert all(norm.num_batches_tracked == accumulate for norm in norms)
        assert not torch.equal(state.objective.encoder.model.bn1.running_var, first)
        statistics.append([buffer for norm in norms for buffer in norm.buffers()])
    torch.testing.assert_close(*statistics, rtol=0, atol=0)


@pytest.mark.parametrize("strategy", ["auto", "fsdp"])
def test_two_processes_compute_the_weights_of_one(tmp_path, strategy):
    options = {"steps": 4, "sam": RHO, "precision": "64-true", "ema": 0.5}
    tiny.train(tmp_path / "one", **options)
    assert train_in_processes(tmp_path / "two", 2, strategy=strategy, **options) == [0, 0]
    assert_close(tmp_path / "one", tmp_path / "two")
