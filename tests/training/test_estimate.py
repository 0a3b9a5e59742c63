"""What a run will take is told before it begins, is near what it then takes, and changes nothing of it."""

import re
from types import MappingProxyType

import pytest
import tiny
import torch
from command import TINY, one_line
from torch import nn

from ssvit.data.loader import Loader
from ssvit.evaluation.panels.base import Evaluation, Evaluator
from ssvit.training import estimate as estimation
from ssvit.training import runtime
from ssvit.training.estimate import Estimate, duration, estimate, size
from ssvit.training.muon import block_matrices
from ssvit.training.recipe import Recipe
from ssvit.training.state import State

OBJECTIVES = (
    tiny.model, tiny.mae, tiny.dino, tiny.ibot, tiny.latent, tiny.simclr, tiny.contrastive_tuning, tiny.classify,
)  # fmt: skip


def parts(objective, **recipe):
    numbers = Recipe(**{**tiny.RECIPE, **recipe})
    fabric = runtime.start(numbers, accelerator="cpu")
    state = State(fabric, objective, numbers)
    loader = Loader(source=tiny.labelled(), transform=tiny.transform(objective), seed=0, batch_size=numbers.batch_size)
    return state, loader


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "sgd"])
@pytest.mark.parametrize("make", OBJECTIVES)
def test_it_changes_no_weight_buffer_gradient_or_random_state(make, optimizer):
    objective = make(dropout=0.2)
    objective.register_buffer("calls", torch.zeros(()))
    objective.register_forward_pre_hook(lambda module, inputs: module.calls.add_(1) and None)
    state, loader = parts(objective, optimizer=optimizer)
    before = {name: value.clone() for name, value in objective.state_dict(keep_vars=False).items()}
    random = torch.get_rng_state()
    found = estimate(state, loader, {})
    assert found.step > 0
    after = objective.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(parameter.grad is None for parameter in objective.parameters())
    assert torch.equal(random, torch.get_rng_state())
    assert loader.waited == 0


class Line(nn.Module):
    """Keeps its input, and the input's square, for the backward pass: two tensors of `numbers` float32 an image."""

    encoder = None
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

    def forward(self, batch, noise, scheduled=None):
        x = batch.images.flatten(1).float()
        return {"loss": (x * self.weight).square().sum()}


def test_memory_is_counted():
    numbers = 3 * 16 * 16
    objective = Line(numbers)
    state, loader = parts(objective, precision="32-true", batch_size=8, ema=0.9, backend="eager")
    loader.transform = tiny.transform(objective)
    found = estimate(state, loader, {})
    assert found.gradients == 4 * numbers
    assert found.moments == 2 * 4 * numbers
    assert found.weights == 2 * 4 * numbers  # and their average
    assert found.activations == 8 * 2 * 4 * numbers
    assert found.memory > found.resident > 1e7


class Look(Evaluator):
    def __init__(self, images, every=None, at_end=False):
        self.images, self.every, self.at_end = images, every, at_end

    def __call__(self, objective, history=None):
        return Evaluation(metrics={})


def test_muon_keeps_one_mean_of_a_matrix():
    state, loader = parts(tiny.mae(), optimizer="muon")
    one = {id(weight) for weight in block_matrices(state.objective)}
    expected = sum(weight.nbytes * (1 if id(weight) in one else 2) for weight in state.objective.parameters()
                   if weight.requires_grad)  # fmt: skip
    assert estimate(state, loader, {}).moments == expected


def test_evaluations_are_counted_from_the_step_on_where_the_run_goes_on(monkeypatch):
    monkeypatch.setattr(estimation, "_update", lambda state: 0.0)
    state, loader = parts(tiny.model(), steps=12, evaluate_every=6)
    looks = {"a": Look(80), "b": Look(100, every=4), "c": Look(1000, at_end=True)}
    for first, images in ((0, 80 * 3 + 100 * 4 + 1000), (7, 80 + 100 * 2 + 1000)):
        found = estimate(state, loader, looks, first=first)
        assert found.steps == 12 - first
        assert found.evaluations == pytest.approx(0.5 * images * found.step / 8)
        assert found.seconds == pytest.approx(found.steps * found.step + found.evaluations)


