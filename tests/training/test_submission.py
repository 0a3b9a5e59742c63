"""Jobs that others run: under SLURM, and jobs of submitit in other processes."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from command import LIMIT, TINY
from ranks import free_port

from ssvit.engine.processes import is_main_process

pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
ROOT = Path(__file__).parents[2]
SLURM = ("-m", "hydra/launcher=submitit_slurm", "hydra.launcher.partition=gpu", "hydra.launcher.gpus_per_node=8")


def test_a_dry_run_previews_each_job_here_and_submits_and_writes_nothing(tool, tmp_path):
    done = tool("pretrain", "--dry-run", *SLURM, *TINY, "probes=[]", "recipe.lr=1e-3,2e-3")
    assert done.stdout.count("steps: 6 of 8") == 2
    assert not list(tmp_path.rglob("*submitit*"))
    assert not list(tmp_path.rglob("multirun.yaml"))


def test_the_main_process_is_torchruns_within_a_job_of_slurm(monkeypatch):
    """Slurm may number the machines in another order."""
    monkeypatch.setenv("SLURM_PROCID", "1")
    assert not is_main_process()
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("RANK", "0")
    assert is_main_process()
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setenv("RANK", "8")
    assert not is_main_process()


@pytest.mark.slow
def test_the_script_for_slurm_trains_and_is_queued_again(tmp_path):
    """Run the script with stubs of srun and scontrol for one node."""
    for name, line in (("srun", 'exec "$@"'), ("scontrol", 'echo "$@" >> calls; echo localhost')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    path = os.pathsep.join((str(tmp_path), str(Path(sys.executable).parent), os.environ["PATH"]))
    python = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"SLURM_JOB_ID": "7", "SLURM_NNODES": "1", "SLURM_JOB_NODELIST": "n", "PROCESSES": "2",
                                "PORT": str(free_port()), "PATH": path, "PYTHONPATH": python}  # fmt: skip
    script = [str(ROOT / "examples" / "slurm.sh"), *TINY, "probes=[]", "outputs=outputs", "name=run"]
    script += ["launch.strategy=fsdp", "recipe.steps=400"]
    with subprocess.Popen(script, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True) as job:
        for line in job.stdout:
            if line.startswith("step 20/"):
                job.send_signal(signal.SIGUSR1)
            if line.startswith("step 30/"):
                break
        (torchrun,) = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
        os.kill(int(torchrun), signal.SIGTERM)  # as SLURM ends a job that is queued again
        assert job.wait(LIMIT) != 0
    assert (tmp_path / "calls").read_text().splitlines() == ["show hostnames n", "requeue 7"]
    assert max((tmp_path / "outputs" / "run").glob("step_*")).name >= "step_00000030"


@pytest.mark.slow
def test_jobs_in_other_processes_have_the_names_of_their_options(tool, tmp_path):
    tool("pretrain", "-m", "hydra/launcher=submitit_local", *TINY, "probes=[]", "recipe.lr=1e-3,2e-3")
    names = sorted(path.name for path in (tmp_path / "outputs").iterdir() if path.is_dir())
    assert names == [".submitit", *(f"masked_patch_shapes_recipe.lr={lr}" for lr in ("0.001", "0.002"))]
