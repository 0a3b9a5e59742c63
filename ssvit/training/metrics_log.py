"""Report a run by progress bar or lines, metrics.jsonl, loggers and figures."""

import contextlib
import io
import json
import math
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from PIL import Image
from tqdm import tqdm

from ssvit import atomic_io
from ssvit.checkpoints.run_folder import rows
from ssvit.figures.base import Figure
from ssvit.options import UserError, printable
from ssvit.training.loggers.base import Logger, Unreachable
from ssvit.training.recipe import Recipe

_TICK = 0.5  # seconds between refreshes of the progress bar during an evaluation


class MetricsLog:
    """Log a run: print progress, and write metrics and figures.

    Rows that an interrupted run wrote after `first_step` are removed.

    Args:
        folder: The run folder.
        recipe: The hyperparameters.
        first_step: Number of complete steps.
        is_main: Whether this is the main process; logs of all other processes have no output.
        loggers: Loggers in addition to metrics.jsonl.
    """

    def __init__(
        self, folder: Path, recipe: Recipe, *, first_step: int, is_main: bool = True, loggers: Sequence[Logger] = ()
    ) -> None:
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
        with self.paused(), contextlib.ExitStack() as opened:
            for logger in loggers:
                with self._calling(logger):
                    logger.open(first_step, self.history)
                opened.callback(_close, logger)
            self._opened = opened.pop_all()

    def history_of(self, evaluator: str) -> list[dict[str, float | None]]:
        """Return all rows with the names that an evaluator uses: its metrics without the prefix of its name."""
        return [{key.removeprefix(f"{evaluator}/"): value for key, value in row.items()} for row in self.history]

    def say(self, text: str) -> None:
        """Print a line, above the progress bar if there is one."""
        if self.is_main:
            tqdm.write(printable(text), file=sys.stdout)
            sys.stdout.flush()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the block (an evaluation, a checkpoint) from the training rate.

        The rows are synchronised to disk first, so that a checkpoint never survives a power failure without its rows.
        """
        began = time.perf_counter()
        if self.is_main and self._rows.exists():
            with self._writing("metrics.jsonl"):
                atomic_io.synchronise(self._rows)
        yield
        self._since += time.perf_counter() - began

    @contextlib.contextmanager
    def moving(self, what: str) -> Iterator[None]:
        """Show a description in the progress bar during the block, and keep its clock running."""
        if not self.is_main or self._bar.disable:
            yield
            return
        self._bar.set_postfix_str(what)
        done = threading.Event()

        def tick() -> None:
            while not done.wait(_TICK):
                self._bar.refresh()

        clock = threading.Thread(target=tick, daemon=True)
        clock.start()
        try:
            yield
        finally:
            done.set()
            clock.join()

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
            self.say(f"unreadable, replaced by another image: {path}: {unreadable[path]}")
        self._reported.update(unreadable)
        shown = ", ".join(
            f"{name} {value:.3g}" if name == "lr" else f"{name} {value:.3f}" for name, value in metrics.items()
        )
        if not self._bar.disable:
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
            self.say(
                f"step {step}/{self.recipe.steps}  {shown}  {rate:.0f} images/s  "
                f"waiting for data {100 * self._share:.1f} %  {tqdm.format_interval(remaining)} left"
            )
        row = {f"train/{name}": value for name, value in metrics.items()}
        self.record(step, row | {"images_per_second": rate, "waiting_share": self._share})

    def record(self, step: int, row: Mapping[str, float]) -> None:
        """Append a row to metrics.jsonl and pass it to the loggers."""
        if not self.is_main:
            return
        numbers = {name: value if math.isfinite(value) else None for name, value in row.items()}
        self.history.append({"step": step, **numbers})
        with self._writing("metrics.jsonl"), open(self._rows, "a") as file:
            file.write(json.dumps(self.history[-1]) + "\n")
        for logger in self.loggers:
            with self._calling(logger):
                logger.record(step, row)

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
            for logger in self.loggers:
                with self._calling(logger):
                    logger.show(step, name, picture)

    def finish(self) -> None:
        """Notify the loggers that the run is complete, with the last value of each metric."""
        last = {name: value for row in self.history for name, value in row.items() if value is not None}
        if self.is_main:
            for logger in self.loggers:
                with self._calling(logger):
                    logger.finish(last)

    @contextlib.contextmanager
    def _calling(self, logger: Logger) -> Iterator[None]:
        """Handle errors of a logger in the block: as `_writing` does, and an unreachable service is reported once."""
        try:
            with self._writing(logger.file):
                yield
        except Unreachable as error:
            if logger.file not in self._reported:
                self.say(f"{Path(logger.file).stem} is unreachable and will receive the rows later: {error}")
            self._reported.add(logger.file)

    @contextlib.contextmanager
    def _writing(self, name: str) -> Iterator[None]:
        """Convert an OSError into a UserError that names the file; `name` if the error has no file name."""
        try:
            yield
        except OSError as error:
            raise UserError(
                f"{os.fsdecode(error.filename or self.folder / name)}: cannot be written ({error.strerror or error}); "
                "the same command continues from the newest checkpoint"
            ) from None

    def close(self) -> None:
        """Close the progress bar and the loggers."""
        if self.is_main:
            self._bar.close()
            self._opened.close()


def _close(logger: Logger) -> None:
    with contextlib.suppress(OSError, Unreachable):  # has been reported
        logger.close()
