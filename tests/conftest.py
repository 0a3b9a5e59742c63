"""Fixtures of several tests: the environment of the commands, tiny images, and the command line."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # in all processes, whose bits are compared

import shutil
import subprocess
from pathlib import Path

import leftovers
import prefork
import pytest
from command import LIMIT, TINY, program
from forked import collect_rarely

from ssvit.cli import find_command

ROOT = Path(__file__).resolve().parent.parent
# Child processes import modules of tests: the server that they are forked from, and functions of test files.
FOLDERS = sorted({str(path.parent) for path in (ROOT / "tests").rglob("*.py")})
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (*FOLDERS, str(ROOT), os.environ.get("PYTHONPATH"))))
leftovers.mark()


def pytest_collection_finish():
    """Let the garbage collector skip the imported modules, which it would traverse again and again."""
    collect_rarely()


@pytest.fixture(scope="session", autouse=True)
def nothing_is_left():
    """Fail each test process if a process that it has started outlives its tests."""
    yield
    assert leftovers.end() == {}


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session):
    """Count the remaining processes of all test processes in the first one."""
    if os.environ[leftovers.MARK].count("/") == 1:
        left = leftovers.end()
        print(f"\nprocesses left by the tests: {len(left)}", *left.values(), sep="\n")
        if left:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture
def tool(tmp_path):
    """Run a command as a user would: tool("pretrain", "recipe.steps=4", …) -> the finished process."""

    def run(name, *options, status=0, prefix=(), **environment):
        options = (f"outputs={tmp_path}/outputs", *options)
        if prefix:
            done = subprocess.run(
                [*prefix, *program(name, *options)], capture_output=True, text=True, timeout=LIMIT, cwd=tmp_path,
                env={**os.environ, **environment},
            )  # fmt: skip
        else:
            done = prefork.run(name, *options, folder=tmp_path, **environment)
        assert done.returncode == status, f"status {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    return run


@pytest.fixture
def call(tmp_path, monkeypatch):
    """Run a command in this process: call("export", "checkpoint=run", …) -> its result."""
    monkeypatch.chdir(tmp_path)
    return lambda name, *options: find_command(name).call([f"outputs={tmp_path}/outputs", *options])


@pytest.fixture(scope="session")
def pretrained(tmp_path_factory):
    """The outputs of a tiny pre-training run that has finished; not to be changed. Its text is in stdout.txt."""
    folder = tmp_path_factory.mktemp("pretrained")
    options = ("outputs=outputs", *TINY, "encoder.positions=learned_1d", "figures=end")
    done = prefork.run("pretrain", *options, folder=folder)
    assert done.returncode == 0, done.stderr
    (folder / "stdout.txt").write_text(done.stdout)
    return folder / "outputs"


@pytest.fixture
def outputs(pretrained, tmp_path):
    """A copy of them, where `tool` writes."""
    shutil.copytree(pretrained, tmp_path / "outputs")
    return tmp_path / "outputs"


@pytest.fixture
def no_torch(tmp_path):
    """Return a path on which importing torch ends the process, so that tests that pass do not import torch."""
    (tmp_path / "trap" / "torch").mkdir(parents=True)
    (tmp_path / "trap" / "torch" / "__init__.py").write_text("raise SystemExit('torch was imported')")
    return os.pathsep.join((str(tmp_path / "trap"), str(ROOT)))
