"""A process that has loaded ssvit and forks for each command: a test does not pay for its imports.

`tests/project/test_start_up.py` and the tests of processes that are killed start commands without it.
"""

import atexit
import functools
import gc
import importlib
import json
import os
import pkgutil
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path

from command import LIMIT, program

import ssvit

_SLOW = ("torch", "torchvision.transforms.v2", "hydra", "matplotlib.figure", "matplotlib.backends.backend_agg")
# Modules that load packages which few commands need (scipy, datasets, lightly with timm), and the program itself.
_LATER = {"cli.scaling", "data.sources.huggingface", "evaluation.panels.contrast", "objectives.contrastive", "__main__"}


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
    """Fork for each line of the input, and print the child's number and then its exit status."""
    names = [module.name for module in pkgutil.walk_packages(ssvit.__path__, "ssvit.")]
    for name in (*_SLOW, *names):
        if name.removeprefix("ssvit.") not in _LATER:
            importlib.import_module(name)
    gc.freeze()  # the children do not search what they share
    while line := sys.stdin.readline():
        asked = json.loads(line)
        child = os.fork()
        if child == 0:
            os._exit(_become(**asked))
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def _become(arguments: Sequence[str], folder: str, told: Sequence[str], environment: dict[str, str]) -> int:
    """Run a command as if Python had been started with `-m ssvit`; return its exit status.

    The modules are not torn down: this takes longer than most commands.
    """
    for descriptor, name in enumerate((os.devnull, *told)):
        file = os.open(name, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        os.dup2(file, descriptor)
        os.close(file)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv = ["ssvit", *arguments]
    status: object = 0
    try:
        runpy.run_module("ssvit", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        status = end.code
    except BaseException:
        traceback.print_exc()
        status = 1
    if isinstance(status, str):
        print(status, file=sys.stderr)
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    return status if isinstance(status, int) else int(status is not None)
