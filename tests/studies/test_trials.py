"""A command of a study receives the signals of the study, which states how it ended."""

import os
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from ssvit.errors import Failure
from ssvit.studies.trials import Trials

# A script that stands in for Python and saves its state when it is stopped.
SAVING = "trap 'touch saved; exit 143' TERM; touch started; while :; do sleep 0.1; done"


@pytest.fixture
def call(monkeypatch, tmp_path):
    """Return a function that calls a command of a study, for which a shell script is executed."""
    monkeypatch.chdir(tmp_path)
    study = SimpleNamespace(options=SimpleNamespace(threads=1), line=SimpleNamespace(flags=[]), folder=Path("study"))

    def called(script, **options):
        Path("script").write_text(f"#!/bin/sh\n{script}\n")
        Path("script").chmod(0o755)
        monkeypatch.setattr("sys.executable", "./script")
        return Trials.call(study, "pretrain", ["recipe.steps=1"], **options)

    return called


def test_a_command_has_the_options_and_returns_its_output(call):
    assert call('echo "$@" $OMP_NUM_THREADS', capture=True) == "-m ssvit pretrain recipe.steps=1 outputs=study 1\n"


@pytest.mark.parametrize(
    ("script", "status", "reason"),
    [("exit 2", 2, "failed"), ("kill -9 $$", 137, "SIGKILL"), ("kill $$", 143, "SIGTERM")],
)
def test_the_status_is_that_of_a_shell_and_the_reason_is_named(call, script, status, reason):
    with pytest.raises(Failure, match=rf"^pretrain recipe\.steps=1: .*{reason}") as failure:
        call(script)
    assert failure.value.status == status


def test_sigterm_is_passed_to_the_command_which_saves_its_state(call):
    former = signal.getsignal(signal.SIGTERM)

    def stop():
        while not Path("started").exists() or signal.getsignal(signal.SIGTERM) is former:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=stop)
    thread.start()
    with pytest.raises(Failure) as failure:
        call(SAVING)
    thread.join()
    assert (failure.value.status, Path("saved").exists()) == (143, True)
    assert signal.getsignal(signal.SIGTERM) is former
