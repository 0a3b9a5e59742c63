"""TensorBoard's event files: a card for each curve, with its baselines as lines in it, pictures and hyperparameters.

TensorBoard plots metrics of one name in one card, a line for each folder with event files. So a baseline of a curve is
written under the curve's name into a subfolder of the run's with the baseline's name: chance, copying, pixels, …
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

# A metric named after another one with such an ending is a baseline of it, or a bound: constants, most of them.
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
# What probes.png shows layer by layer, and numbers of images, which are no curves.
_NO_CARD = re.compile(r"_layer\d+$|_chosen$|/(\w+_)?images$|/class_token$|/multi_label$|/chance$")


def lines(row: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """The metrics of a row by the line that they belong to, "" for the run's own, and by the names of their cards."""
    found: dict[str, dict[str, float]] = {"": {}}
    for name, value in row.items():
        curves = [(name.removesuffix(ending), line) for ending, line in _LINES.items() if name.endswith(ending)]
        curve, line = next(((curve, line) for curve, line in curves if curve in row), (name, ""))
        if line or not _NO_CARD.search(name):
            found.setdefault(line, {})[curve] = value
    return found


class TensorBoard(Logger):
    """TensorBoard drops what an earlier process wrote beyond the step from which this one goes on."""

    file = "events.out.tfevents.*"

    def open(self, first_step: int, history: Rows) -> None:
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
        for line, metrics in lines(row).items():
            if line not in self._boards:
                self._open(line)
            for name, value in metrics.items():
                self._boards[line].add_scalar(name, value, step)
            self._boards[line].flush()

    def show(self, step: int, name: str, picture: Image) -> None:
        self._boards[""].add_image(name, numpy.asarray(picture.convert("RGB")), step, dataformats="HWC")

    def finish(self, metrics: Mapping[str, float]) -> None:
        """Write the options for the tab HParams, which takes the metrics from the last points of the curves.

        Without a description of the experiment, of which the tab reads only one run's, it has the metrics of all runs,
        and the options in which they differ come first.
        """
        _, begin, end = hparams(dict(self.hyperparameters), {})
        for summary in (begin, end):
            self._boards[""].file_writer.add_summary(summary)  # type: ignore[attr-defined]  # typed as None

    def close(self) -> None:
        threading.excepthook = self._former_hook
        for board in self._boards.values():
            board.close()


def _pass_over_writers(args: threading.ExceptHookArgs) -> None:
    """Show no traceback of TensorBoard's writing thread: the next call of its writer raises the error again."""
    if args.thread is None or not type(args.thread).__module__.startswith("tensorboard."):
        threading.__excepthook__(args)
