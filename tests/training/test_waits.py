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
from torch.utils._python_dispatch import TorchDispatchMode

from ssvit.errors import UserError
from ssvit.training import loop
from ssvit.training.metrics_log import AHEAD
from ssvit.training.state import State

# The loop, with and without a state that changes after a step, and with parameters that are frozen at first. What each
# objective computes is covered by objectives/test_fake_gpu.py.
METHODS = ("model", "dino", "contrastive_tuning")


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
            recipe = {"accumulate": 2, "ema": 0.9, "steps": 6, "log_every": 3, "save_every": 6, "strategy": strategy}
            tiny.train(folder, objective=getattr(tiny, method)(0.1), **recipe)
            reads.step = "proof"
            torch.zeros(()).item()
    finally:
        State.schedule = schedule
    assert reads.found["proof"] == 1
    assert not {step for step in range(1, 6) if step % 3 and reads.found[step]}, reads.found


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
