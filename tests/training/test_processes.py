"""Several processes: exact resumption however they end, and if one ends, the others end with one line."""

import contextlib
import functools
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from uuid import uuid4

import prefork
import pytest
import tiny
from command import LIMIT, TINY, one_line
from ranks import child, exit_codes, own_rank, start
from runs import assert_close, final
from torch import distributed
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from ssvit.cli.knn import command as knn
from ssvit.errors import UserError
from ssvit.evaluation import features
from ssvit.training import launch

ROOT = Path(__file__).parents[2]
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone")  # which takes a free port


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


def train(folder: Path, options: dict) -> None:
    """Train as one process of several.

    options: those of tiny.train; `method`: what builds the objective, by its name in tiny; `ending`: {rank: [call of
    forward, way]}.
    """
    options["objective"] = objective = getattr(tiny, options.pop("method", "model"))(options.get("dropout", 0.0))
    ending = options.pop("ending", {}).get(os.environ["RANK"])
    if ending and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        call, way = ending
        tiny.at(objective, call - 1, act=lambda result: ends(way) or result)
    if "data" in options:
        options["data"] = Path(options["data"])
    tiny.train(folder, **options)


def read_features(folder: Path, options: dict) -> None:
    """Score the features of a run as one process of several, of which the second ends during the first batch."""
    if own_rank() == 1:
        features.Frozen.__call__ = lambda *inputs: ends("SIGKILL")
    knn.call([f"outputs={folder}", "k=[5]", "cache=null", "launch.accelerator=cpu"])


class Fit:
    """Before an objective among the bases of a class: the main process fits longer than collectives may take.

    They may take 0.1 s in the second process for a second after its start, which a file then reports to the first.
    """

    waited: Path

    def eval(self):
        if own_rank() == 1 and not self.waited.exists():
            _set_pg_timeout(timedelta(seconds=0.1))
            threading.Timer(1, self.end_of_limit).start()
        return super().eval()

    def end_of_limit(self):
        _set_pg_timeout(timedelta(seconds=LIMIT))
        self.waited.touch()

    def prepare(self, batches):
        line, until = super().prepare(batches), time.monotonic() + 60
        while not self.waited.exists() and time.monotonic() < until:
            time.sleep(0.01)
        return line


class FitEnds:
    """Before an objective among the bases of a class: the main process ends while it fits."""

    way = ""

    def prepare(self, batches):
        next(batches)  # the data workers have started
        ends(self.way)


def train_codebook(folder: Path, options: dict) -> None:
    """Train with a codebook as one process of several; `way`: how the main process ends while it fits."""
    objective, way = tiny.codebook(), options.pop("way", "")
    attributes = {"waited": folder.with_suffix(".waited"), "way": way}
    objective.__class__ = type("Fitted", (FitEnds if way else Fit, type(objective)), attributes)
    tiny.train(folder, objective=objective, **options)


def status_of(work, folder: Path, options: dict) -> int:
    """Return the exit status of a function as of a command, which prints a UserError."""
    try:
        work(folder, options)
    except UserError as error:
        print(error, file=sys.stderr, flush=True)
        return getattr(error, "status", 1)
    return 0


