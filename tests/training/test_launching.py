"""The processes of a run: their numbers from each launcher, their devices, and the figures that they draw."""

import pytest
import torch
from command import error_of

from ssvit.devices import Launch
from ssvit.engine import processes
from ssvit.evaluation.evaluators.base import Evaluation
from ssvit.figures.base import Figure
from ssvit.training import launch, loop
from ssvit.training.metrics_log import MetricsLog
from ssvit.training.recipe import Recipe

NODES = {"SLURM_STEP_NUM_TASKS": "6", "SLURM_PROCID": "4", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "1234567"}
TORCHRUN = {"RANK": "4", "WORLD_SIZE": "6", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "3", "MASTER_ADDR": "a1",
            "MASTER_PORT": "7"}  # fmt: skip


@pytest.fixture
def environment(monkeypatch):
    for name in (*TORCHRUN, *NODES):
        monkeypatch.delenv(name, raising=False)
    return lambda values: [monkeypatch.setenv(name, value) for name, value in values.items()]


@pytest.mark.parametrize(
    ("nodes", "host"),
    [("a1,a2", "a1"), ("gpu[007-009,12]", "gpu007"), ("gpu[12,14],cpu3", "gpu12"), ("my-node[1-2]", "my-node1")],
)
def test_the_place_of_a_process_of_srun(environment, nodes, host):
    environment({**NODES, "SLURM_STEP_NODELIST": nodes})
    assert processes.launched() == processes.Place(4, 6, 1, 1, host, 19567)
    assert (processes.count("auto", 1), processes.is_main_process()) == (6, False)


def test_the_place_of_a_process_of_torchrun_precedes_that_of_srun(environment):
    environment({**NODES, "SLURM_STEP_NODELIST": "b", **TORCHRUN})
    assert processes.launched() == processes.Place(4, 6, 1, 3, "a1", 7)


@pytest.mark.parametrize("variables", [{"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, {"RANK": "", "WORLD_SIZE": ""}])
def test_without_srun_and_torchrun_there_is_one_process(environment, variables):
    environment(variables)
    assert processes.launched() is None
    assert launch.start(Recipe(), Launch(accelerator="cpu")).world == 1


@pytest.mark.parametrize(
    ("devices", "indices"),
    [("auto", [0, 1, 2]), (-1, [0, 1, 2]), (2, [0, 1]), ("2", [0, 1]), ([2], [2]), ("0,2", [0, 2]), ([0, 1], [0, 1])],
)
def test_the_gpus_of_a_machine(monkeypatch, devices, indices):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    found = launch._local_devices(Launch(devices=devices))
    assert found == [torch.device("cuda", index) for index in indices]


@pytest.mark.parametrize("options", [{"devices": 4}, {"devices": [3]}, {"devices": "1,7"}])
def test_a_gpu_that_the_machine_lacks_is_an_error(monkeypatch, options):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    line = str(error_of(launch.start, Recipe(), Launch(accelerator="cuda", **options)))
    assert "launch.devices=" in line
    assert "3" in line


@pytest.mark.parametrize("options", [{"devices": -1}, {"devices": [0]}, {"devices": "0,1"}, {"num_nodes": 2}])
def test_processes_that_cannot_start_on_cpus_are_an_error(environment, options):
    assert "launch." in str(error_of(launch.start, Recipe(), Launch(accelerator="cpu", **options)))


def test_a_launcher_of_another_number_of_processes_is_an_error(environment):
    environment(TORCHRUN)
    assert "6" in str(error_of(launch.start, Recipe(), Launch(accelerator="cpu", devices=2)))


class Drawing(Figure):
    """Count how often it is drawn."""

    drawn = 0

    def png(self) -> bytes:
        Drawing.drawn += 1
        raise OSError("is drawn")


@pytest.mark.parametrize(("figures", "drawn"), [("end", [False, True]), ("each", [True, True]), ("none", [False] * 2)])
def test_figures_are_drawn_when_the_option_requires_it(tmp_path, figures, drawn):
    log = MetricsLog(tmp_path, Recipe(steps=9, warmup=0), first_step=0, figures=figures)
    for ended, expected in zip((False, True), drawn, strict=True):
        before = Drawing.drawn
        evaluations = {"test": Evaluation(metrics={}, figures={"learning": Drawing()})}
        if expected:
            error_of(loop._report, log, 1, evaluations, ended=ended)
        else:
            loop._report(log, 1, evaluations, ended=ended)
        assert Drawing.drawn - before == expected
