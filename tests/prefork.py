"""Commands as children of processes that have loaded ssvit: a test does not pay for its imports.

`tests/project/test_start_up.py` and the tests of processes that are killed start commands without them.
"""

import functools
import json
import multiprocessing
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import forked
from command import LIMIT, program

children = multiprocessing.get_context("forkserver")
children.set_forkserver_preload(["loaded"])


def run(name: str, *options: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `python -m ssvit NAME options…` in a folder; return what it prints, and its status.

    environment: variables that differ. If the first folder of PYTHONPATH has a `torch`, the command is a child of a
    process that has not loaded torch.

    TimeoutExpired if it hangs.
    """
    command = program(name, *options)
    with tempfile.TemporaryDirectory() as temporary:
        told = [str(Path(temporary, name)) for name in ("stdout", "stderr")]
        asked = {"arguments": command[3:], "folder": str(folder), "told": told}
        asked["environment"] = {**os.environ, **environment}
        without_torch = Path(asked["environment"]["PYTHONPATH"].split(os.pathsep)[0], "torch").is_dir()
        status = (_run_without_torch if without_torch else _run)(asked)
        if status is None:
            raise subprocess.TimeoutExpired(command, LIMIT)
        return subprocess.CompletedProcess(command, status, *(Path(file).read_text() for file in told))


def start(
    name: str, *options: str, folder: Path, told: Sequence[str | Connection],
    signal_after: tuple[str, int] | None = None, **environment: str,
) -> BaseProcess:  # fmt: skip
    """Start `python -m ssvit NAME options…` in a folder, which writes to files or pipes; one that hangs is killed.

    signal_after: see `forked.run`.
    """
    variables = {**os.environ, **environment}
    process = children.Process(
        target=forked.run, args=(program(name, *options)[3:], str(folder), told, variables, signal_after)
    )
    process.start()
    watch = threading.Timer(LIMIT, process.kill)
    watch.daemon = True
    watch.start()
    return process


def _run(asked: dict[str, object]) -> int | None:
    process = children.Process(target=forked.run, kwargs=asked)
    process.start()
    process.join(LIMIT)
    hangs = process.is_alive()
    process.kill()
    process.join()
    return None if hangs else process.exitcode


def _run_without_torch(asked: dict[str, object]) -> int | None:
    server = _server()
    server.stdin.write(json.dumps(asked).encode() + b"\n")
    child = int(server.stdout.readline())
    hangs = not select.select([server.stdout], [], [], LIMIT)[0]
    if hangs:
        os.kill(child, signal.SIGKILL)
    status = int(server.stdout.readline())
    return None if hangs else status


@functools.cache
def _server() -> subprocess.Popen[bytes]:
    """A server that forks processes for the tests; it ends when its input is closed."""
    command = [sys.executable, "-c", "import forked; forked.serve()"]
    # Unbuffered, so that `select` reports all unread bytes.
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)


def stop() -> None:
    """End the server of this process, if it has one."""
    if _server.cache_info().currsize:
        server = _server()
        server.stdin.close()
        server.wait()
        server.stdout.close()
        _server.cache_clear()
