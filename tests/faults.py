"""A process in which one call of the operating system fails: `Faults` starts it and asks, `serve` is what it does.

faults.c is preloaded into it. It loads torch once and forks for each case, so that a case costs a tiny run alone.
"""

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from command import LIMIT

NOTHING, ERROR, FULL, SHORT, KILL, TORN = range(6)
MAIN, OTHERS = THREADS = range(2)


class Plan(ctypes.Structure):
    """The instructions for faults.c, and the calls that it has recorded."""

    _fields_ = (
        *((name, ctypes.c_int) for name in ("kind", "error", "thread", "struck")),
        ("turn", ctypes.c_long), ("calls", ctypes.c_long * 2),
        ("dirty_count", ctypes.c_int), ("dirty", ctypes.c_ulong * 256),
        ("durable", ctypes.c_ulong * 256),
        ("log_length", ctypes.c_long), ("folder", ctypes.c_char * 4096), ("log", ctypes.c_char * (1 << 18)),
    )  # fmt: skip


@dataclass
class Outcome:
    """How a job ended: the exit status (negative for a signal), what it printed, the calls by thread, name and path.

    dirty: of the files with writes that were not synchronised, by inode, the bytes before these.
    """

    status: int
    told: str
    struck: bool
    calls: list[tuple[int, str, str]]
    dirty: dict[str, int]


class Faults:
    """The jobs of a module, run in children of a process whose calls can be made to fail."""

    def __init__(self, library: Path, module: str) -> None:
        command = [sys.executable, "-c", f"import faults, {module}; faults.serve({module}.JOBS)"]
        self._server = subprocess.Popen(
            command, env={**os.environ, "LD_PRELOAD": str(library)}, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True,
        )  # fmt: skip

    def run(
        self, job: str, folder: Path, *, kind: int = NOTHING, turn: int = 0, thread: int = MAIN, error: int = 0
    ) -> Outcome:
        """Run a job on a folder, with one of the calls that touch it failing."""
        asked = {"job": job, "folder": str(folder), "kind": kind, "turn": turn, "thread": thread, "error": error}
        print(json.dumps(asked), file=self._server.stdin, flush=True)
        return Outcome(**json.loads(self._server.stdout.readline()))

    def close(self) -> None:
        self._server.stdin.close()
        self._server.wait()


def build(folder: Path) -> Path | None:
    """The library of faults.c; None where there is no C compiler, or no Linux."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None or sys.platform != "linux":
        return None
    library = folder / "faults.so"
    source = Path(__file__).with_name("faults.c")
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"], check=True, timeout=LIMIT
    )
    return library


def serve(jobs: dict[str, Callable[[Path], None]]) -> None:
    """Run the jobs from standard input, one JSON object per line, and write their outcomes."""
    faults = ctypes.CDLL(None).faults
    faults.restype = ctypes.POINTER(Plan)
    plan = faults().contents
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        asked = json.loads(line)
        told = Path(asked["folder"]).with_suffix(".told")
        ctypes.memset(ctypes.byref(plan), 0, ctypes.sizeof(plan))
        child = os.fork()
        if child == 0:
            signal.alarm(round(LIMIT))
            output = os.open(told, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(output, 1)
            os.dup2(output, 2)
            sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
            for name in ("kind", "error", "thread", "turn"):
                setattr(plan, name, asked[name])
            plan.folder = asked["folder"].encode()
            os._exit(_work(jobs[asked["job"]], Path(asked["folder"])))
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        calls = [line.split(" ", 2) for line in plan.log.decode().splitlines()]
        outcome = Outcome(
            status, told.read_text(), bool(plan.struck), [(int(t), *rest) for t, *rest in calls],
            dict(zip(plan.dirty[: plan.dirty_count], plan.durable, strict=False)),
        )  # fmt: skip
        print(json.dumps(vars(outcome)), file=answers, flush=True)


def _work(job: Callable[[Path], None], folder: Path) -> int:
    """Do a job as a command does (see ssvit/config/command.py): 0, 1 with one line, or 70 with a traceback."""
    from ssvit.errors import UserError

    try:
        job(folder)
        status = 0
    except UserError as error:
        print(f"error: {error}")
        status = 1
    except OSError as error:
        print(f"error: {error.filename or 'system'}: {error.strerror or error}")
        status = 1
    except BaseException:
        traceback.print_exc(file=sys.stdout)
        status = 70
    sys.stdout.flush()
    return status
