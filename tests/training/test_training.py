"""The loop: exact resumption however a run ends, the same numbers however it is spread, nothing lost, bad steps."""

import math
import os
import random
import shutil
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import tiny
import torch
from lightly.utils.scheduler import cosine_schedule
from ranks import child
from runs import assert_close, final, held_out, rows, states, train_in_processes

from ssvit.checkpoints.run_folder import rows as stored_rows
from ssvit.data.augment.options import InceptionCrop
from ssvit.data.loader import Loader
from ssvit.errors import OptionError, UserError
from ssvit.training import loop
from ssvit.training.metrics_log import MetricsLog
from ssvit.training.muon import RMS, orthogonalize
from ssvit.training.recipe import Recipe


@pytest.mark.parametrize("decay", ["cosine", "linear", "constant"])
def test_learning_rate_warms_up_linearly_then_decays(decay):
    recipe = Recipe(steps=100, warmup=10, lr=0.5, decay=decay)
    expected = {
        "cosine": lambda step: cosine_schedule(step - 10, 91, 0.5, 0),
        "linear": lambda step: 0.5 * (100 - step) / 90,
        "constant": lambda step: 0.5,
    }[decay]
    rates = [recipe.learning_rate(step) for step in range(101)]
    assert rates == pytest.approx([0.5 * (step + 1) / 10 for step in range(10)] + [*map(expected, range(10, 101))])


def test_a_run_continues_only_with_the_same_encoder(tmp_path):
    encoder = tiny.model(0.2).encoder.arguments
    tiny.train(tmp_path, dropout=0.2, steps=4, facts={"encoder": encoder})
    with pytest.raises(UserError, match=r"^encoder: "):
        tiny.train(tmp_path, dropout=0.2, steps=8, facts={"encoder": encoder | {"attention_dropout": 0.2}})
    worked, _ = tiny.train(tmp_path, dropout=0.2, steps=8, facts={"encoder": encoder})
    assert worked
    assert list(rows(tmp_path, "train/loss")) == list(range(1, 9))


@pytest.mark.parametrize(
    ("option", "value"),
    [("steps", 0), ("steps", "abc"), ("lr", -1e-3), ("lr", math.nan), ("warmup", 1000), ("betas", 0.9), ("ema", 1),
     ("decay", "exponential"), ("precision", "fp8"), ("backend", "yes"), ("repeats", 65),
     ("clip", -1), ("seed", 1.5), ("optimizer", "lion"), ("layer_decay", 0), ("layer_decay", 1.1)],
)  # fmt: skip
def test_an_invalid_option_of_the_recipe_is_named(option, value):
    with pytest.raises(OptionError, match=f"^{option}="):
        Recipe(**{option: value})


ABOVE = {"encoder.blocks.0": 2, "encoder.blocks.1": 1, "encoder.norm": 0, "head": 0, "mask_token": 0}


def layers_above(name: str) -> int:
    """Return the number of layers above a weight of the tiny model; the patch projection is the lowest layer."""
    return next((layers for prefix, layers in ABOVE.items() if name.startswith(prefix)), 3)


def test_sgd_takes_the_steps_of_its_formula(tmp_path):
    """Against momentum, clipping and layer-wise rates written out as plain loops."""
    options = {"optimizer": "sgd", "weight_decay": 0.0, "clip": 0.1, "ema": 0.0, "layer_decay": 0.5, "lr": 0.5,
               "precision": "64-true", "warmup": 2, "steps": 5}  # fmt: skip
    numbers = Recipe(**{**tiny.RECIPE, **options})
    _, trained = tiny.train(tmp_path / "run", **options)
    model = tiny.model().double()
    crop = InceptionCrop(size=16, scale=(0.5, 1.0)).build()
    loader = Loader(source=tiny.source(), transform=crop, seed=0, batch_size=8)
    velocity = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for step, batch in enumerate(loader.batches(0, 5)):
        loss = model(batch, model.sample(batch.slots, seed=0))["loss"]
        gradients = dict(
            zip(velocity, torch.autograd.grad(loss, list(model.parameters()), allow_unused=True), strict=True)
        )
        norm = sum((g**2).sum() for g in gradients.values() if g is not None) ** 0.5
        for name, parameter in model.named_parameters():
            if gradients[name] is None:
                continue
            velocity[name] = 0.9 * velocity[name] + gradients[name] * min(1, 0.1 / (norm + 1e-6))
            with torch.no_grad():
                parameter -= numbers.learning_rate(step) * 0.5 ** layers_above(name) * velocity[name]
    for (name, ours), plain in zip(trained.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "muon"])
