"""Report a run by progress bar or lines, metrics.jsonl, loggers and figures.

Reading a loss synchronises host and device, after which the device is idle until it gets new work. `DelayedMetrics`
therefore reads the metrics of an update some updates later.
"""

import contextlib
import io
import json
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor
from tqdm import tqdm

from ssvit.checkpoints.run_folder import rows
from ssvit.config.declaration import Figures
from ssvit.data.loader import Loader
from ssvit.engine import atomic_io
from ssvit.errors import UserError, printable
from ssvit.figures.base import Figure
from ssvit.training.loggers.base import Logger
from ssvit.training.recipe import Recipe
from ssvit.training.state import State

AHEAD = 3  # updates that the host may start before it reads the metrics of the oldest one
MAX_SKIPPED_STEPS = 5  # consecutive non-finite updates after which the run stops


class MetricsLog:
    """Log a run: print progress, and write metrics and figures.

    Rows that an interrupted run wrote after `first_step` are removed.

    Args:
        folder: The run folder.
        recipe: The hyperparameters.
        first_step: Number of complete steps.
        is_main: Whether this is the main process; logs of all other processes have no output.
        loggers: Loggers in addition to metrics.jsonl.
        figures: When figures are drawn.
        clock: Function that returns the time in seconds that updates spend, such as CPU time. `seconds` of a row
            is the time since the previous row with `seconds`, without evaluations and checkpoints.
    """

    def __init__(
        self,
        folder: Path,
        recipe: Recipe,
        *,
        first_step: int,
        is_main: bool = True,
        loggers: Sequence[Logger] = (),
        figures: Figures = "end",
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.figures = figures
        self._clock, self._began = clock, clock()
        self.folder, self.recipe, self.is_main, self.loggers = folder, recipe, is_main, loggers
        self.history: list[dict[str, float | None]] = []
        self._since, self._since_step, self._waited = time.perf_counter(), first_step, 0.0
        self._rate = self._share = 0.0
        self._reported: set[str] = set()
        if not is_main:
            return
        self._rows = folder / "metrics.jsonl"
        with self._writing("metrics.jsonl"):
            if self._rows.exists():
                # A new run evaluates step 0 again; a resumed run has evaluated its first step already.
                self.history = [row for row in rows(folder) if row["step"] <= (first_step or -1)]
                atomic_io.replace(self._rows, "".join(json.dumps(row) + "\n" for row in self.history).encode())
        self._bar = tqdm(
            total=recipe.steps, initial=first_step, dynamic_ncols=True, smoothing=0.05, file=sys.stderr,
            disable=not (sys.stderr.isatty() and sys.stdout.isatty()),
            bar_format="step {n_fmt}/{total_fmt} |{bar}| {elapsed}<{remaining}{postfix}",
        )  # fmt: skip
        with self.paused():
            self._call_loggers(lambda logger: logger.open(first_step, self.history))

    def history_of(self, evaluator: str) -> list[dict[str, float | None]]:
        """Return all rows with the names that an evaluator uses: its metrics without the prefix of its name."""
        return [{key.removeprefix(f"{evaluator}/"): value for key, value in row.items()} for row in self.history]

    def print_line(self, text: str) -> None:
        """Print a line, above the progress bar if there is one."""
        if self.is_main:
            tqdm.write(printable(text), file=sys.stdout)
            sys.stdout.flush()

    @contextlib.contextmanager
    def paused(self, *, in_seconds: bool = False) -> Iterator[None]:
        """Exclude the block (an evaluation, a checkpoint) from the training rate.

        The rows are synchronised to disk first, so that a checkpoint never survives a power failure without its rows.

        Args:
            in_seconds: Whether the `seconds` of the next row include the block, as for the preparation of an objective.
        """
        began, spent = time.perf_counter(), self._clock()
        if self.is_main and self._rows.exists():
            with self._writing("metrics.jsonl"):
                atomic_io.synchronise(self._rows)
        yield
        self._since += time.perf_counter() - began
        if not in_seconds:
            self._began += self._clock() - spent

    def describe(self, work: str) -> None:
        """Show a description of the current work in the progress bar."""
        if self.is_main:
            self._bar.set_postfix_str(work)

    def train(self, step: int, metrics: Mapping[str, float], *, waited: float, unreadable: Mapping[str, str]) -> None:
        """Report the metrics of an update.

        Args:
            step: The number of completed updates.
            metrics: The metrics of the update.
            waited: Seconds spent waiting for data since the start of the run.
            unreadable: Files that could not be read since the start of the run, each with the reason.
        """
        if not self.is_main:
            return
        for path in sorted(unreadable.keys() - self._reported):
            self.print_line(f"{path}: cannot be read, replaced by another image: {unreadable[path]}")
        self._reported.update(unreadable)
        speed = f", {self._rate:.0f} images/s" if self._rate else ""
        waiting = f", waiting {100 * self._share:.0f} %" if self._share > 0.05 else ""
        self._bar.set_postfix_str(f"loss {metrics['loss']:.3f}{speed}{waiting}", refresh=False)
        self._bar.update()
        if not self.recipe.due(step, self.recipe.log_every):
            return
        elapsed = max(time.perf_counter() - self._since, 1e-9)
        rate = (step - self._since_step) * self.recipe.batch_size / elapsed
        self._share = (waited - self._waited) / elapsed
        # The remaining time follows from a moving average of the rate, which smooths out short delays.
        self._rate = rate if self._rate == 0 else 0.7 * self._rate + 0.3 * rate
        remaining = (self.recipe.steps - step) * self.recipe.batch_size / self._rate
        self._since, self._since_step, self._waited = time.perf_counter(), step, waited
        if self._bar.disable:
            values = ", ".join(
                f"{name} {value:.3g}" if name == "lr" else f"{name} {value:.3f}" for name, value in metrics.items()
            )
            self.print_line(
                f"step {step}/{self.recipe.steps}  {values}  {rate:.0f} images/s  "
                f"waiting for data {100 * self._share:.1f} %  {tqdm.format_interval(remaining)} left"
            )
        row = {f"train/{name}": value for name, value in metrics.items()}
        row |= {"images_per_second": rate, "waiting_share": self._share}
        self.record(step, row | {"seconds": self._take_seconds()})

    def record_seconds(self, step: int) -> None:
        """Record the seconds since the last row of training, before a checkpoint is saved between two such rows.

        They would be lost if the run continued from this checkpoint.
        """
        if not self.recipe.due(step, self.recipe.log_every):
            self.record(step, {"seconds": self._take_seconds()})

    def _take_seconds(self) -> float:
        """Return the seconds since the last call, without paused blocks."""
        now = self._clock()
        seconds, self._began = now - self._began, now
        return seconds

    def record(self, step: int, row: Mapping[str, float]) -> None:
        """Append a row to metrics.jsonl and pass it to the loggers."""
        if not self.is_main:
            return
        numbers = {name: value if math.isfinite(value) else None for name, value in row.items()}
        self.history.append({"step": step, **numbers})
        with self._writing("metrics.jsonl"), open(self._rows, "a") as file:
            file.write(json.dumps(self.history[-1]) + "\n")
        self._call_loggers(lambda logger: logger.record(step, row))

    def write(self, name: str, text: str) -> None:
        """Write a table as a text file in the run folder."""
        with self._writing(name):
            atomic_io.replace(self.folder / name, text.encode())

    def show(self, step: int, name: str, figure: Figure) -> None:
        """Save a figure as <name>.png in the run folder and pass it to the loggers."""
        with self._writing(f"{name}.png"):
            data = figure.png()
            atomic_io.replace(self.folder / f"{name}.png", data)
        with Image.open(io.BytesIO(data)) as picture:
            self._call_loggers(lambda logger: logger.show(step, name, picture))

    def finish(self) -> None:
        """Notify the loggers that the run is complete."""
        self._call_loggers(lambda logger: logger.finish())

    def _call_loggers(self, call: Callable[[Logger], None]) -> None:
        """Call a method of each logger; an OSError becomes a UserError that names the logger's file."""
        for logger in self.loggers:
            with self._writing(logger.file):
                call(logger)

    @contextlib.contextmanager
    def _writing(self, name: str) -> Iterator[None]:
        """Convert an OSError into a UserError that names the file; `name` if the error has no file name."""
        try:
            yield
        except OSError as error:
            raise UserError(
                f"{os.fsdecode(error.filename or self.folder / name)}: cannot be written ({error.strerror or error}); "
                "the same command without overwrite=true continues from the newest checkpoint"
            ) from None

    def close(self) -> None:
        """Close the progress bar and the loggers."""
        if self.is_main:
            self._bar.close()
            for logger in self.loggers:
                with contextlib.suppress(OSError):  # has been reported
                    logger.close()


@dataclass(frozen=True)
class Numbers:
    """The metrics of one update, averaged over the processes.

    Attributes:
        names: The names of the scalars that the objective returns.
        values: (len(names) + 2,) float64: these scalars, the norm of the gradient, and a number above 0 if a process
            has received a request to stop.
    """

    names: tuple[str, ...]
    values: Tensor

    @property
    def applied(self) -> Tensor:
        """Return whether loss and gradient are finite, () bool; otherwise, the update has to be skipped."""
        return self.values[self.names.index("loss")].isfinite() & self.values[-2].isfinite()


class DelayedMetrics:
    """Copy the metrics of updates to the host, and log them in order once they have arrived."""

    def __init__(self, state: State, loader: Loader, log: MetricsLog) -> None:
        self._state, self._loader, self._log = state, loader, log
        self._copies: deque[tuple[int, tuple[str, ...], Tensor, torch.cuda.Event | None]] = deque()
        self._skipped = 0

    def add(self, step: int, numbers: Numbers) -> None:
        """Start copying the metrics of an update.

        Args:
            step: The number of the update, counted from 0.
            numbers: Its metrics.
        """
        copied = None
        values = numbers.values.to("cpu", non_blocking=True)  # from a GPU to pinned memory
        if numbers.values.is_cuda:
            copied = torch.cuda.Event()
            copied.record()
        self._copies.append((step, numbers.names, values, copied))

    def read(self, *, every: bool) -> bool:
        """Log metrics whose copy is complete.

        All processes read the metrics of the same updates, so that they reach the same decision.

        Args:
            every: Whether to wait for the metrics of all updates; otherwise, the newest `AHEAD` are not read.

        Returns:
            Whether a process has received a request to stop.

        Raises:
            UserError: The loss or gradient was not finite in `MAX_SKIPPED_STEPS` consecutive updates.
        """
        stopping = False
        while len(self._copies) > (0 if every else AHEAD):
            step, names, copy, copied = self._copies.popleft()
            if copied is not None:
                copied.synchronize()
            *values, norm, stop = copy.tolist()
            self._report(step, dict(zip(names, values, strict=True)), norm)
            stopping |= stop > 0
        return stopping

    def _report(self, step: int, metrics: dict[str, float], norm: float) -> None:
        """Log the metrics of an update, and raise UserError after too many skipped updates."""
        recipe, loss = self._state.recipe, metrics["loss"]
        self._skipped = 0 if math.isfinite(loss) and math.isfinite(norm) else self._skipped + 1
        if self._skipped:
            self._log.print_line(f"step {step + 1}: skipped, loss {loss:g}, norm of the gradient {norm:g}")
        metrics |= {"lr": recipe.learning_rate(step), "gradient_norm": norm, **self._state.scheduled(step)}
        self._log.train(step + 1, metrics, waited=self._loader.waited, unreadable=self._loader.unreadable)
        if self._skipped == MAX_SKIPPED_STEPS:
            raise UserError(
                f"recipe.lr={recipe.lr:g}: loss or gradient was not finite in {MAX_SKIPPED_STEPS} consecutive steps "
                f"up to step {step + 1}; try a lower learning rate or recipe.precision=32-true"
            )
