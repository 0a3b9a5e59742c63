"""`seconds` in metrics.jsonl: the time of each step once, of all processes that work for it, however a run ends."""

import multiprocessing
import resource
import signal
import time
from types import SimpleNamespace

import pytest
import tiny
from runs import held_out, rows

from ssvit.checkpoints.run_folder import rows as stored_rows
from ssvit.data.augment.options import CenterCrop
from ssvit.data.loader import Loader
from ssvit.data.sources.files import Files
from ssvit.engine import clock
from ssvit.evaluation.evaluators.prediction import Prediction
from ssvit.studies.comparison import Spent
from ssvit.training import loop, metrics_log
from ssvit.training.state import State

BATCH = tiny.RECIPE["batch_size"]
WHOLE = Spent(12 * BATCH, 12.0)
COST = 0.02  # CPU seconds of an image


class Costly(Files):
    """Images that take CPU time to read."""

    def read(self, index):
        end = time.process_time() + COST
        while time.process_time() < end:
            pass
        return super().read(index)


@pytest.fixture
def costly(files):
    """The tiny pictures as such images."""
    return Costly(sorted(str(path) for path in files.glob("*.png")))


@pytest.fixture
def start_method():
    """A function that sets the start method of processes."""
    before = multiprocessing.get_start_method(allow_none=True)
    yield lambda method: multiprocessing.set_start_method(method, force=True)
    multiprocessing.set_start_method(before, force=True)


@pytest.fixture
def now(monkeypatch):
    """The time of a simulated clock in seconds, in a list."""
    now = [0.0]
    monkeypatch.setattr(loop, "clock", lambda device: now[0])
    monkeypatch.setattr(metrics_log, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    return now


def timed(now, calls=100, act=lambda: None):
    """An objective of which each step takes a second; after some calls, counted from 1, it does something else."""

    def advance(result):
        now[0] += 1
        if objective.done == calls:
            act()
        return result

    objective = tiny.at(tiny.model(), *range(100), act=advance)
    return objective


def spent(folder) -> Spent:
    return Spent.on(stored_rows(folder), BATCH, last=12)


def of_system() -> float:
    """The CPU time of this process and of its finished children."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_the_cpu_time_of_data_workers_counts_once(costly, start_method, method):
    """It counts when their batches are received, and it still does after they have ended."""
    start_method(method)
    system = of_system()
    began, own = clock.cpu_time(), time.process_time()

    def of_workers() -> float:
        spent = time.process_time() - own
        return clock.cpu_time() - began - spent

    crop = CenterCrop(size=16).build()
    batches = Loader(source=costly, transform=crop, seed=0, batch_size=4, workers=2).batches(0, 100)
    for step in range(1, 5):
        next(batches)
        assert of_workers() >= 4 * step * COST
    batches.close()
    assert of_workers() >= 4 * 4 * COST
    if method == "fork":  # the workers were children
        ended = clock.cpu_time()
        assert ended - of_system() <= began - system + 1e-6


def test_the_cpu_time_of_data_workers_is_part_of_the_seconds(tmp_path, files, costly, monkeypatch):
    monkeypatch.setattr(tiny, "source", lambda folder: costly)
    monkeypatch.setattr(clock, "time", SimpleNamespace(process_time=lambda: 0.0))  # of the main process
    tiny.train(tmp_path, data=files, workers=1, steps=4)
    for step, seconds in rows(tmp_path, "seconds").items():
        assert seconds >= BATCH * COST, f"step {step}"


@pytest.mark.parametrize("log_every", [1, 5, 12])
def test_a_stopped_run_has_spent_the_time_of_all_steps(tmp_path, now, log_every):
    def stop():
        signal.raise_signal(signal.SIGTERM)

    def fail():
        raise tiny.Interrupted

    options = {"log_every": log_every, "save_every": 3}
    tiny.train(tmp_path / "whole", objective=timed(now), **options)
    assert spent(tmp_path / "whole") == WHOLE
    with pytest.raises(loop.Stopped):
        tiny.train(tmp_path / "stopped", objective=timed(now, 7, stop), **options)  # in the seventh step
    with pytest.raises(tiny.Interrupted):
        tiny.train(tmp_path / "stopped", objective=timed(now, 4, fail), **options)  # in the eleventh step
    tiny.train(tmp_path / "stopped", objective=timed(now), **options)
    assert spent(tmp_path / "stopped") == WHOLE
    assert rows(tmp_path / "stopped", "train/loss") == rows(tmp_path / "whole", "train/loss")


def test_an_evaluation_that_was_stopped_between_two_rows_is_repeated(tmp_path, now, monkeypatch):
    def stop_in_the_second(evaluator, objective):
        calls.append(objective)
        if len(calls) == 2:
            signal.raise_signal(signal.SIGTERM)
        return measure(evaluator, objective)

    calls, measure = [], Prediction.measure
    monkeypatch.setattr(Prediction, "measure", stop_in_the_second)
    with pytest.raises(loop.Stopped):
        tiny.train(tmp_path, objective=timed(now), evaluators=held_out(), log_every=5)
    assert list(rows(tmp_path, "held_out/loss")) == [0]
    tiny.train(tmp_path, objective=timed(now), evaluators=held_out(), log_every=5)
    assert list(rows(tmp_path, "held_out/loss")) == [0, 6, 12]


def test_the_preparation_is_part_of_the_seconds_but_not_of_the_rate(tmp_path, now, monkeypatch, capsys):
    def prepare(state, loader):
        now[0] += 100
        return "prepared"

    monkeypatch.setattr(State, "prepare", prepare)
    tiny.train(tmp_path, objective=timed(now))
    assert rows(tmp_path, "seconds") == {step: 101 if step == 1 else 1 for step in range(1, 13)}
    assert set(rows(tmp_path, "images_per_second").values()) == {BATCH}
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step 1/12")]
    assert [line.partition("  ")[2].endswith("00:11 left") for line in lines] == [True]
