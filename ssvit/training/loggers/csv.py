"""Write metrics.csv to the run folder, with a line for each row of metrics.jsonl and a column for each metric."""

import csv
import io
from collections.abc import Mapping

from ssvit import atomic_io
from ssvit.training.loggers.base import Logger, Rows


class Csv(Logger):
    """Log to metrics.csv. A cell is empty if the row lacks the metric or its value is not finite."""

    file = "metrics.csv"

    def open(self, first_step: int, history: Rows) -> None:
        """Write the history to the file."""
        self._history, self._columns = history, ["step"]
        self._write()

    def record(self, step: int, row: Mapping[str, float]) -> None:
        """Append a row; rewrite the file if the row has new metrics."""
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
