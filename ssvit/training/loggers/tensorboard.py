"""TensorBoard's event files in the run's folder: a card for each metric, and the pictures."""

import threading
from collections.abc import Mapping

import numpy
from PIL.Image import Image

from ssvit.training.loggers.base import Logger, Rows


class TensorBoard(Logger):
    """TensorBoard drops what an earlier process wrote beyond the step from which this one goes on."""

    file = "events.out.tfevents.*"

    def open(self, first_step: int, history: Rows) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._former_hook, threading.excepthook = threading.excepthook, _pass_over_writers
        self._board = SummaryWriter(str(self.folder), purge_step=first_step + 1 if first_step else 0)

    def record(self, step: int, row: Mapping[str, float]) -> None:
        for name, value in row.items():
            self._board.add_scalar(name, value, step)
        self._board.flush()

    def show(self, step: int, name: str, picture: Image) -> None:
        self._board.add_image(name, numpy.asarray(picture.convert("RGB")), step, dataformats="HWC")

    def close(self) -> None:
        threading.excepthook = self._former_hook
        self._board.close()


def _pass_over_writers(args: threading.ExceptHookArgs) -> None:
    """Show no traceback of TensorBoard's writing thread: the next call of its writer raises the error again."""
    if args.thread is None or not type(args.thread).__module__.startswith("tensorboard."):
        threading.__excepthook__(args)
