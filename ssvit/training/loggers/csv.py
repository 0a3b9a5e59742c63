"""metrics.csv in the run's folder: a line for each row of metrics.jsonl, a column for each metric."""

import csv
import io
from collections.abc import Mapping

from ssvit import atomic_io
from ssvit.training.loggers.base import Logger, Rows


class Csv(Logger):
    """metrics.csv. A cell is empty if its row has no such metric or the number is not finite."""

    file = "metrics.csv"

    def open(self, first_step: int, history: Rows) -> None:
        self._history, self._columns = history, ["step"]
        self._write()

    def record(self, step: int, row: Mapping[str, float]) -> None:
        if set(row) <= set(self._columns):
            with open(self.folder / self.file, "a", newline="") as file:
                self._table(file).writerow(self._history[-1])
        else:
            self._write()

    def _write(self) -> None:
        """Rewrite the file with a new column."""
        self._columns = list(dict.fromkeys([*self._columns, *(name for row in self._history for name in row)]))
        text = io.StringIO()
        table = self._table(text)
        table.writeheader()
        table.writerows(self._history)
        atomic_io.replace(self.folder / self.file, text.getvalue().encode())

    def _table(self, file: io.TextIOBase | io.TextIOWrapper) -> "csv.DictWriter[str]":
        return csv.DictWriter(file, self._columns, lineterminator="\n")
