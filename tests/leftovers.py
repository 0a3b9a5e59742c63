"""Find processes that outlive the tests: each test process marks its child processes by an environment variable."""

import contextlib
import os
import signal
import sys
import time
from multiprocessing import forkserver
from pathlib import Path

import prefork
from command import LIMIT

MARK = "SSVIT_TESTS"


def mark() -> None:
    """Mark what this process starts from now on, and what that starts."""
    os.environ[MARK] = f"{os.environ.get(MARK, '')}{os.getpid()}/"


def alive() -> dict[int, str]:
    """Return the command lines of the marked processes that have not ended, by process id."""
    own, found = f"\0{MARK}={os.environ[MARK]}".encode(), {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile, or is another user's
            # A zombie has an empty environment.
            if own in b"\0" + (folder / "environ").read_bytes():
                found[int(folder.name)] = (folder / "cmdline").read_text(errors="replace").replace("\0", " ")
    # It ends with the last process that uses it, which this one may be.
    return {pid: command for pid, command in found.items() if "multiprocessing.resource_tracker" not in command}


def end() -> dict[int, str]:
    """End the servers of this process, then kill the marked processes that do not end; returns these."""
    prefork.stop()
    server = forkserver._forkserver
    if server._forkserver_alive_fd is not None:
        os.close(server._forkserver_alive_fd)
        server._forkserver_alive_fd = None
    if "torch._inductor.async_compile" in sys.modules:
        sys.modules["torch._inductor.async_compile"].shutdown_compile_workers()
    until = time.monotonic() + LIMIT / 10
    while (left := alive()) and time.monotonic() < until:
        time.sleep(0.1)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    if server._forkserver_pid is not None:
        os.waitpid(server._forkserver_pid, 0)  # adds its CPU time to that of the tests
        server._forkserver_pid = None
    return left
