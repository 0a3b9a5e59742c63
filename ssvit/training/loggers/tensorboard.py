"""Write TensorBoard's event files: one chart per curve with its baselines, pictures and hyperparameters.

TensorBoard plots metrics with the same name in one chart, with a line for each folder of event files. A baseline of a
curve is therefore written under the curve's name to a subfolder named after the baseline: chance, copying, pixels, …
"""

import re
import threading
import time
from collections.abc import Mapping

import numpy
from PIL.Image import Image
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

from ssvit.training.loggers.base import Logger, Rows

# Suffixes of the names of metrics that are a baseline or a bound of the metric without the suffix.
_LINES: Mapping[str, str] = {
    "_by_chance": "chance",
    "_chance": "chance",
    "_constant": "constant",
    "_copying": "copying",
    "_mean": "mean",
    "_place": "place",
    "_pixels": "pixels",
    "_uniform": "uniform",
    "_at_most": "at_most",
}
# Metrics without a chart: those by layer, which probes.png shows, and constants such as numbers of images.
_NO_CARD = re.compile(r"_layer\d+$|_chosen$|/(\w+_)?images$|/class_token$|/multi_label$|/chance$")


def lines(row: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Return the metrics of a row by line ("" for the run, otherwise the baseline) and by the name of the chart."""
    found: dict[str, dict[str, float]] = {"": {}}
    for name, value in row.items():
        curves = [(name.removesuffix(ending), line) for ending, line in _LINES.items() if name.endswith(ending)]
        curve, line = next(((curve, line) for curve, line in curves if curve in row), (name, ""))
        if line or not _NO_CARD.search(name):
            found.setdefault(line, {})[curve] = value
    return found


class TensorBoard(Logger):
    """Log to TensorBoard. It discards events of an earlier process after the step at which this one resumes."""

    file = "events.out.tfevents.*"

    def open(self, first_step: int, history: Rows) -> None:
        """Open the event file of the run; those of baselines are opened when they are first used."""
        self._former_hook, threading.excepthook = threading.excepthook, _pass_over_writers
        self._purge_step = first_step + 1 if first_step else 0
        self._boards: dict[str, SummaryWriter] = {}
        self._open("")

    def _open(self, line: str) -> None:
        folder = self.folder / line
        # TensorBoard reads files in the order of their names: second, host, process, number, where 10 is before 9. So
        # two files of one folder need different seconds.
        taken = {path.name.split(".")[3] for path in folder.glob(self.file)}
        while f"{int(now := time.time()):010d}" in taken:
            time.sleep(1 - now % 1)
        self._boards[line] = SummaryWriter(str(folder), purge_step=self._purge_step)

    def record(self, step: int, row: Mapping[str, float]) -> None:
        """Write the metrics of a row to the charts."""
        for line, metrics in lines(row).items():
            if line not in self._boards:
                self._open(line)
            for name, value in metrics.items():
                self._boards[line].add_scalar(name, value, step)
            self._boards[line].flush()

    def show(self, step: int, name: str, picture: Image) -> None:
        """Write a picture."""
        self._boards[""].add_image(name, numpy.asarray(picture.convert("RGB")), step, dataformats="HWC")

    def finish(self, metrics: Mapping[str, float]) -> None:
        """Write the hyperparameters for the tab HParams, which reads the metrics from the last points of the curves.

        No description of the experiment is written: the tab reads only that of one run. Without it, the tab lists the
        metrics of all runs, and first the hyperparameters that differ between them.
        """
        _, begin, end = hparams(dict(self.hyperparameters), {})
        for summary in (begin, end):
            self._boards[""].file_writer.add_summary(summary)  # type: ignore[attr-defined]  # annotated as None

    def close(self) -> None:
        """Close the event files."""
        threading.excepthook = self._former_hook
        for board in self._boards.values():
            board.close()


def _pass_over_writers(args: threading.ExceptHookArgs) -> None:
    """Suppress tracebacks of TensorBoard's writer thread; the next call of its writer raises the error again."""
    if args.thread is None or not type(args.thread).__module__.startswith("tensorboard."):
        threading.__excepthook__(args)
