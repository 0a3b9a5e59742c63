"""The metrics log of a run: write errors are one line that names the file, and rows are durable."""

import contextlib
import os
import threading
from pathlib import Path

import pytest

from ssvit.checkpoints.run_folder import rows
from ssvit.errors import UserError
from ssvit.training.loggers.options import TensorBoard as TensorBoardOptions
from ssvit.training.loggers.tensorboard import TensorBoard
from ssvit.training.metrics_log import MetricsLog
from ssvit.training.recipe import Recipe

ROW = {"train/loss": 1.0}


def opened(folder):
    board = TensorBoard(TensorBoardOptions(), folder=folder, name="run", hyperparameters={})
    return MetricsLog(folder, Recipe(steps=100, warmup=0), first_step=0, loggers=[board])


@pytest.fixture
def log(tmp_path):
    with contextlib.closing(opened(tmp_path)) as log:
        log.record(1, ROW)
        yield log


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="writes to a device that is full")
@pytest.mark.parametrize("pattern", ["metrics.jsonl", "events.out.tfevents.*"])
def test_a_full_disk_is_one_line_that_names_the_file(log, tmp_path, pattern, capsys):
    (file,) = tmp_path.glob(pattern)
    file.unlink()
    file.symlink_to("/dev/full")
    with pytest.raises(UserError) as error:
        # TensorBoard writes in a thread, which may report the error a row later.
        all(log.record(step, ROW) is None for step in range(2, 100))
    assert str(error.value).startswith(f"{tmp_path / pattern}: cannot be written (No space left on device)")
    assert "Traceback" not in capsys.readouterr().err


def test_the_hook_for_threads_is_put_back(tmp_path):
    former = threading.excepthook
    opened(tmp_path).close()
    assert threading.excepthook is former


def test_rows_are_durable_before_a_checkpoint_is_written(log, tmp_path, monkeypatch):
    done, fsync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: done.append(os.readlink(f"/proc/self/fd/{file}")) or fsync(file))
    with log.paused():
        assert done == [str(tmp_path / "metrics.jsonl")]


def test_rows_that_cannot_be_read_are_told(tmp_path):
    assert rows(tmp_path) == []
    os.mkfifo(tmp_path / "metrics.jsonl")
    with pytest.raises(UserError, match=r"metrics\.jsonl: cannot be read \(not a regular file\)"):
        rows(tmp_path)


def test_a_line_that_is_no_row_is_passed_over(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n' + "[" * 100_000 + '\n{"step": "2"}\n{"step": 3}\n{"ste')
    assert [row["step"] for row in rows(tmp_path)] == [1, 3]
