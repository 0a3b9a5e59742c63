"""Every call of the operating system that a save or a resume makes fails in turn, as SQLite tests itself.

A run continues in a folder with a damaged checkpoint, leftovers and a file in the way. One of its calls fails, writes
half, fails as all calls do on a full disk, or is the last one before the process is killed or the power is cut. The run
then completes or ends with one line, and the same command again completes with the bits of an undisturbed run.
"""

import errno
import os
import re
import shutil
from collections import Counter
from pathlib import Path

import faults
import pytest
import tiny
import torch
import torch.utils.tensorboard  # once, before the server forks
from faults import ERROR, FULL, KILL, MAIN, SHORT, TORN

from ssvit.checkpoints import storage
from ssvit.checkpoints.checkpoint import Checkpoint
from ssvit.checkpoints.manifest import complete, read_manifest
from ssvit.checkpoints.run_folder import rows
from ssvit.retrieval.store import Store

STEPS, BEGUN, DAMAGED = 6, 4, 5  # the newest complete checkpoint of the run folder, and a damaged one
WRITES = {"write", "pwrite", "pwrite64", "writev"}
READS = {"read", "pread", "pread64", "readv"}
# What changes nothing on disk: to die after it is to die after the change before it.
LOOKS = READS | {"stat", "stat64", "lstat", "lstat64", "fstat", "fstat64", "fstatat", "fstatat64", "statx", "access",
                 "opendir", "readdir", "readdir64", "mmap", "mmap64"}  # fmt: skip
TAKES_ROOM = WRITES | {"fsync", "fdatasync", "mkdir", "mkdirat", "rename", "renameat", "ftruncate", "ftruncate64"}
POWER = -KILL  # the process is killed, and unsynchronised bytes are lost


def train(folder: Path) -> None:
    tiny.train(folder, steps=STEPS, save_every=1, warmup=1)


def begin(folder: Path) -> None:
    objective = tiny.interrupted(tiny.model(), DAMAGED + 1)  # the run stops after its step DAMAGED
    try:
        tiny.train(folder, steps=STEPS, save_every=1, warmup=1, objective=objective)
    except tiny.Interrupted:
        return
    raise AssertionError


def store(folder: Path) -> None:
    """Make a store of two images, or add four to it."""
    opened = Store.open(folder / "store", "one", create=True)
    start, count = (2, 4) if len(opened) else (0, 2)
    if f"{start}.jpg" not in opened.row_of:
        names = [f"{number}.jpg" for number in range(start, start + count)]
        opened.add(names, [None] * count, torch.eye(8)[start : start + count])


JOBS = {"train": train, "begin": begin, "store": store}


@pytest.fixture(scope="module")
def system(tmp_path_factory):
    library = faults.build(tmp_path_factory.mktemp("library"))
    if library is None:
        pytest.skip("needs a C compiler and Linux's dynamic linker")
    system = faults.Faults(library, "test_faults")
    yield system
    system.close()


@pytest.fixture(scope="module")
def begun(system, tmp_path_factory):
    """Return a folder from which a run continues, and the checksums of its result."""
    folder = tmp_path_factory.mktemp("begun")
    for job in ("train", "begin"):
        (folder / job).mkdir()
        outcome = system.run(job, folder / job)
        assert outcome.status == 0, outcome.told
    run = folder / "begin"
    weights = run / f"step_{DAMAGED:08d}" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    for leftover in (f".step_{DAMAGED:08d}.part", ".step_00000001.old"):
        (run / leftover).mkdir()
        (run / leftover / "model.safetensors").write_bytes(b"half")
    (run / f"step_{STEPS:08d}").write_text("in the way")
    return run, read_manifest(folder / "train" / f"step_{STEPS:08d}")["sha256"]


def cases(calls):
    """Every way in which every call can fail: (thread, turn, kind, error)."""
    turns = Counter()
    for thread, name, path in calls:
        turns[thread] += 1
        turn = (thread, turns[thread])
        yield *turn, ERROR, errno.EIO
        if name in WRITES | READS:
            yield *turn, SHORT, 0
        if name in WRITES:
            yield *turn, TORN, 0
        if name in TAKES_ROOM or (name.startswith(("open", "creat")) and ".part" in path):
            yield *turn, FULL, 0
        if name not in LOOKS:
            yield *turn, KILL, 0
            yield *turn, POWER, 0


