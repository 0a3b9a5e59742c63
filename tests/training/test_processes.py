"""Several processes: exact resumption however they end, and if one ends, the others end with one line.

Run as a script, this is a process of torchrun's: see `launched`.
"""

import contextlib
import functools
import json
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import tiny
import torch
from command import LIMIT, TINY
from ranks import own_rank, start
from torch import distributed

from ssvit.checkpoints import storage
from ssvit.checkpoints.checkpoint import Checkpoint
from ssvit.options import UserError
from ssvit.training import runtime

ROOT = Path(__file__).parents[2]
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone")  # which takes a free port


class EndsAt:
    """Before an objective among the bases of a class: ends its process, or hinders it, at one call of forward."""

    calls_left, way = 0, ""

    def forward(self, *inputs):
        self.calls_left -= 1
        if self.calls_left == 0:
            ends(self.way)
        return super().forward(*inputs)


def ends(way: str) -> None:
    if way == "UserError":
        raise UserError("the disk of this process is full")
    if way == "RuntimeError":
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")
    if way.startswith("sleeps"):
        time.sleep(float(way.removeprefix("sleeps")))
    elif way == "SIGTERM under torchrun":  # which passes it on to all its processes
        os.kill(os.getppid(), signal.SIGTERM)
        while signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:  # until the loop has heard it
            time.sleep(0.01)
    elif way:
        os.kill(os.getpid(), getattr(signal, way))


def work(folder: Path, options: dict) -> None:
    """Train as one process of several.

    options: those of tiny.train; `method`: what builds the objective, by its name in tiny; `ending`: {rank: [call of
    forward, way]}.
    """
    options["objective"] = objective = getattr(tiny, options.pop("method", "model"))(options.get("dropout", 0.0))
    ending = options.pop("ending", {}).get(os.environ["RANK"])
    if ending and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        objective.__class__ = type("EndsAt", (EndsAt, type(objective)), {})
        objective.calls_left, objective.way = ending
    if "data" in options:
        options["data"] = Path(options["data"])
    try:
        tiny.train(folder, **options)
    except UserError as error:
        print(error, file=sys.stderr, flush=True)
        sys.exit(getattr(error, "status", 1))


