"""ssvit pretrain as a user runs it: one-line errors before torch is imported, and how runs end."""

import fcntl
import json
import os
import re
import signal
import sys
import time
from pathlib import Path

import prefork
import pytest
import yaml
from command import LIMIT, TINY, error_of, one_line, tiny_options
from images import picture, put
from PIL import Image
from runs import kill_after

from ssvit.engine import atomic_io
from ssvit.errors import UserError

RUN = "masked_patch_shapes"
SAME = (*TINY, "encoder.positions=learned_1d")  # the options of the fixture `pretrained`


def test_a_folder_of_files_that_are_no_images_stops_the_run(tool, tmp_path):
    (tmp_path / "texts").mkdir()
    for number in range(20):
        (tmp_path / "texts" / f"{number}.jpg").write_text("no image")
    done = tool("pretrain", *TINY[3:], "data=folder", "data.root=texts", "workers=2", status=1)
    (line,) = done.stderr.splitlines()
    assert re.search(r"texts/\d+\.jpg", line)


def test_a_run_tells_and_leaves_what_it_should(pretrained):
    left, lines = pretrained / RUN, (pretrained.parent / "stdout.txt").read_text().splitlines()
    assert sum(line.startswith("step ") for line in lines) == 6
    assert {path.name for path in left.glob("*.png")} == {"mosaic.png", "learning.png"}
    for file in left.glob("*.png"):
        with Image.open(file) as image:
            assert min(image.size) > 300
    assert yaml.safe_load((left / "config.yaml").read_text())["recipe"]["steps"] == 6
    assert sorted(path.name for path in left.glob("step_*")) == [f"step_{step:08d}" for step in (2, 4, 6)]
    rows = [json.loads(line) for line in (left / "metrics.jsonl").read_text().splitlines()]
    held_out = [row for row in rows if "held_out/loss" in row]
    assert [row["step"] for row in held_out] == [0, 3, 6]
    expected = {"accuracy_masked", "accuracy_replaced", "accuracy_unchanged", "accuracy_copying", "accuracy_constant",
                "loss_constant"}  # fmt: skip
    assert expected <= {key.removeprefix("held_out/") for key in held_out[-1]}
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(left)).Reload()
    scalars = {"train/loss", "held_out/accuracy_masked", "probe/knn20", "probe/ridge_last"}
    assert scalars <= set(board.Tags()["scalars"])
    assert "mosaic" in board.Tags()["images"]


@pytest.mark.parametrize("option", ["recipe.lr=0.1", "data.augment.flip=0"])
def test_another_configuration_is_refused(outputs, tool, no_torch, option):
    line = one_line(tool("pretrain", *SAME, option, status=1, PYTHONPATH=no_torch))
    assert "was started with" in line
    assert option.partition("=")[0].rpartition(".")[2] in line


def test_a_run_is_not_continued_with_other_images(tool, tmp_path):
    """A run of a version that did not record the contents is continued if names and sizes are equal."""
    for number in range(24):
        put(tmp_path / "photos" / f"{number:02d}.bmp", picture(number, "BMP", (16, 16)))
    command = ("pretrain", *TINY[3:], "data=folder", "data.root=photos", "recipe.steps=3", "recipe.warmup=1")
    tool(*command)
    for size in ((17, 16), (16, 16)):  # in another number of bytes, and in as many
        put(tmp_path / "photos" / "06.bmp", picture(100, "BMP", size))
        line = tool(*command, status=1).stderr
        assert line.startswith("ssvit: data: ")
        assert re.findall(r"\w+\.bmp", line) == ["06.bmp"]
    (stored,) = (tmp_path / "outputs").glob("*/step_00000003/manifest.json")
    manifest = json.loads(stored.read_text())
    assert manifest.pop("images") == 22
    del manifest["contents"]
    stored.write_bytes(atomic_io.sealed(manifest))
    assert "is finished" in tool(*command).stdout


def test_the_precision_and_micro_batches_that_are_compared_with_each_other_are_those_of_the_start(tool):
    command = ("pretrain", *tiny_options("target"), "objective=simclr")
    tool(*command)
    for option, started in (("recipe.accumulate=2", "must be 1"), ("recipe.precision=64-true", "=32-true")):
        assert started in tool(*command, option, status=1).stderr


def test_a_run_that_never_trained_may_be_configured_anew(tool, no_torch):
    for lr in (0.1, 0.2):
        done = tool("pretrain", *TINY, f"recipe.lr={lr}", status=1, PYTHONPATH=no_torch)
        assert done.stderr == "torch was imported\n"