def strike(system, job: str, folder: Path, case) -> tuple[str, str]:
    """Run a job of which one call fails, and assert that it completes, ends with one line or is killed.

    Returns how it ended, and a description for later assertions.
    """
    thread, turn, kind, error = case
    outcome = system.run(job, folder, kind=abs(kind), turn=turn, thread=thread, error=error)
    where = f"{case} {outcome.calls[-3:] if outcome.status < 0 else ''}\n{outcome.told}"
    # TensorBoard writes in a separate thread, which may make a call more or less.
    assert outcome.struck or thread != MAIN, where
    assert "Traceback" not in outcome.told, where
    lines = [line for line in outcome.told.splitlines() if line.startswith("error: ")]
    if abs(kind) in (KILL, TORN) and outcome.struck:
        assert outcome.status == -9, where
    elif outcome.status:
        assert outcome.status == 1, where
        (line,) = lines
        assert outcome.told.splitlines()[-1] == line
        assert str(folder) in line, where
    else:
        assert not lines
    if kind == POWER:
        for path in folder.rglob("*"):
            if path.is_file() and (durable := outcome.dirty.get(str(path.stat().st_ino))) is not None:
                os.truncate(path, durable)
    return {0: "completed", 1: "one line"}.get(outcome.status, "killed"), where


def strikes(system, job: str, folder: Path, prepare, *, share: int = 1, until: str = ""):
    """Strike a job in a new folder with every `share`-th case, of the calls before the first on a path with `until`."""
    prepare()
    calls = system.run(job, folder).calls
    shutil.rmtree(folder)
    if until:
        calls = calls[: next(i for i, (_, _, path) in enumerate(calls) if until in path)]
    for case in list(cases(calls))[::share]:
        prepare()
        yield case, *strike(system, job, folder, case)
        shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("begins", "share"), [(False, 397), *(pytest.param(begins, 1, marks=pytest.mark.slow) for begins in (False, True))]
)
def test_any_call_may_fail_and_nothing_is_lost(system, begun, tmp_path, begins, share):
    """Calls of a new run up to its second checkpoint fail; later calls equal those of a continued run."""
    run, whole = begun
    folder = tmp_path / "run"
    prepare = folder.mkdir if begins else lambda: shutil.copytree(run, folder)
    until = "step_00000003" if begins else ""
    for case, end, where in strikes(system, "train", folder, prepare, share=share, until=until):
        if end == "completed":
            assert read_manifest(complete(folder)[-1])["sha256"] == whole, where
        again = system.run("train", folder)
        assert again.status == 0, f"{where}\n{again.told}"
        if not begins:
            resumed = re.search(r"continues after step (\d+)", again.told)
            # A checkpoint that could not be read once is set aside, and the one before it is used.
            assert f"is finished ({STEPS} steps)" in again.told or int(resumed[1]) >= BEGUN - (case[2] == ERROR), where
        final = complete(folder)[-1]
        manifest, _ = read_manifest(final), storage.load(Checkpoint.open(final))
        assert (manifest["step"], manifest["sha256"], final.name) == (STEPS, whole, f"step_{STEPS:08d}"), where
        # What was not deleted after the last checkpoint stays: none is written after it.
        assert len(complete(folder)) <= storage.KEPT + 1, where
        assert not list(folder.glob(".step_*")), where
        assert [row["step"] for row in rows(folder)] == list(range(1, STEPS + 1)), where


@pytest.mark.slow
@pytest.mark.parametrize("held", [0, 2])
def test_any_call_of_a_store_may_fail_and_it_is_unchanged_or_complete(system, tmp_path, held):
    """Created with two vectors, or extended."""
    folder = tmp_path / "folder"

    def prepare():
        folder.mkdir()
        if held:
            store(folder)

    def content():
        return Store.open(folder / "store", "one", create=True).names

    def parts():
        return sorted(path.name[:13] for path in folder.rglob("*"))  # without checksums: the order of metadata varies

    prepare()
    store(folder)
    after, files = content(), parts()
    shutil.rmtree(folder)
    for _, end, where in strikes(system, "store", folder, prepare):
        assert len(content()) in ((len(after),) if end == "completed" else (held, len(after))), where
        while content() != after:
            assert system.run("store", folder).status == 0, where
        assert parts() == files, where
