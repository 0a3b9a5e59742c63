"""No process may outlive its test: remaining processes are detected, and children of a killed test run exit."""

import os
import subprocess
import sys
import time
from pathlib import Path

import leftovers
import pytest
from command import LIMIT

pytestmark = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="reads /proc")


def python(code: str) -> subprocess.Popen:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment)


def tell_and_sleep() -> None:
    print(os.getpid(), flush=True)
    time.sleep(10**6)


def test_a_process_that_outlives_its_tests_is_named_and_killed():
    sleeps = [sys.executable, "-c", "import time; print(flush=True); time.sleep(10**6)"]
    code = f"""
import subprocess, leftovers
leftovers.LIMIT = 1
leftovers.mark()
subprocess.run(["true"])
left = subprocess.Popen({sleeps}, stdout=subprocess.PIPE, start_new_session=True)
left.stdout.readline()  # Linux shows the environment of a new process only after some time.
try:
    assert list(leftovers.end()) == [left.pid]
finally:
    left.kill()
print(left.wait())
"""
    with python(code) as process:
        assert process.communicate()[0] == "-9\n"


def test_what_a_killed_test_run_has_started_ends_with_it():
    before = leftovers.alive().keys()
    with python(
        "import ranks, test_leftovers; ranks.children.set_forkserver_preload([]);"
        "ranks.exit_codes([ranks.child(test_leftovers.tell_and_sleep)])"
    ) as process:
        rank = int(process.stdout.readline())
        mine = leftovers.alive().keys() - before
        assert {rank, process.pid} < mine
        process.kill()
        process.wait()
        until = time.monotonic() + LIMIT
        while mine & leftovers.alive().keys():
            assert time.monotonic() < until
            time.sleep(0.1)
