"""Write TensorBoard's event files: one chart per curve with its baselines, and pictures.

TensorBoard plots metrics with the same name in one chart, with a line for each folder of event files. A baseline of a
curve is therefore written under the curve's name to a subfolder named after the baseline: chance, copying, pixels, …
"""

import re
import threading
from collections.abc import Mapping

import numpy
from PIL.Image import Image
from torch.utils.tensorboard import SummaryWriter

from ssvit.training.loggers.base import Logger, Rows

# Names of metrics that are a baseline or a bound of the metric without the suffix.
_BASELINE = re.compile(r"(.+?)(?:_by)?_(chance|constant|copying|mean|pixels|uniform|at_most)")
# Metrics without a chart: those by layer, which probes.png shows, and constants such as numbers of images.
_WITHOUT_CHART = re.compile(r"_layer\d+$|_chosen$|/(\w+_)?images$|/class_token$|/multi_label$|/chance$")


def lines(row: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Return the metrics of a row by line ("" for the run, otherwise the baseline) and by the name of the chart."""
    by_line: dict[str, dict[str, float]] = {"": {}}
    for name, value in row.items():
        baseline = _BASELINE.fullmatch(name)
        if baseline and baseline[1] in row:
            by_line.setdefault(baseline[2], {})[baseline[1]] = value
        elif not _WITHOUT_CHART.search(name):
            by_line[""][name] = value
    return by_line


class TensorBoard(Logger):
    """Log to TensorBoard. It discards events of an earlier process after the step at which this one resumes."""

    file = "events.out.tfevents.*"

    def open(self, first_step: int, history: Rows) -> None:
        """Open the event file of the run; event files of baselines are opened when they are first used."""
        # An error of the writer thread would be printed here and again when the next call of the writer raises it.
        self._original_excepthook, threading.excepthook = threading.excepthook, _ignore_writer_threads
        self._purge_step = first_step + 1 if first_step else 0
        self._boards = {"": self._writer("")}

    def _writer(self, line: str) -> SummaryWriter:
        """Return a writer for the run ("") or for a baseline, which has a subfolder."""
        return SummaryWriter(str(self.folder / line), purge_step=self._purge_step)

    def record(self, step: int, row: Mapping[str, float]) -> None:
        """Write the metrics of a row to the charts."""
        for line, metrics in lines(row).items():
            if line not in self._boards:
                self._boards[line] = self._writer(line)
            for name, value in metrics.items():
                self._boards[line].add_scalar(name, value, step)
            self._boards[line].flush()

    def show(self, step: int, name: str, picture: Image) -> None:
        """Write a picture."""
        self._boards[""].add_image(name, numpy.asarray(picture.convert("RGB")), step, dataformats="HWC")

    def close(self) -> None:
        """Close the event files."""
        threading.excepthook = self._original_excepthook
        for board in self._boards.values():
            board.close()


def _ignore_writer_threads(args: threading.ExceptHookArgs) -> None:
    """Suppress tracebacks of TensorBoard's writer thread; the next call of its writer raises the error again."""
    if args.thread is None or not type(args.thread).__module__.startswith("tensorboard."):
        threading.__excepthook__(args)
