"""A process that has loaded torch and forks for each command: a test does not pay for its imports."""

import functools
import importlib
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from command import LIMIT, program

_SLOW = ("torch", "torchvision.transforms.v2", "hydra")


def run(name: str, *options: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run `python -m ssvit NAME options…` in a folder; return what it prints, and its status.

    TimeoutExpired if it hangs.
    """
    server, command = _server(), program(name, *options)
    with tempfile.TemporaryDirectory() as temporary:
        told = [Path(temporary, name) for name in ("stdout", "stderr")]
        asked = {"arguments": command[3:], "folder": str(folder), "told": list(map(str, told))}
        server.stdin.write(json.dumps(asked | {"environment": dict(os.environ)}).encode() + b"\n")
        child = int(server.stdout.readline())
        ended = bool(select.select([server.stdout], [], [], LIMIT)[0])
        if not ended:
            os.kill(child, signal.SIGKILL)
        status = int(server.stdout.readline())
        if not ended:
            raise subprocess.TimeoutExpired(command, LIMIT)
        return subprocess.CompletedProcess(command, status, *(file.read_text() for file in told))


@functools.cache
def _server() -> subprocess.Popen[bytes]:
    """A server that forks processes for the tests; it ends when its input is closed."""
    command = [sys.executable, "-c", "import prefork; prefork.serve()"]
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


def serve() -> None:
    """Fork for each line of the input, and print the child's number and then its exit status.

    What is ours each child loads anew.
    """
    for module in _SLOW:
        importlib.import_module(module)
    while line := sys.stdin.readline():
        asked = json.loads(line)
        child = os.fork()
        if child == 0:
            _become(**asked)
            return
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def _become(arguments: Sequence[str], folder: str, told: Sequence[str], environment: dict[str, str]) -> None:
    """Run a command as if Python had been started with `-m ssvit`."""
    for descriptor, name in enumerate((os.devnull, *told)):
        file = os.open(name, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        os.dup2(file, descriptor)
        os.close(file)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv = ["ssvit", *arguments]
    runpy.run_module("ssvit", run_name="__main__", alter_sys=True)
