"""The host reads nothing from the device between log steps, and skipped steps change nothing."""

import os
import signal
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import tiny
import torch
from ranks import own_rank, start
from runs import states
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from ssvit.data.batch import Batch, named
from ssvit.errors import UserError
from ssvit.training import loop
from ssvit.training.metrics_log import AHEAD
from ssvit.training.state import State

METHODS = ("model", "mae", "dino", "ibot", "latent", "simclr", "contrastive_tuning", "diet", "classify", "codebook")


class Reads(TorchDispatchMode):
    """Count, for each step, the operations whose result the host reads, which would synchronise a GPU."""

    def __init__(self):
        super().__init__()
        self.step, self.found = 0, Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if torch.Tag.data_dependent_output in func.tags:
            self.found[self.step] += 1
        return func(*args, **(kwargs or {}))


def counted(folder: Path, method: str, strategy: str = "auto") -> None:
    """Train with a log step in the middle; fails if a step between log steps reads."""
    reads, schedule = Reads(), State.schedule

    def noted(self, step):
        reads.step = step + 1
        return schedule(self, step)

    State.schedule = noted
    try:
        with reads:
            recipe = {"accumulate": 2, "ema": 0.9, "steps": 8, "log_every": 4, "save_every": 8, "strategy": strategy}
            tiny.train(folder, objective=getattr(tiny, method)(0.1), **recipe)
            reads.step = "proof"
            torch.zeros(()).item()
    finally:
        State.schedule = schedule
    assert reads.found["proof"] == 1
    assert not {step for step in range(1, 8) if step % 4 and reads.found[step]}, reads.found


@pytest.mark.parametrize("method", METHODS)
def test_between_log_steps_the_host_reads_nothing(tmp_path, method):
    counted(tmp_path, method)


def join(works) -> None:
    try:
        works[own_rank()]()
    except loop.Stopped as stopped:
        os._exit(stopped.status)


@pytest.mark.parametrize(("method", "strategy"), [("model", "auto"), ("dino", "fsdp")])
def test_two_processes_read_nothing_between_log_steps(tmp_path, method, strategy):
    assert start(join, 2, [partial(counted, tmp_path, method, strategy)] * 2) == [0, 0]


def test_momentum_that_begins_with_a_skipped_step_is_that_of_the_steps_after(tmp_path):
    options = {"optimizer": "sgd", "lr": 0.1, "steps": 1, "warmup": 0, "save_every": 1}
    tiny.train(tmp_path, objective=tiny.at(tiny.model(), 0, act=tiny.not_finite), **options)
    moments = states(tmp_path)["optimizer"]
    assert all((value == 0).all() for name, value in moments.items() if name.endswith("momentum_buffer"))


def test_five_skipped_steps_in_a_row_stop_a_run_that_logs_seldom(tmp_path, capsys):
    options = {"log_every": 100, "save_every": 100, "evaluate_every": 100, "steps": 100}
    with pytest.raises(UserError, match="step 9"):
        tiny.train(tmp_path, objective=tiny.at(tiny.model(), 1, 4, 5, 6, 7, 8, act=tiny.not_finite), **options)
    lines = [line for line in capsys.readouterr().out.splitlines() if "skipped," in line]
    assert [int(line.split()[1].rstrip(":")) for line in lines] == [2, 5, 6, 7, 8, 9]


def signalled(folder: Path, calls: tuple[int, ...]) -> None:
    objective = tiny.at(tiny.model(), *calls, act=lambda result: signal.raise_signal(signal.SIGTERM) or result)
    tiny.train(folder, objective=objective, log_every=12, save_every=12, evaluate_every=12)


def test_a_signal_to_one_of_two_processes_stops_both_a_few_steps_later(tmp_path):
    works = partial(signalled, tmp_path / "run", ()), partial(signalled, tmp_path / "run", (4,))
    assert start(join, 2, works) == [128 + signal.SIGTERM] * 2
    (saved,) = (tmp_path / "run").glob("step_*")
    # The signal arrives in step 5, whose metrics are read after `AHEAD` further steps.
    assert 5 < int(saved.name.removeprefix("step_")) <= 5 + AHEAD


class Copies(TorchDispatchMode):
    """Finds copies from one device to another that the host waits for."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result, kwargs = func(*args, **(kwargs or {})), kwargs or {}
        if func is torch.ops.aten._to_copy.default and not kwargs.get("non_blocking"):
            self.found += [tuple(result.shape)] * (args[0].device != result.device)
        return result


@pytest.mark.filterwarnings("ignore:CUDA is not available")
@pytest.mark.parametrize("method", METHODS)
def test_the_host_of_a_gpu_waits_in_no_part_of_an_update(method, monkeypatch):
    """Steps run on fake tensors of a GPU, which raise if the host reads a value."""
    objective = getattr(tiny, method)(0.1).train()
    views = named(tiny.transform(objective)(tiny.pictures(4), torch.arange(4), 0))
    monkeypatch.setattr(torch.__future__, "_overwrite_module_params_on_conversion", True)
    with FakeTensorMode(allow_non_fake_inputs=True), Copies() as copies:
        objective.to("cuda")
        slots = torch.arange(4)
        batch = Batch(views, torch.zeros_like(slots), slots, indices=slots).to("cuda")
        assert copies.found
        copies.found.clear()
        noise = objective.sample(batch.slots, seed=0)
        scheduled = {name: torch.full((), 0.5, dtype=torch.float64, device="cuda") for name in objective.schedules}
        with torch.autocast("cuda", torch.bfloat16):
            result = objective(batch, noise, scheduled)
        outputs = {name: value.detach() for name, value in result.items() if value.ndim}
        with torch.no_grad():
            objective.after_step(outputs, scheduled, result["loss"].isfinite())
    assert result["loss"].device.type == "cuda"
    assert not copies.found
