"""Runs of tests: in several processes, with losses that are not finite, killed after a line; what they leave."""

import json
import signal
from pathlib import Path

import prefork
import tiny
import torch
from ranks import own_rank, start

from ssvit.checkpoints import storage
from ssvit.checkpoints.checkpoint import Checkpoint
from ssvit.data.augment.options import CenterCrop
from ssvit.evaluation.evaluators.options import Prediction as PredictionOptions
from ssvit.evaluation.evaluators.prediction import Prediction


def final(folder: Path) -> dict[str, str]:
    """The sha256 of each file of a run's newest checkpoint: equal exactly if the runs are bit for bit the same."""
    newest = max(folder.glob("step_*"))
    return json.loads((newest / "manifest.json").read_text())["sha256"]


def states(path: Path) -> dict[str, dict[str, torch.Tensor]]:
    """The tensors of a checkpoint, or of the newest one of a run, by kind and name."""
    return storage.load(Checkpoint.open(path))


def assert_close(folder: Path, other: Path) -> None:
    """The newest checkpoints of two runs agree to 1e-6."""
    torch.testing.assert_close(states(folder), states(other), rtol=1e-6, atol=1e-8)


def held_out() -> dict[str, Prediction]:
    """The evaluator of masked patch prediction."""
    options = PredictionOptions()
    return {"held_out": Prediction(options, source=tiny.source(), transform=CenterCrop(size=16).build())}


def rows(folder: Path, key: str) -> dict[int, float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row[key] for row in lines if key in row}


def join(folder: Path, kwargs: dict) -> None:
    bad_rank, bad_calls = kwargs.pop("bad_on_rank", (None, ()))
    if own_rank() == bad_rank:
        kwargs["objective"] = tiny.at(tiny.model(), *bad_calls, act=tiny.not_finite)
    if isinstance(kwargs.get("objective"), tuple):  # a function of tiny.py and its arguments: LoRA cannot be pickled
        name, options = kwargs["objective"]
        kwargs["objective"] = getattr(tiny, name)(**options)
    tiny.train(folder, **kwargs)


def train_in_processes(folder: Path, world: int, **kwargs) -> list[int]:
    """Run in `world` processes; returns their exit codes."""
    return start(join, world, folder, kwargs)


def kill_after(
    folder: Path, line_start: str, *options: str, tool="pretrain", signum=signal.SIGKILL, **environment: str
) -> tuple[int, str]:
    """Run a command that sends itself a signal after a line of its output; returns its exit status and its errors."""
    told = [str(folder / name) for name in ("stdout", "stderr")]
    process = prefork.start(
        tool, "outputs=outputs", *options, folder=folder, told=told, signal_after=(line_start, signum), **environment
    )
    process.join()
    output, errors = (Path(file).read_text() for file in told)
    assert any(line.startswith(line_start) for line in output.splitlines()), output + errors
    return process.exitcode, errors