def join(folder: Path, work, options: dict) -> None:
    """Be one process, with stderr in a separate file."""
    multiprocessing.set_start_method("fork", force=True)  # data workers hold their process's connections, as in a tool
    file = os.open(f"{folder}.{own_rank()}", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(file, 2)
    try:
        status = status_of(work, folder, options)
    except Exception:
        traceback.print_exc()
        status = 1
    os._exit(status)  # multiprocessing would wait for data workers, which a tool ends as it leaves


def forked(folder: Path, world: int = 2, work=train, **options) -> tuple[list[int], list[str]]:
    """Train in `world` processes without torchrun, which starts slowly; returns their exit codes and stderr."""
    codes = start(join, world, folder, work, options)
    return codes, [Path(f"{folder}.{number}").read_text() for number in range(world)]


def launched(folder: Path, world: int, restarts: int = 0, **options) -> tuple[int, str]:
    """Train in `world` processes of torchrun's agent; returns its exit status and all output."""
    output = folder.with_suffix(".output")
    (status,) = exit_codes([child(agent, folder, world, restarts, options, output)])
    return status, output.read_text()


def agent(folder: Path, world: int, restarts: int, options: dict, output: Path) -> None:
    """Be the agent of `torchrun --standalone`, and fork its processes."""
    file = os.open(output, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=world, max_restarts=restarts, run_id=str(uuid4()), rdzv_backend="c10d",
        rdzv_endpoint="localhost:0", start_method="fork", monitor_interval=0.1,
    )  # fmt: skip
    elastic_launch(config, work_of_agent)(folder, options)


def work_of_agent(folder: Path, options: dict) -> None:
    if status := status_of(train, folder, options):
        sys.exit(status)


METHODS = (
    "mae", "dino", "simclr", "contrastive_tuning",
    "masked_patch_decoder", "simmim", "hog", "codebook", "latent", "ibot", "diet", "classify",
)  # fmt: skip


@pytest.mark.parametrize(
    ("method", "strategy", "way"),
    [("model", "ddp", "SIGKILL"), ("model", "fsdp", "SIGTERM"),
     *(pytest.param(method, strategy, "SIGKILL", marks=pytest.mark.slow)
       for method in METHODS for strategy in ("ddp", "fsdp"))],
)  # fmt: skip
def test_two_processes_continue_with_the_same_bits(tmp_path, files, method, strategy, way):
    options = {"method": method, "strategy": strategy, "data": str(files), "dropout": 0.2, "accumulate": 2, "steps": 6,
               "optimizer": "muon" if strategy == "fsdp" else "adamw"}  # fmt: skip
    assert forked(tmp_path / "whole", **options, workers=1)[0] == [0, 0]
    codes, _ = forked(tmp_path / "broken", **options, workers=1, ending={"1": [9, way]})
    assert codes == ([1, -signal.SIGKILL] if way == "SIGKILL" else [143, 143])
    assert max((tmp_path / "broken").glob("step_*")).name == ("step_00000003" if way == "SIGKILL" else "step_00000005")
    assert forked(tmp_path / "broken", **options)[0] == [0, 0]
    assert final(tmp_path / "broken") == final(tmp_path / "whole")


def test_processes_end_saved_after_torchrun_is_killed(tmp_path):
    """While they run, a second run of the same name fails with the process id and the host."""
    options = [str(ROOT / "tools" / "pretrain.py"), *TINY, "outputs=outputs", "name=run", "probes=[]"]
    endless = [f"recipe.{name}=100000" for name in ("steps", "save_every", "evaluate_every")]
    command = [*TORCHRUN, "--nproc-per-node=2", *options, *endless]
    agent = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    ranks = []
    try:
        for line in agent.stdout:
            if line.startswith("step 3/"):
                break
        ranks = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
        line = one_line(prefork.run("pretrain", *options[1:], folder=tmp_path))
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
def test_any_number_of_processes_continues_after_any_end(tmp_path, folder, worlds, way, strategy):
    exact = worlds[0] == worlds[1]
    options = EXACT if exact else CLOSE
    before, after = ({"strategy": strategy if world == 2 else "auto"} for world in worlds)
    assert launched(tmp_path / "run", worlds[0], **before, **options, ending={"0": [9, way]})[0] != 0
    assert not (tmp_path / "run" / "step_00000012").exists()
    # A sharded checkpoint is written in the background, and a killed run may not have had the time for one.
    is_saved = any((tmp_path / "run").glob("step_*/manifest.json"))
    assert is_saved or (strategy, way) == ("fsdp", "SIGKILL")
    status, output = launched(tmp_path / "run", worlds[1], **after, **options)
    assert status == 0, output
    assert ("continues after step" in output) == is_saved
    whole = uninterrupted(folder, strategy=strategy, **options)
    if exact:
        assert final(tmp_path / "run") == final(whole)
    else:
        assert_close(tmp_path / "run", whole)


@pytest.mark.parametrize(
    ("strategy", "victim", "workers"),
    [("auto", "0", 0), *(pytest.param(strategy, victim, 2, marks=pytest.mark.slow)
                         for strategy in ("ddp", "fsdp") for victim in "01")],
)  # fmt: skip
def test_torchrun_restarts_processes_that_continue_with_the_same_bits(
    tmp_path, folder, files, strategy, victim, workers
):
    """Processes start although the addresses of the ended ones are still in torchrun's store."""
    options = {"strategy": strategy, **EXACT, "data": str(files), "workers": workers}
    status, output = launched(tmp_path / "run", 2, restarts=1, **options, ending={victim: [9, "SIGKILL"]})
    assert status == 0, output
    assert "continues after step 3" in output
    assert final(tmp_path / "run") == final(uninterrupted(folder, **options))


@pytest.mark.slow
def test_a_run_from_existing_weights_is_compared_with_its_start_after_the_other_processes_have_ended(outputs):
    start = f"checkpoint={outputs / 'masked_patch_shapes'}"
    options = (*TINY[TINY.index("recipe.batch_size=8") :], start, f"outputs={outputs}", "name=continued",
               "objective=mae", "probes=[knn]", "probing.train_images=32", "probing.test_images=16")  # fmt: skip
    run = [*TORCHRUN, "--nproc-per-node=2", "-m", "ssvit", "pretrain", *options]
    done = subprocess.run(run, capture_output=True, text=True, cwd=ROOT, timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    assert (outputs / "continued" / "evaluation" / "report.json").is_file(), done.stdout


def test_a_command_that_reads_features_in_two_processes_reports_that_one_has_ended(outputs):
    codes, errors = forked(outputs, work=read_features)
    assert codes == [1, -signal.SIGKILL]
    assert is_of_a_lost_process(errors[0]), errors


def is_of_a_lost_process(text: str) -> bool:
    """Return whether the stderr of a process is the one line that another process has ended."""
    lines = text.splitlines()
    return len(lines) == 1 and "another process" in lines[0] and "launch.timeout" in lines[0]


# How the process ends is seen by itself only, so one way is tested with sharding.
@pytest.mark.parametrize(
    ("way", "victim", "strategy"),
    [("SIGKILL", 0, "fsdp"), ("SIGKILL", 1, "ddp"), ("UserError", 1, "ddp"), ("RuntimeError", 0, "ddp"),
     *(pytest.param("SIGKILL", victim, strategy, marks=pytest.mark.slow)
       for victim, strategy in ((0, "ddp"), (1, "fsdp")))],
)  # fmt: skip
def test_the_others_leave_with_one_line(tmp_path, way, victim, strategy):
    codes, errors = forked(tmp_path / "run", 3, strategy=strategy, ending={str(victim): [5, way]}, batch_size=12)
    assert [code for rank, code in enumerate(codes) if rank != victim] == [1, 1]
    assert all(is_of_a_lost_process(errors[rank]) for rank in {0, 1, 2} - {victim}), errors
    if way == "UserError":
        assert errors[victim] == "the disk of this process is full\n"
    if way == "RuntimeError":
        assert "Traceback" in errors[victim]


def test_the_main_process_may_fit_longer_than_the_time_out(tmp_path):
    assert forked(tmp_path / "short", method="codebook")[0] == [0, 0]
    codes, errors = forked(tmp_path / "long", work=train_codebook)
    assert codes == [0, 0], errors
    assert final(tmp_path / "long") == final(tmp_path / "short")


@pytest.mark.parametrize("way", ["SIGKILL", "UserError"])
def test_the_others_leave_with_one_line_if_the_main_process_ends_while_it_fits(tmp_path, way):
    codes, errors = forked(tmp_path / "run", 3, work=train_codebook, way=way, workers=1, batch_size=12)
    assert codes == [1 if way == "UserError" else -signal.SIGKILL, 1, 1], errors
    assert all(map(is_of_a_lost_process, errors[1:])), errors


@pytest.mark.slow
def test_a_process_that_ends_at_its_start_is_not_waited_for(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import os\nif os.environ.get('RANK') == '1':\n    os._exit(3)\n")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    run = [sys.executable, "-m", "ssvit", "pretrain", *TINY, f"outputs={tmp_path}", "launch.devices=2",
           "launch.timeout=86400"]  # fmt: skip
    done = subprocess.run(
        run, capture_output=True, text=True, cwd=ROOT, timeout=LIMIT, env={**os.environ, "PYTHONPATH": path}
    )
    assert done.returncode == 1
    assert "launch.devices=2: another process" in done.stderr


def test_a_process_that_does_not_answer_is_waited_for_no_longer_than_the_time_out(tmp_path):
    """And it ends in the same way if it continues."""
    codes, errors = forked(tmp_path / "run", ending={"1": [5, "sleeps 60"]}, timeout=30)
    assert codes == [1, 1]
    assert all(map(is_of_a_lost_process, errors)), errors


@pytest.mark.slow
def test_torchrun_ends_a_process_that_waits_for_something_else(tmp_path):
    """A rank may wait for NCCL, which does not raise before the time-out."""
    ending = {"0": [5, f"sleeps {LIMIT}"], "1": [5, "SIGKILL"]}
    assert launched(tmp_path / "run", 2, ending=ending)[0] not in (0, None)


def test_the_port_of_an_earlier_attempt_is_ignored():
    """An ended attempt's port refuses connections; the rank waits until this attempt publishes another one."""
    store = distributed.HashStore()
    with socket.create_server(("127.0.0.1", 0)) as served, socket.socket() as ended:
        ended.bind(("127.0.0.1", 0))
        ports = [str(listener.getsockname()[1]) for listener in (ended, served)]
        store.set("port", ports[0])
        with ThreadPoolExecutor() as pool:
            port = pool.submit(launch._served_port, store, "127.0.0.1", LIMIT)
            time.sleep(0.2)
            store.set("port", ports[1])
            assert port.result(LIMIT) == int(ports[1])
        store.set("port", ports[0])
        with pytest.raises(ConnectionRefusedError):
            launch._served_port(store, "127.0.0.1", 0.1)
