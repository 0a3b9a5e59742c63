"""The estimate of time and memory of a run: it changes nothing, and its parts add up; --dry-run."""

import re
from types import MappingProxyType

import pytest
import tiny
import torch
from command import TINY
from torch import nn

from ssvit.evaluation.evaluators.base import COST, Evaluation, Evaluator
from ssvit.training import estimate as estimation
from ssvit.training.estimate import estimate, flops_of_step
from ssvit.training.muon import block_matrices


# A centre and a teacher, a queue and frozen weights, labels.
@pytest.mark.parametrize(
    ("make", "optimizer"), [(tiny.dino, "muon"), (tiny.contrastive_tuning, "adamw"), (tiny.classify, "sgd")]
)
def test_it_changes_no_weight_buffer_gradient_or_random_state(make, optimizer):
    objective = make(dropout=0.2)
    objective.register_buffer("calls", torch.zeros(()))
    objective.register_forward_pre_hook(lambda module, inputs: module.calls.add_(1) and None)
    state, loader = tiny.state(objective, optimizer=optimizer, backend="eager")
    before = {name: value.clone() for name, value in objective.state_dict(keep_vars=False).items()}
    random = torch.get_rng_state()
    assert estimate(state, loader, {}).step > 0
    assert flops_of_step(objective, loader, state.recipe) > 0
    torch.testing.assert_close(objective.state_dict(), before, rtol=0, atol=0)
    assert all(parameter.grad is None for parameter in objective.parameters())
    assert torch.equal(random, torch.get_rng_state())
    assert loader.waited == 0


class Line(nn.Module):
    """Keeps its input, and the input's square, for the backward pass: two tensors of `numbers` float32 an image."""

    encoder = None
    prepared_images = 0
    schedules = MappingProxyType({})

    def __init__(self, numbers):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(numbers))

    def parameter_groups(self, *, weight_decay, layer_decay):
        return [{"params": [self.weight], "share": 1.0, "decays": False}]

    def sample(self, slots, *, seed):
        return ()

    def frozen(self, scheduled):
        return ()

    def references(self):
        return ()

    def forward(self, batch, noise, scheduled=None):
        x = batch.images.flatten(1).float()
        return {"loss": (x * self.weight).square().sum()}


def test_memory_is_counted():
    numbers = 3 * 16 * 16
    state, loader = tiny.state(Line(numbers), precision="32-true", ema=0.9, backend="eager")
    assert estimate(state, loader, {}).memory == {
        "weights": 2 * 4 * numbers,  # and their average
        "gradients": 4 * numbers,
        "optimizer": 2 * 4 * numbers,
        "activations": 8 * 2 * 4 * numbers,
    }


def test_muon_keeps_one_value_of_each_number_of_a_matrix():
    state, loader = tiny.state(tiny.mae(), optimizer="muon")
    matrices = block_matrices(state.objective)
    trained = [weight for weight in state.objective.parameters() if weight.requires_grad]
    expected = sum(weight.nbytes * (1 if weight in matrices else 2) for weight in trained)
    assert estimate(state, loader, {}).memory["optimizer"] == expected


class Look(Evaluator):
    def __init__(self, images, every=None, at_end=False):
        self.images, self.every, self.at_end = images, every, at_end

    def __call__(self, objective, history=None):
        return Evaluation(metrics={})


def test_steps_evaluations_the_runs_of_a_comparison_and_the_remaining_steps_are_counted(monkeypatch):
    monkeypatch.setattr(estimation, "_step", lambda state, loader, images, *, backward: (0.25 * images, 0))
    monkeypatch.setattr(estimation, "_update", lambda state: 0.5)
    state, loader = tiny.state(tiny.model(), steps=12, evaluate_every=6)
    found = estimate(state, loader, {"a": Look(80), "b": Look(100, every=4), "c": Look(1000, at_end=True)})
    assert (found.steps, found.step) == (12, 0.25 * 8 + 0.5)
    assert found.training == pytest.approx(12 * found.step)
    cost = COST * 0.25
    assert found.evaluations == pytest.approx(cost * (80 * 3 + 100 * 4 + 1000))
    assert (found.evaluation, found.final) == pytest.approx((cost * (80 + 100), cost * 1000))
    longer = state.recipe.changed(steps=18, batch_size=4)
    found = estimate(
        state,
        loader,
        {"a": Look(80)},
        recipes=lambda seconds: [state.recipe, longer],
        first_step=6,
        ending=lambda step: 3.0,
    )
    assert (found.runs, found.steps) == (2, 6)
    assert found.training == pytest.approx(6 * (0.25 * 8 + 0.5) + 18 * (0.25 * 4 + 0.5))
    evaluations = 2 + 4  # after steps 6 and 12 of the first run, and 0, 6, 12 and 18 of the second
    assert found.evaluations == pytest.approx(cost * 80 * evaluations)
    assert found.total == pytest.approx(found.training + found.evaluations + 3 + found.measurement)


class Slow(Look):
    """An evaluator whose trial takes a quarter of a second of a clock for each image."""

    def trial(self, objective, images):
        self.now[0] += 0.25 * min(images, self.images)
        return min(images, self.images)


def test_an_evaluation_is_timed_on_a_part_of_its_images(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(estimation, "clock", lambda device: now[0])
    monkeypatch.setattr(estimation, "_step", lambda state, loader, images, *, backward: (images, 0))
    state, loader = tiny.state(tiny.model(), steps=12, evaluate_every=6)
    evaluator = Slow(1000)
    evaluator.now = now
    assert estimate(state, loader, {"slow": evaluator}).evaluation == pytest.approx(250)


def test_a_compiled_run_is_timed_without_compiling():
    torch._dynamo.utils.counters.clear()
    found = estimate(*tiny.state(tiny.model(), backend="compile"), {})
    assert found.compiles
    assert found.step > 0
    assert found.memory["activations"] > 0
    assert not torch._dynamo.utils.counters["frames"]


@pytest.mark.parametrize("flag", ["--dry-run", "--show-config"])
def test_a_dry_run_prints_sizes_and_the_estimate_and_writes_nothing(tool, tmp_path, flag):
    printed = tool("pretrain", flag, *TINY, "recipe.lr=0.0017").stdout
    sizes = re.search(r"encoder (\S+) .*objective (\S+) .*trained (\S+)", printed)
    encoder, objective, trained = map(float, sizes.groups())
    assert encoder <= objective == trained
    estimated, configuration = printed.find("\nestimated: "), printed.find("\n  lr: 0.0017\n")
    assert estimated >= 0
    assert configuration > estimated if flag == "--show-config" else configuration == -1
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_of_fine_tuning_says_how_many_runs_there_are(tool, outputs):
    before = sorted(outputs.rglob("*"))
    printed = tool("finetune", "--dry-run", "compare=scratch", "recipe.steps=70", "recipe.batch_size=8").stdout
    compared = [line.split() for line in printed.splitlines() if line.startswith("compare:")]
    assert [words[6] for words in compared] == ["pretrained", "scratch"]
    assert sorted(outputs.rglob("*")) == before