@pytest.mark.parametrize(
    ("method", "frozen", "end"),
    [
        ("dino", ["head.prototypes"], 2),
        ("contrastive_tuning", ["encoder.norm.weight", "encoder.blocks.1.expand.weight"], 3),
    ],
)
def test_what_is_frozen_keeps_its_bits_and_then_takes_the_first_step_of_the_optimiser(method, frozen, end, optimizer):
    """Against the formulas of a first step: AdamW's sign of the gradient, SGD's gradient, Muon's orthogonal matrix."""
    objective = getattr(tiny, method)().double()
    options = {"optimizer": optimizer, "lr": 1e-3, "warmup": 0, "decay": "constant", "weight_decay": 0.5, "clip": 0.0,
               "precision": "64-true", "accumulate": 2}  # fmt: skip
    state, loader = tiny.state(objective, **options)
    batches = loader.batches(0, 12)
    weights = {name: dict(objective.named_parameters())[name] for name in frozen}
    start = {name: weight.detach().clone() for name, weight in weights.items()}
    gradients = {}
    for name, weight in weights.items():
        weight.register_post_accumulate_grad_hook(lambda w, name=name: gradients.update({name: w.grad.clone()}))
    for step in range(end + 1):
        loop.update(state, batches, step)
        for name, weight in weights.items() if step < end else ():
            assert weight.equal(start[name]), f"{name} after step {step}"
    for name, weight in weights.items():
        gradient, decay = gradients[name], 0.5 * (weight.ndim > 1)
        assert gradient.abs().max() > 0
        if optimizer == "sgd":
            direction = gradient
        elif optimizer == "muon" and "blocks" in name:
            direction = RMS * math.sqrt(max(weight.shape)) * orthogonalize(gradient[None], torch.float64)[0]
        else:
            direction = gradient / (gradient.abs() + 1e-8)
        moved = start[name] * (1 - 1e-3 * decay) - 1e-3 * direction
        torch.testing.assert_close(weight.detach(), moved, rtol=1e-9, atol=1e-12, msg=name)


def test_a_run_interrupted_anywhere_ends_with_the_same_bits(tmp_path, files):
    tiny.train(tmp_path / "whole", data=files, dropout=0.2, accumulate=2)
    folder = tmp_path / "broken"
    for calls, workers in ((5, 0), (9, 2), (2, 0)):  # in the middle of a step, and before the next checkpoint
        objective = tiny.interrupted(tiny.model(0.2), calls)
        with pytest.raises(tiny.Interrupted):
            tiny.train(folder, data=files, workers=workers, dropout=0.2, accumulate=2, objective=objective)
    tiny.train(folder, data=files, workers=2, dropout=0.2, accumulate=2)
    assert final(folder) == final(tmp_path / "whole")
    assert rows(folder, "train/loss") == rows(tmp_path / "whole", "train/loss")
    assert {"model.safetensors", "ema.safetensors", "optimizer.safetensors"} == set(final(folder))


@pytest.mark.parametrize(
    "options",
    [{"optimizer": "sgd", "lr": 0.1, "layer_decay": 0.8}, {"optimizer": "muon", "weight_decay_end": 0.4}],
    ids=["sgd", "muon"],
)
def test_an_interrupted_run_of_any_optimiser_ends_with_the_same_bits(tmp_path, options):
    tiny.train(tmp_path / "whole", **options)
    with pytest.raises(tiny.Interrupted):
        tiny.train(tmp_path / "broken", objective=tiny.interrupted(tiny.model(), 9), **options)
    tiny.train(tmp_path / "broken", **options)
    assert final(tmp_path / "broken") == final(tmp_path / "whole")


def test_each_row_of_an_interrupted_run_is_printed_and_stored_once(tmp_path, capsys):
    for calls in (2, 5):  # before the first checkpoint, and after it
        with pytest.raises(tiny.Interrupted):
            tiny.train(tmp_path, evaluators=held_out(), objective=tiny.interrupted(tiny.model(), calls))
    capsys.readouterr()
    tiny.train(tmp_path, evaluators=held_out())
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert [line.split()[1] for line in lines] == [f"{step}/12" for step in range(4, 13)]
    assert all("images/s" in line for line in lines)
    assert list(rows(tmp_path, "train/loss")) == list(range(1, 13))
    steps = [row["step"] for row in stored_rows(tmp_path)]
    assert [step for step in steps if steps.count(step) == 2 or not step] == [0, 6, 6, 12, 12]


