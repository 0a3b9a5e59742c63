"""Runs of tests: in several processes, with losses that are not finite, killed after a line; what they leave."""

import json
import math
from pathlib import Path

import command
import tiny
from ranks import own_rank, start


def final(folder: Path) -> dict[str, str]:
    """The sha256 of each file of a run's newest checkpoint: equal exactly if the runs are bit for bit the same."""
    newest = max(folder.glob("step_*"))
    return json.loads((newest / "manifest.json").read_text())["sha256"]


def rows(folder: Path, key: str) -> dict[int, float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row[key] for row in lines if key in row}


def join(folder: Path, kwargs: dict) -> None:
    bad_rank, bad_calls = kwargs.pop("bad_on_rank", (None, ()))
    if own_rank() == bad_rank:
        kwargs["objective"] = bad_at(*bad_calls)
    if isinstance(kwargs.get("objective"), tuple):  # a function of tiny.py and its arguments: LoRA cannot be pickled
        name, options = kwargs["objective"]
        kwargs["objective"] = getattr(tiny, name)(**options)
    tiny.train(folder, **kwargs)


def spread(folder: Path, world: int, **kwargs) -> list[int]:
    """Run in `world` processes; returns their exit codes."""
    return start(join, world, folder, kwargs)


class BadAt(tiny.MaskedPatch):
    """Gives a loss that is not finite at some calls of forward, counted from 0."""

    bad: tuple[int, ...] = ()
    calls = 0

    def forward(self, *inputs):
        result = super().forward(*inputs)
        if self.calls in self.bad:
            result["loss"] = result["loss"] * math.nan
        self.calls += 1
        return result


def bad_at(*calls: int) -> BadAt:
    objective = tiny.model()
    objective.__class__ = BadAt
    objective.bad = calls
    return objective


def kill_after(tmp_path: Path, line_start: str, *options: str) -> None:
    process = command.start(tmp_path, "pretrain", *options)
    for line in process.stdout:
        if line.startswith(line_start):
            break
    process.kill()
    process.communicate()