@pytest.mark.parametrize(("sam", "passes"), [(0.0, 1), (0.05, 2)])
def test_a_step_of_sam_takes_two_passes_and_an_evaluation_none_more(monkeypatch, sam, passes):
    monkeypatch.setattr(estimation, "_step", lambda state, loader, images, *, backward: (0.25 * images, 0))
    monkeypatch.setattr(estimation, "_update", lambda state: 0.5)
    state, loader = parts(tiny.model(), steps=12, evaluate_every=6, sam=sam)
    found = estimate(state, loader, {"a": Look(80)})
    assert found.step == pytest.approx(passes * 0.25 * 8 + 0.5)
    assert found.evaluations == pytest.approx(0.5 * 3 * 80 * 0.25)


def test_a_compiled_run_is_not_timed():
    state, loader = parts(tiny.model(), backend="compile")
    found = estimate(state, loader, {})
    assert found.step is None
    assert found.activations > 0
    assert found.line.startswith("estimated: time after the first steps; ")


def test_it_is_told_in_words():
    assert [duration(one) for one in (4.4, 99, 150, 5000, 12060, 3e6)] == [
        "4 s", "99 s", "2 min", "83 min", "3 h 21 min", "35 days",
    ]  # fmt: skip
    assert [size(one) for one in (12_300_000, 1_240_000_000)] == ["12 MB", "1.2 GB"]
    found = Estimate(
        steps=600, weights=11_000_000, gradients=10_000_000, moments=20_000_000, activations=300_000_000,
        resident=500_000_000, step=0.14, evaluations=9.0, images=32,
    )  # fmt: skip
    figures = re.findall(r"[\d.]+ (?:s|MB)\b", found.line)
    assert figures == ["93 s", "84 s", "0.14 s", "9 s", "830 MB", "11 MB", "30 MB", "300 MB"]


def test_a_dry_run_prints_sizes_and_the_estimate_and_leaves_nothing(tool, tmp_path):
    printed = tool("pretrain", "--dry-run", *TINY).stdout
    assert "\nimages: 64 to train on, 32 held out\nsteps: 6 of 8, 0.8 epochs\nwhere: 1 x cpu\nestimated: " in printed
    encoder, objective, trained = map(
        float, re.search(r"encoder (\S+) .*objective (\S+) .*trained (\S+)", printed).groups()
    )
    assert encoder <= objective == trained
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("flags", [["--dry-run"], ["--show-config"], ["--dry-run", "--show-config"]])
def test_the_composed_configuration_follows_the_estimate_only_where_it_is_asked_for(tool, tmp_path, flags):
    printed = tool("pretrain", *flags, *TINY, "recipe.lr=0.0017").stdout
    estimate, configuration = printed.find("estimated: "), printed.find("\n  lr: 0.0017\n")
    assert estimate >= 0
    assert configuration > estimate if "--show-config" in flags else configuration == -1
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_of_fine_tuning_says_how_many_runs_there_are(tool, outputs):
    before = sorted(outputs.rglob("*"))
    printed = tool("finetune", "--dry-run", "compare=scratch", "recipe.steps=70", "recipe.batch_size=8").stdout
    assert [line.split()[4] for line in printed.splitlines() if "such runs" in line] == ["pretrained", "scratch"]
    assert sorted(outputs.rglob("*")) == before


def test_a_dry_run_finds_mistakes_before_torch_is_loaded(tool, no_torch):
    told = one_line(tool("pretrain", "--dry-run", "recipe.steps=0", status=2, PYTHONPATH=no_torch))
    assert told == "ssvit: recipe.steps=0: must be a whole number, 1 or more"
    told = one_line(tool("predict", "--dry-run", status=2, PYTHONPATH=no_torch))
    assert told.startswith("ssvit: --dry-run: ")


def test_a_run_tells_it_before_its_first_step(tool):
    lines = tool("pretrain", *TINY, "probe=[]").stdout.splitlines()
    (place,) = (place for place, line in enumerate(lines) if line.startswith("estimated: "))
    assert re.search(r"; starts|: starts", lines[place - 1])
    assert lines[place + 1].startswith("step 1/6")