@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_killed_at_random_moments_a_run_ends_with_the_same_bits(tmp_path, files, kills):
    recipe = {"data": files, "steps": 30, "save_every": 2, "dropout": 0.1}
    chance = random.Random(kills)
    seconds = []
    for name in ("warm", "whole"):  # the first call starts the server from which the other processes are forked
        began = time.monotonic()
        worker = child(tiny.train, tmp_path / name, **recipe)
        worker.start()
        worker.join()
        seconds.append(time.monotonic() - began)
    folder, killed = tmp_path / "killed", 0
    while killed < kills:
        worker = child(tiny.train, folder, **recipe, workers=chance.choice([0, 2]))
        worker.start()
        worker.join(chance.uniform(0.1, 0.9) * seconds[1])
        if worker.exitcode is None:
            os.kill(worker.pid, signal.SIGKILL)
            worker.join()
            killed += 1
            continue
        assert worker.exitcode == 0  # it has finished: the remaining kills concern another run
        assert final(folder) == final(tmp_path / "whole")
        shutil.rmtree(folder)
    tiny.train(folder, **recipe)
    assert final(folder) == final(tmp_path / "whole")


def test_the_averaged_copy_follows_the_weights(tmp_path):
    """Checkpoints of every step contain both, so that the average can be followed in float64."""
    tiny.train(tmp_path, steps=3, warmup=1, save_every=1, ema=0.2)
    average = tiny.model().state_dict()["mask_token"].double()
    for step, momentum in ((1, 1 / 10), (2, 2 / 11), (3, 0.2)):
        found = states(tmp_path / f"step_{step:08d}")
        average = momentum * average + (1 - momentum) * found["model"]["mask_token"].double()
        torch.testing.assert_close(found["ema"]["mask_token"].double(), average, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("strategy", "optimizer", "world"),
    [("ddp", "adamw", 2), ("fsdp", "muon", 2),
     *(pytest.param(strategy, "adamw", world, marks=pytest.mark.slow)
       for strategy in ("ddp", "fsdp") for world in (4, 8))],
)  # fmt: skip
def test_several_processes_train_as_one_does(tmp_path, strategy, optimizer, world):
    """A sharded run also continues in one process: checkpoints do not depend on the number of processes."""
    options = {"steps": 6, "evaluators": held_out(), "ema": 0.5, "accumulate": 2 if world == 2 else 1,
               "precision": "64-true", "optimizer": optimizer}  # fmt: skip
    tiny.train(tmp_path / "one", **options)
    assert train_in_processes(tmp_path / "two", world, strategy=strategy, **options) == [0] * world
    assert len(list((tmp_path / "two").glob("events.*"))) == 1  # only the main process logs
    for key in ("train/loss", "held_out/loss"):
        assert rows(tmp_path / "two", key) == pytest.approx(rows(tmp_path / "one", key), rel=1e-6)
    assert_close(tmp_path / "two", tmp_path / "one")
    shutil.rmtree(tmp_path / "two" / "step_00000006")
    tiny.train(tmp_path / "two", **options)
    assert_close(tmp_path / "two", tmp_path / "one")


def test_all_processes_skip_when_one_is_not_finite(tmp_path):
    assert train_in_processes(tmp_path, 2, steps=4, warmup=1, save_every=1, bad_on_rank=(1, (2,))) == [0, 0]
    before, bad = (states(tmp_path / f"step_{step:08d}")["model"] for step in (2, 3))
    torch.testing.assert_close(before, bad, rtol=0, atol=0)


def test_a_run_may_be_trained_in_another_thread(tmp_path):
    with ThreadPoolExecutor() as pool:
        assert pool.submit(tiny.train, tmp_path).result()[0] is True
    assert final(tmp_path)


def test_a_finished_run_is_reported_and_unchanged(tmp_path, capsys):
    assert tiny.train(tmp_path)[0] is True
    before = final(tmp_path)
    assert tiny.train(tmp_path)[0] is False
    assert "is finished (12 steps)" in capsys.readouterr().out
    assert final(tmp_path) == before


def test_a_signal_during_the_last_figures_stops_before_another_run(tmp_path, monkeypatch):
    def record(log, step, row):
        recorded(log, step, row)
        if step == tiny.RECIPE["steps"]:
            signal.raise_signal(signal.SIGINT)

    recorded = MetricsLog.record
    with monkeypatch.context() as patch:
        patch.setattr(MetricsLog, "record", record)
        with pytest.raises(loop.Stopped):
            tiny.train(tmp_path)
    assert tiny.train(tmp_path)[0] is False  # it is finished


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_at_the_step_boundary(tmp_path, signum):
    objective = tiny.at(tiny.model(), 4, act=lambda result: signal.raise_signal(signum) or result)
    with pytest.raises(loop.Stopped) as stopped:
        tiny.train(tmp_path / "stopped", objective=objective)
    assert stopped.value.status == 128 + signum
    assert max((tmp_path / "stopped").glob("step_*")).name == "step_00000005"
    tiny.train(tmp_path / "stopped")
    tiny.train(tmp_path / "whole")
    assert final(tmp_path / "stopped") == final(tmp_path / "whole")