def test_a_folder_in_use_is_refused(outputs, tool, no_torch):
    with open(outputs / RUN / "lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "another process" in one_line(tool("pretrain", *SAME, status=1, PYTHONPATH=no_torch))


def test_overwrite_clears_a_run_but_nothing_else(outputs, tool, no_torch, tmp_path):
    (outputs / RUN / "step_00000002" / "note").write_text("old")
    tool("pretrain", *SAME, "overwrite=true", "recipe.steps=4")
    assert not (outputs / RUN / "step_00000006").exists()
    (tmp_path / "outputs" / "mine").mkdir()
    (tmp_path / "outputs" / "mine" / "thesis.tex").write_text("precious")
    line = one_line(tool("pretrain", *TINY, "name=mine", "overwrite=true", status=1, PYTHONPATH=no_torch))
    assert line.startswith("ssvit: name=mine: ")
    assert (tmp_path / "outputs" / "mine" / "thesis.tex").read_text() == "precious"


@pytest.mark.parametrize(("function", "seed"), [("build_evaluators", 0), ("loop.train", 1)])
def test_overwriting_keeps_the_former_run_until_the_new_one_trains(outputs, call, monkeypatch, function, seed):
    def fail(*_, **__):
        raise UserError("stopped")

    monkeypatch.setattr(f"ssvit.training.session.{function}", fail)
    error_of(call, "pretrain", *SAME, "overwrite=true", "recipe.seed=1", "probes=[]")
    stored = yaml.safe_load((outputs / RUN / "config.yaml").read_text())
    assert stored["recipe"]["seed"] == seed
    assert any((outputs / RUN).glob("step_*")) == (seed == 0)


def test_a_signal_ends_the_run_saved_with_the_shells_status(tmp_path):
    signum, status = signal.SIGTERM, 143  # tests/training/test_terminal.py has Ctrl-C
    endless = (f"recipe.{name}=100000" for name in ("steps", "save_every", "evaluate_every"))
    ended, errors = kill_after(tmp_path, "step 3/", *TINY, *endless, signum=signum)
    assert ended == status
    assert len(errors.splitlines()) == 1
    assert f"stopped by {signum.name}" in errors
    assert len(list((tmp_path / "outputs/masked_patch_shapes").glob("step_*"))) == 1


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the worker in /proc")
def test_a_signal_acts_at_once_amid_the_wait_for_a_stopped_worker(tmp_path):
    (tmp_path / "images").mkdir()
    for i in range(16):
        Image.new("RGB", (20, 20), (i, 2 * i, 3 * i)).save(tmp_path / "images" / f"{i}.png")
    options = (*TINY[3:], "data=folder", "data.root=images", "workers=1", "loader_timeout=0", "probes=[]",
               "recipe.steps=100000", "recipe.save_every=100000", "recipe.evaluate_every=100000")  # fmt: skip
    told = [str(tmp_path / name) for name in ("stdout", "stderr")]
    Path(told[0]).touch()
    process = prefork.start("pretrain", "outputs=outputs", *options, folder=tmp_path, told=told)
    try:
        while process.is_alive() and "step 3/" not in Path(told[0]).read_text():
            time.sleep(0.05)
        (worker,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(worker), signal.SIGSTOP)
        time.sleep(1)  # the batches that were read ahead are used up
        process.terminate()
        process.join(LIMIT)
    finally:
        process.kill()
    (line,) = Path(told[1]).read_text().splitlines()
    assert process.exitcode == 143
    assert "SIGTERM" in line
    step = int(re.search(r"after step (\d+)", line)[1])
    (checkpoint,) = (tmp_path / "outputs/masked_patch_folder").glob("step_*")
    assert int(checkpoint.name.removeprefix("step_")) == step
    assert not Path(f"/proc/{worker}").exists()


def test_a_fault_that_only_the_data_show_is_told_in_one_line(tool, tmp_path):
    (tmp_path / "cifar").mkdir()
    done = tool("pretrain", *TINY[4:], "data=cifar10", "data.root=cifar", status=1)
    (line,) = done.stderr.splitlines()
    assert line.startswith("ssvit: data.root=cifar: ")


# Runs a tool and prints the remaining threads after all other exit handlers.
THREADS_AT_THE_END = """
import atexit, pathlib, runpy, sys
tell = lambda: print("threads:", *(path.read_text() for path in pathlib.Path("/proc/self/task").glob("*/comm")))
atexit.register(tell)
del sys.argv[:3]  # this file, the interpreter and -m
runpy.run_module(sys.argv[0], run_name="__main__")
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are listed by Linux alone")
def test_no_thread_outlives_a_run_of_several_processes(tool, tmp_path):
    """A thread that frees a tensor while the interpreter exits may abort the process, but only rarely."""
    (tmp_path / "threads.py").write_text(THREADS_AT_THE_END)
    done = tool("pretrain", *TINY, "probes=[]", "launch.strategy=ddp", "launch.devices=1",
                prefix=(sys.executable, str(tmp_path / "threads.py")))  # fmt: skip
    threads = done.stdout.split("threads:")[1].split()
    assert (tmp_path / "outputs" / RUN / "step_00000006").is_dir()
    assert threads
    assert not [name for name in threads if "gloo" in name]
