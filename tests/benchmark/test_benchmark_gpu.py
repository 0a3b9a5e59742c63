"""benchmark part=gpu: what a CPU can prove of it, that each part works and leaves what it found."""

import json
import os
import subprocess
import sys

import pytest
import torch
from command import LIMIT, one_line
from conftest import ROOT

from ssvit.benchmark import gpu, gpu_options, step_options
from ssvit.benchmark.gpu_options import PARTS
from ssvit.benchmark.step_options import OBJECTIVES, Size

TINY = Size(
    image_size=16, patch_size=4, width=32, depth=2, heads=2, batch={"cpu": 2, "cuda": 2}, decoder=(2, 32, 2),
    local=(8, 2),
)  # fmt: skip


def tool(folder, *given, **environment):
    command = [sys.executable, str(ROOT / "tools/benchmark.py"), "part=gpu", *given]
    environment = {**os.environ, **environment}
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=LIMIT, env=environment)


@pytest.fixture
def here(monkeypatch):
    """Parts work in this process, on a tiny model."""
    monkeypatch.setitem(step_options.SIZES, "small", TINY)
    monkeypatch.setattr(gpu, "apart", gpu._told)


def run(folder, *parts, **step):
    options = gpu_options.Gpu(parts=parts, folder=str(folder))
    gpu.run(options, step_options.Step(memory=False, **step), rounds=1)
    return json.loads((folder / "tables.json").read_text())


def test_the_parts_leave_tables_and_pictures(here, tmp_path, capsys):
    found = run(tmp_path, "waits", "step", "profile", "data")
    waits, rates, profile, *kernels, data = found.values()
    assert [(row["what"], row["waits"]) for row in waits] == [(objective, 0) for objective in OBJECTIVES]
    assert rates[0]["what"] == "ssvit"
    assert rates[0]["images/s"] > 0
    for row in profile:
        assert 0 <= row["idle"] < 1
        assert row["launches a step"] > 100
    assert all(0 < row["share"] <= 1 for rows in kernels for row in rows)
    assert all(row["images/s"] > 0 for row in data)
    assert (tmp_path / "step_1.png").stat().st_size > 5_000
    told = capsys.readouterr().out
    assert all(table in told for table in (tmp_path / "tables.txt").read_text().strip().split("\n\n"))


def test_a_part_that_fails_leaves_its_reason_and_the_others_work(here, tmp_path, monkeypatch):
    def fails(setting):
        raise RuntimeError("the device is on fire")

    monkeypatch.setitem(gpu.PARTS, "step", fails)
    found = run(tmp_path, "step", "data")
    assert found["step"] == [{"failed": "RuntimeError: the device is on fire"}]
    assert len(found) == 2


@pytest.mark.parametrize(("on", "name"), [("", ""), ("float32", ""), ("hybrid", "channels_last")])
def test_a_change_is_timed(here, on, name):
    setting = gpu.Setting(1, step_options.Step(), gpu_options.Gpu())
    assert gpu._changed(setting, on, name)["images/s"] > 0


def test_what_the_host_would_wait_for_is_counted_by_place():
    with gpu.waiting("cpu") as places:
        torch.ones(()).item()
        bool(torch.ones(()) > 0)
    assert places.total() == 2


def test_every_part_and_change_has_its_option():
    assert tuple(gpu.PARTS) == PARTS
    assert {name for name, change in gpu.CHANGES.items() if change.on != "hybrid"} == set(gpu_options.CHANGES)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("gpu.parts=[step,fire]", "gpu.parts=[step,fire]: must be a list, each one of resume, waits,"),
        ("gpu.models=[huge]", "gpu.models=[huge]: must be a list, each one of ti, s, b, l, h, small"),
        ("gpu.changes=[fp8]", "gpu.changes=[fp8]: must be a list, each one of fa3,"),
    ],
)
def test_wrong_options_are_told_in_one_line_before_torch_is_loaded(tmp_path, no_torch, given, told):
    done = tool(tmp_path, given, PYTHONPATH=no_torch)
    assert done.returncode == 2
    assert one_line(done).startswith(f"benchmark.py: {told}")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_without_a_gpu_there_is_one_line(tmp_path):
    done = tool(tmp_path, "step.device=cuda")
    assert done.returncode == 2
    assert one_line(done).startswith("benchmark.py: step.device=cuda: torch finds no GPU here")


@pytest.mark.slow
def test_all_parts_run_on_a_cpu(tmp_path):
    done = tool(tmp_path, "rounds=1", "step.batch=2", "step.memory=false")
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "outputs" / "gpu" / "tables.json").read_text())
    assert not any("failed" in row for rows in found.values() for row in rows)
    resumed, *losses = next(iter(found.values()))
    assert resumed["equal files"] == "2 of 2"
    assert resumed["largest difference of losses"] == 0
    assert losses[-1]["largest difference of losses"] < 1e-4
