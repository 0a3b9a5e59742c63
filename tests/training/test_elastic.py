"""A run that continues with fewer processes: the same batches, or an error of one line."""

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from command import LIMIT, TINY, one_line
from ranks import free_port
from runs import rows

ROOT = Path(__file__).parents[2]


def test_half_of_the_processes_continue_with_the_same_batches(tool, tmp_path):
    """And a number of processes that does not divide the batch is an error."""
    run = tmp_path / "outputs" / "run"
    options = (*TINY, "probes=[]", "name=run")
    tool("pretrain", *options, "launch.devices=2", "launch.strategy=ddp")
    before = rows(run, "train/loss")
    shutil.rmtree(run / "step_00000006")
    line = one_line(tool("pretrain", *options, "launch.devices=3", "launch.strategy=ddp", status=2))
    assert line.startswith("ssvit: recipe.batch_size=8: ")
    tool("pretrain", *options, "recipe.accumulate=2")  # for the memory of one process
    assert rows(run, "train/loss") == pytest.approx(before, rel=1e-4)


@pytest.mark.slow
def test_a_run_continues_without_one_of_two_machines(tmp_path):
    """Two agents of torchrun simulate two machines; one of them is killed with its process."""
    port = free_port()
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=3"),
        *("--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{port}", "--rdzv-id=test"),
        "--rdzv-conf=last_call_timeout=30,keep_alive_interval=1,keep_alive_max_attempt=3",
        *(str(ROOT / "tools" / "pretrain.py"), *TINY, "probes=[]", "name=run", f"outputs={tmp_path}/outputs"),
        *("recipe.steps=100000", "recipe.save_every=20", "recipe.evaluate_every=100000", "recipe.log_every=100"),
    ]
    agents: list[subprocess.Popen] = []

    def kill(agent: subprocess.Popen) -> None:
        """Kill an agent and its process, which has a separate session."""
        with contextlib.suppress(FileNotFoundError):
            children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
            for pid in (agent.pid, *map(int, children)):
                os.kill(pid, signal.SIGKILL)
        agent.wait()

    def wait(ready) -> None:
        until = time.monotonic() + LIMIT
        while not ready():
            assert time.monotonic() < until, (tmp_path / "log").read_text()
            time.sleep(0.2)

    def saved() -> list[Path]:
        return sorted((tmp_path / "outputs" / "run").glob("step_*/manifest.json"))

    def has_store() -> bool:
        with socket.socket() as store:
            return store.connect_ex(("127.0.0.1", port)) == 0

    try:
        with (tmp_path / "log").open("w") as log:
            agents.append(subprocess.Popen(command, stdout=log, stderr=log))
            wait(has_store)  # the agent that starts the store must be the one that survives
            agents.append(subprocess.Popen(command, stdout=log, stderr=log))
        wait(saved)
        kill(agents[1])
        wait(lambda: "continues after step" in (tmp_path / "log").read_text())
        before = saved()[-1]
        wait(lambda: saved()[-1] != before)
        text = (tmp_path / "log").read_text()
        assert re.findall(r"\d x cpu", text) == ["2 x cpu", "1 x cpu"]
    finally:
        for agent in agents:
            kill(agent)
