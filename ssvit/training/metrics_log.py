"""What a run tells while it works: a live bar or plain lines, metrics.jsonl, TensorBoard, pictures.

Only the main process has a journal that speaks; the others have a silent one.
"""

import contextlib
import io
import json
import math
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy
from PIL import Image
from tqdm import tqdm

from ssvit import atomic_io
from ssvit.options import UserError, printable
from ssvit.training.recipe import Recipe


def rows(folder: Path) -> list[dict[str, Any]]:
    """What a run has written into its metrics.jsonl, each row with its "step"; none where there is no file.

    The line that was being written when a process was killed is passed over. UserError if the file cannot be read.
    """
    found = []
    path = folder / "metrics.jsonl"
    try:
        atomic_io.check_regular(path)
        text = path.read_text(errors="replace")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    for line in text.splitlines():
        with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
            row = json.loads(line)
            row["step"] + 0  # a number, or it is no row
            found.append(row)
    return found


class Journal:
    """Opened at `first_step`; what an interrupted run had written beyond that step is taken out first."""

    def __init__(self, folder: Path, recipe: Recipe, *, first_step: int, speaks: bool = True) -> None:
        self.folder, self.recipe, self.speaks = folder, recipe, speaks
        self.history: list[dict[str, float | None]] = []
        self._since, self._since_step, self._waited, self._rate = time.perf_counter(), first_step, 0.0, 0.0
        self._share = 0.0
        self._told: set[str] = set()
        if not speaks:
            return
        from torch.utils.tensorboard import SummaryWriter

        self._former_hook, threading.excepthook = threading.excepthook, _pass_over_writers
        self._rows = folder / "metrics.jsonl"
        with self._told_in_one_line():
            # A run that begins anew evaluates step 0 anew; one that goes on has done with the step it goes on from.
            self._keep_rows_up_to(first_step or -1)
            with self._naming_events():
                self._board = SummaryWriter(str(folder), purge_step=first_step + 1 if first_step else 0)
        batch = recipe.batch_size
        self._bar = tqdm(
            total=recipe.steps * batch, initial=first_step * batch, unit=" images", unit_scale=True, dynamic_ncols=True,
            disable=not (sys.stderr.isatty() and sys.stdout.isatty()), smoothing=0.05, file=sys.stderr,
        )  # fmt: skip

    def _keep_rows_up_to(self, step: int) -> None:
        if self._rows.exists():
            self.history = [row for row in rows(self.folder) if row["step"] <= step]
            atomic_io.replace(self._rows, "".join(json.dumps(row) + "\n" for row in self.history).encode())

    def history_of(self, evaluator: str) -> list[dict[str, float | None]]:
        """All rows so far as that evaluator knows them: its own metrics by their names, training's as "train/…"."""
        return [{key.removeprefix(f"{evaluator}/"): value for key, value in row.items()} for row in self.history]

    def say(self, text: str) -> None:
        """A line for the user, above the live bar if there is one."""
        if self.speaks:
            tqdm.write(text, file=sys.stdout)
            sys.stdout.flush()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """What runs in the block (an evaluation, a checkpoint) is not training and does not lower the rate shown.

        The rows before it are durable first: no checkpoint outlives a power cut without the rows that led to it.
        """
        began = time.perf_counter()
        if self.speaks and self._rows.exists():
            with self._told_in_one_line():
                atomic_io.synchronise(self._rows)
        yield
        self._since += time.perf_counter() - began

    def train(self, step: int, metrics: Mapping[str, float], *, waited: float, unreadable: Mapping[str, str]) -> None:
        """After `step` updates: the metrics of the last; since the run began, the seconds waited for data and the
        files that could not be read, with the reason.
        """
        if not self.speaks:
            return
        for path in sorted(unreadable.keys() - self._told):
            self.say(f"unreadable, another image takes its place: {printable(path)}: {unreadable[path]}")
        self._told.update(unreadable)
        shown = ", ".join(
            f"{name} {value:.3g}" if name == "lr" else f"{name} {value:.3f}" for name, value in metrics.items()
        )
        if not self._bar.disable:
            self._bar.set_postfix_str(f"{shown}, waiting for data {100 * self._share:.1f} %", refresh=False)
            self._bar.update(self.recipe.batch_size)
        if not self.recipe.due(step, self.recipe.log_every):
            return
        elapsed = max(time.perf_counter() - self._since, 1e-9)
        rate = (step - self._since_step) * self.recipe.batch_size / elapsed
        self._share = (waited - self._waited) / elapsed
        # What is left is told from a mean over the run, so that one slow stretch does not shake it.
        self._rate = rate if self._rate == 0 else 0.7 * self._rate + 0.3 * rate
        left = (self.recipe.steps - step) * self.recipe.batch_size / self._rate
        self._since, self._since_step, self._waited = time.perf_counter(), step, waited
        if self._bar.disable:
            self.say(
                f"step {step}/{self.recipe.steps}  {shown}  {rate:.0f} images/s  "
                f"waiting for data {100 * self._share:.1f} %  {_clock(left)} left"
            )
        rates = {"images_per_second": rate, "waiting_share": self._share}
        self.record(step, {**{f"train/{name}": value for name, value in metrics.items()}, **rates})

    def record(self, step: int, row: Mapping[str, float]) -> None:
        """Put a row into metrics.jsonl and its scalars into TensorBoard."""
        if not self.speaks:
            return
        numbers = {name: value if math.isfinite(value) else None for name, value in row.items()}
        self.history.append({"step": step, **numbers})
        with self._told_in_one_line():
            with atomic_io.naming(self._rows), open(self._rows, "a") as file:
                file.write(json.dumps(self.history[-1]) + "\n")
            with self._naming_events():
                for name, value in row.items():
                    self._board.add_scalar(name, value, step)
                self._board.flush()

    def write(self, name: str, text: str) -> None:
        """Save a table as text under its name in the run folder."""
        if self.speaks:
            with self._told_in_one_line():
                atomic_io.replace(self.folder / name, text.encode())

    def show(self, step: int, name: str, figure: Any) -> None:
        """Save a figure as <name>.png in the run folder, and put it into TensorBoard."""
        if not self.speaks:
            return
        with self._told_in_one_line():
            png = io.BytesIO()
            figure.savefig(png, format="png")
            atomic_io.replace(self.folder / f"{name}.png", png.getvalue())
            with Image.open(png) as picture, self._naming_events():
                self._board.add_image(name, numpy.asarray(picture.convert("RGB")), step, dataformats="HWC")

    @contextlib.contextmanager
    def _told_in_one_line(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UserError(
                f"{os.fsdecode(error.filename or self.folder)}: cannot be written ({error.strerror or error}); "
                "the same command goes on from the newest checkpoint"
            ) from None

    def _naming_events(self) -> contextlib.AbstractContextManager[None]:
        return atomic_io.naming(self.folder / "events.out.tfevents.*")

    def close(self) -> None:
        """Finish the bar and the event file."""
        if self.speaks:
            self._bar.close()
            with contextlib.suppress(OSError):  # on a full disk, which has been told of already
                self._board.close()
            threading.excepthook = self._former_hook


def _pass_over_writers(args: threading.ExceptHookArgs) -> None:
    """Show no traceback of TensorBoard's writing thread: its error is raised once more by the next call of its writer.

    Any other thread's is shown as ever.
    """
    if args.thread is None or not type(args.thread).__module__.startswith("tensorboard."):
        threading.__excepthook__(args)


def _clock(seconds: float) -> str:
    """Seconds as 2:05 or 3:02:05."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
