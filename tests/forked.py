"""The processes that `prefork` forks for commands, and the modules that their servers have loaded."""

import atexit
import gc
import importlib
import io
import json
import multiprocessing
import os
import pkgutil
import runpy
import sys
import threading
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import NoReturn

import ssvit
from ssvit.cli import find_command

_SLOW = ("torch", "torchvision.transforms.v2", "hydra", "matplotlib.figure", "matplotlib.backends.backend_agg")
# Modules that load packages which few commands need (scipy, datasets, wandb), and the program itself.
_LATER = {"cli.scaling", "data.sources.huggingface", "training.loggers.wandb", "__main__"}


def load(*, torch: bool) -> None:
    """Import the modules of ssvit.

    Args:
        torch: Whether to load torch, and all modules rather than those that have to work without it.
    """
    names = [module.name for module in pkgutil.walk_packages(ssvit.__path__, "ssvit.")]
    for name in (*(_SLOW if torch else ()), *names):
        light = name.endswith("options") or name.startswith(("ssvit.cli.", "ssvit.config."))
        if name.removeprefix("ssvit.") not in _LATER and (torch or light):
            importlib.import_module(name)
    for options in ("data=shapes",), ("data=shapes", "probes=[]"):  # composed once, for most commands
        command = find_command("pretrain")
        command.compose(command.line(options))
    assert torch or "torch" not in sys.modules
    collect_rarely()


def collect_rarely() -> None:
    """Let the garbage collector skip the objects that exist, and run less often: it took a tenth of the time."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


def serve() -> None:
    """Without torch, fork for each line of the input; print the child's number and then its exit status."""
    load(torch=False)
    while line := sys.stdin.readline():
        child = os.fork()
        if child == 0:
            run(**json.loads(line))
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


class Output(io.TextIOWrapper):
    """Standard output of a process that sends itself a signal after the beginning of a line.

    Another process would send it later, on a busy machine perhaps after the end.
    """

    signal_after: tuple[str, int] | None = None

    def write(self, text: str) -> int:
        count = super().write(text)
        if self.signal_after and text.startswith(self.signal_after[0]):
            self.flush()
            os.kill(os.getpid(), self.signal_after[1])
        return count


def run(
    arguments: Sequence[str], folder: str, told: Sequence[str | Connection], environment: dict[str, str],
    signal_after: tuple[str, int] | None = None,
) -> NoReturn:  # fmt: skip
    """Run a command as if Python had been started with `-m ssvit`, and end the process.

    The modules are not torn down: this takes longer than most commands.

    told: stdout and stderr, each the name of a file or a pipe.
    signal_after: the beginning of a line of the output, and a signal that the process then sends itself.
    """
    for descriptor, target in enumerate((os.devnull, *told)):
        named = isinstance(target, str)
        file = os.open(target, os.O_RDWR | os.O_CREAT | os.O_APPEND) if named else target.fileno()
        os.dup2(file, descriptor)
        os.close(file)
    # Those of the server are of another kind of file.
    sys.stdout = Output(open(1, "wb", closefd=False), line_buffering=os.isatty(1))  # noqa: SIM115
    sys.stdout.signal_after = signal_after
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.path[:] = ["", *environment["PYTHONPATH"].split(os.pathsep), *sys.path]
    importlib.invalidate_caches()
    multiprocessing.set_start_method("fork", force=True)  # of data workers
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
    os._exit(status if isinstance(status, int) else int(status is not None))