def join(folder: Path, options: dict) -> None:
    """Be one process, with stderr in a file of its own."""
    multiprocessing.set_start_method("fork", force=True)  # data workers hold their process's connections, as in a tool
    file = os.open(f"{folder}.{own_rank()}", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(file, 2)
    try:
        work(folder, options)
        status = 0
    except SystemExit as end:
        status = end.code
    except Exception:
        traceback.print_exc()
        status = 1
    os._exit(status)  # multiprocessing would wait for data workers, which a tool ends as it leaves


def forked(folder: Path, world: int = 2, **options) -> tuple[list[int], list[str]]:
    """Train in `world` processes without torchrun, which starts slowly; returns their exit codes and stderr."""
    codes = start(join, world, folder, options)
    return codes, [Path(f"{folder}.{number}").read_text() for number in range(world)]


def launched(folder: Path, world: int, restarts: int = 0, **options) -> subprocess.CompletedProcess:
    """Train in `world` processes of torchrun."""
    command = [*TORCHRUN, f"--nproc-per-node={world}", f"--max-restarts={restarts}", __file__]
    return subprocess.run([*command, str(folder), json.dumps(options)], capture_output=True, text=True, timeout=LIMIT)


def final(folder: Path) -> dict[str, str]:
    """The sha256 of weights, optimiser and average at the end of a run."""
    sums = json.loads((folder / "step_00000012" / "manifest.json").read_text())["sha256"]
    assert set(sums) == {"model.safetensors", "optimizer.safetensors", "ema.safetensors"}
    return sums


def assert_close(folder: Path, other: Path) -> None:
    """Weights, optimiser and average at the end of two runs agree to 1e-6."""
    one, two = (storage.load(Checkpoint.open(run / "step_00000012")) for run in (folder, other))
    for name, state in one.items():
        assert state.keys() == two[name].keys()
        for key, tensor in state.items():
            torch.testing.assert_close(tensor, two[name][key], rtol=1e-6, atol=1e-8, msg=f"{name} {key}")


@pytest.mark.parametrize(("strategy", "way"), [("ddp", "SIGKILL"), ("fsdp", "SIGTERM")], ids=["ddp", "fsdp"])
def test_two_processes_go_on_with_the_same_bits(tmp_path, files, strategy, way):
    options = {"strategy": strategy, "data": str(files), "workers": 1, "dropout": 0.2, "accumulate": 2}
    assert forked(tmp_path / "whole", **options)[0] == [0, 0]
    codes, _ = forked(tmp_path / "broken", **options, ending={"1": [9, way]})
    assert codes == ([1, -signal.SIGKILL] if way == "SIGKILL" else [143, 143])
    assert max((tmp_path / "broken").glob("step_*")).name == ("step_00000003" if way == "SIGKILL" else "step_00000005")
    assert forked(tmp_path / "broken", **options | {"workers": 0})[0] == [0, 0]
    assert final(tmp_path / "broken") == final(tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize(
    "method",
    [
        "mae", "dino", "simclr", "contrastive_tuning",
        "masked_patch_decoder", "simmim", "hog", "codebook", "latent", "ibot",
    ],
)  # fmt: skip
def test_two_processes_of_another_method_go_on_with_the_same_bits(tmp_path, method, strategy):
    options = {"method": method, "strategy": strategy, "dropout": 0.2, "accumulate": 2}
    assert forked(tmp_path / "whole", **options)[0] == [0, 0]
    assert forked(tmp_path / "broken", **options, ending={"1": [9, "SIGKILL"]})[0] == [1, -signal.SIGKILL]
    assert forked(tmp_path / "broken", **options)[0] == [0, 0]
    assert final(tmp_path / "broken") == final(tmp_path / "whole")


def test_processes_end_saved_after_torchrun_is_killed(tmp_path):
    """And as long as they work, another run by that name is refused with the process id and the host."""
    options = [str(ROOT / "tools" / "pretrain.py"), *TINY, "outputs=outputs", "name=run", "probe=[]"]
    endless = [f"recipe.{name}=100000" for name in ("steps", "save_every", "evaluate_every")]
    command = [*TORCHRUN, "--nproc-per-node=2", *options, *endless]
    agent = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    ranks = []
    try:
        for line in agent.stdout:
            if line.startswith("step 3/"):
                break
        ranks = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
        refused = subprocess.run([sys.executable, *options], cwd=tmp_path, capture_output=True, text=True)
        (line,) = refused.stderr.splitlines()
        assert socket.gethostname() in line
        assert re.search(rf"\bprocess ({'|'.join(ranks)})\b", line)
        agent.kill()
        text = agent.communicate(timeout=LIMIT)[0]  # until all that write there have ended
    finally:
        agent.kill()
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(rank), signal.SIGKILL)
    assert "step 100000/" not in text
    assert re.search(r"stopped by SIGTERM after step (\d+)", text)
    assert len(list((tmp_path / "outputs" / "run").glob("step_*"))) == 1


def test_torchrun_restarts_processes_that_go_on_with_the_same_bits(tmp_path):
    assert forked(tmp_path / "whole", dropout=0.2)[0] == [0, 0]
    done = launched(tmp_path / "broken", 2, restarts=2, dropout=0.2, ending={"0": [5, "SIGKILL"]})
    assert done.returncode == 0, done.stderr
    assert "goes on after step 3" in done.stdout
    assert "refused" not in done.stderr
    assert final(tmp_path / "broken") == final(tmp_path / "whole")


@functools.cache
def uninterrupted(folder: Path, **options) -> Path:
    """A run of two processes that nothing ends."""
    whole = folder / "-".join(["whole", *(Path(str(value)).name for value in options.values())])
    assert forked(whole, **options)[0] == [0, 0]
    return whole


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("uninterrupted")


EXACT = {"dropout": 0.2, "accumulate": 2}
CLOSE = {"double": True}  # one process and two agree to the rounding of float64


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("way", ["SIGTERM under torchrun", "SIGKILL"])
@pytest.mark.parametrize("worlds", [(2, 2), (1, 2), (2, 1)], ids=["2-2", "1-2", "2-1"])
def test_any_number_of_processes_goes_on_after_any_end(tmp_path, folder, worlds, way, strategy):
    exact = worlds[0] == worlds[1]
    options = EXACT if exact else CLOSE
    before, after = ({"strategy": strategy if world == 2 else "auto"} for world in worlds)
    done = launched(tmp_path / "run", worlds[0], **before, **options, ending={"0": [9, way]})
    assert done.returncode != 0
    assert not (tmp_path / "run" / "step_00000012").exists()
    done = launched(tmp_path / "run", worlds[1], **after, **options)
    assert done.returncode == 0, done.stderr
    assert "goes on after step" in done.stdout
    whole = uninterrupted(folder, strategy=strategy, **options)
    if exact:
        assert final(tmp_path / "run") == final(whole)
    else:
        assert_close(tmp_path / "run", whole)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("victim", ["0", "1"])
def test_any_rank_may_be_killed_where_torchrun_restarts(tmp_path, folder, files, strategy, victim):
    options = {"strategy": strategy, **EXACT, "data": str(files), "workers": 2}
    done = launched(tmp_path / "run", 2, restarts=2, **options, ending={victim: [15, "SIGKILL"]})
    assert done.returncode == 0, done.stderr
    assert "goes on after step 6" in done.stdout
    assert final(tmp_path / "run") == final(uninterrupted(folder, **options))


@pytest.mark.slow
def test_fine_tuning_of_two_processes_goes_on_with_the_same_bits(tmp_path):
    def tool(name: str, *options: str) -> list[str]:
        command = [str(ROOT / "tools" / f"{name}.py"), f"outputs={tmp_path}/outputs", *options]
        return [*TORCHRUN, "--nproc-per-node=2", *command]

    subprocess.run(tool("pretrain", *TINY, "probe=[]"), check=True, timeout=LIMIT, capture_output=True)
    short = [option for option in TINY if option.startswith(("recipe", "fabric"))] + ["recipe.ema=0.9"]
    subprocess.run(tool("finetune", *short, "name=whole"), check=True, timeout=LIMIT, capture_output=True)
    with subprocess.Popen(tool("finetune", *short, "name=broken"), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          text=True) as process:  # fmt: skip
        for line in process.stdout:
            if line.startswith("step 3/"):
                (_, second) = (Path(f"/proc/{process.pid}/task/{process.pid}/children")).read_text().split()
                os.kill(int(second), signal.SIGKILL)
        assert process.wait(LIMIT) != 0
    again = subprocess.run(tool("finetune", *short, "name=broken"), timeout=LIMIT, capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    sums = [
        json.loads((tmp_path / "outputs" / name / "step_00000006" / "manifest.json").read_text())["sha256"]
        for name in ("whole", "broken")
    ]
    assert sums[0] == sums[1]


def test_a_tool_that_reads_features_in_two_processes_reports_that_one_has_ended(tool, tmp_path):
    """The encoder ends the process of rank 1 in the midst of the features."""
    tool("pretrain", *TINY, "probe=[]", "recipe.steps=4")
    (tmp_path / "sitecustomize.py").write_text(
        "import os\n"
        "if os.environ.get('LOCAL_RANK') == '1':\n"
        "    import ssvit.evaluation.features as features\n"
        "    features.Frozen.__call__ = lambda *inputs: os.kill(os.getpid(), 9)\n"
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, str(ROOT / "tools" / "knn.py"), f"outputs={tmp_path}/outputs", "k=[5]", "cache=null",
               "fabric.accelerator=cpu"]  # fmt: skip
    path = os.pathsep.join(filter(None, (str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH"))))
    ranks = [
        subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ | {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "test", "PYTHONPATH": path,
        })
        for rank in range(2)
    ]  # fmt: skip
    errors = [rank.communicate(timeout=LIMIT)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [1, -signal.SIGKILL]
    assert is_of_a_lost_process(errors[0]), errors
    assert errors[1] == ""


def is_of_a_lost_process(text: str) -> bool:
    """Whether a process's stderr is the one line that another process has ended."""
    lines = text.splitlines()
    return len(lines) == 1 and "another process" in lines[0] and "fabric.timeout" in lines[0]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize(("way", "victim"), [("SIGKILL", 0), ("SIGKILL", 1), ("UserError", 1), ("RuntimeError", 0)])
def test_the_others_leave_with_one_line(tmp_path, way, victim, strategy):
    codes, errors = forked(tmp_path / "run", 3, strategy=strategy, ending={str(victim): [5, way]}, batch_size=12)
    assert [code for rank, code in enumerate(codes) if rank != victim] == [1, 1]
    assert all(is_of_a_lost_process(errors[rank]) for rank in {0, 1, 2} - {victim}), errors
    if way == "UserError":
        assert errors[victim] == "the disk of this process is full\n"
    if way == "RuntimeError":
        assert "Traceback" in errors[victim]


@pytest.mark.slow
def test_a_process_that_does_not_answer_is_waited_for_no_longer_than_the_time_out(tmp_path):
    """And it ends in the same way if it continues."""
    codes, errors = forked(tmp_path / "run", ending={"1": [5, "sleeps 60"]}, timeout=30)
    assert codes == [1, 1]
    assert all(map(is_of_a_lost_process, errors)), errors


@pytest.mark.slow
def test_torchrun_ends_a_process_that_waits_for_something_else(tmp_path):
    """As it may wait for NCCL, which does not raise before the time-out."""
    ending = {"0": [5, f"sleeps {LIMIT}"], "1": [5, "SIGKILL"]}
    assert launched(tmp_path / "run", 2, ending=ending).returncode not in (0, None)


def test_a_store_that_remembers_the_dead_gives_the_value_of_the_living():
    """What an earlier attempt has left in it is passed over, whoever comes first."""
    store = distributed.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=LIMIT)
    )
    meet = functools.partial(runtime._common, world=3, timeout=LIMIT)

    def client():
        return distributed.TCPStore("127.0.0.1", store.port, is_master=False, timeout=timedelta(seconds=LIMIT))

    for attempt, order in enumerate([(0, 1, 2), (2, 1, 0), (1, 0, 2)]):
        with ThreadPoolExecutor(3) as pool:
            found = []
            for rank in order:
                found.append(pool.submit(meet, client(), rank, value=f"value{attempt}" if rank == 0 else ""))
                time.sleep(0.1)
            assert [one.result() for one in found] == [f"value{attempt}"] * 3


def test_one_that_does_not_start_is_named():
    store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=1))
    with pytest.raises(UserError, match=r"fabric\.timeout=1: rank 1 of 2 has not started"):
        runtime._common(store, 0, 2, "value", 1)
    with pytest.raises(UserError, match=r"fabric\.timeout=1: rank 0 of 2 has not started"):
        runtime._common(distributed.PrefixStore("other", store), 1, 2, "", 1)


if __name__ == "__main__":
    work(Path(sys.argv[1]), json.loads(sys.argv[2]))
