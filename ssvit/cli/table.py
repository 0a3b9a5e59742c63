"""Print a table of the accuracies of finished runs: data sets by models, with mean and deviation over seeds.

Usage: ssvit table [RUNS…]. For folders with rows of ssvit compare, the table has objectives and their costs, and
costs.png in the first folder shows accuracies over costs. Rows of held-out images are skipped if there are rows of test
images.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from ssvit.config.command import Command
from ssvit.config.composed import Config
from ssvit.config.declaration import Name, Options, Runs
from ssvit.engine import atomic_io
from ssvit.errors import OptionError, UserError, file_to_write, print_lines
from ssvit.studies import methods, table


class Table(Options):
    """The runs in the table, classifiers that were trained by ssvit finetune or by objective=supervised."""

    runs: Sequence[Name] = ()
    """Folders of runs, or of rows of ssvit compare, which may be in subfolders; []: all runs in outputs."""
    outputs: Runs = "outputs"
    """Folder of all runs."""
    output: Name | None = None
    """File for the table: JSON if its name ends in .json, otherwise Markdown; None: no file."""

    def check_consistency(self) -> None:
        """Check the folders of runs and the file to write."""
        are_rows = {folder: bool(methods.read_tables([Path(folder)])) for folder in self.runs}
        for folder in self.runs:
            if not are_rows[folder] and not any(Path(folder).rglob("config.yaml")):
                raise OptionError("runs", folder, "must contain runs or rows of ssvit compare")
        if len({*are_rows.values()}) > 1:
            raise OptionError("runs", list(self.runs), "must be either runs or folders with rows of ssvit compare")
        if self.output is not None:
            file_to_write("output", self.output, begins=["{", "| accuracy", "| objective"])


def run(config: Config) -> str:
    """Print the table and write it if `output` is set, as JSON or Markdown; return the table."""
    options: Table = config.options
    folders = [Path(folder) for folder in options.runs]
    if rows := methods.read_tables(folders):
        text = methods.methods_table(rows)
        print_lines(*text.split("\n"))
        written = atomic_io.write_files(folders[0], {"costs.png": methods.plot_costs(rows).png()})
        print_lines(f"written: {', '.join(map(str, written))}")
        if options.output is not None:
            _write(Path(options.output), text, rows)
        return text
    runs, unfinished = table.read_runs(map(Path, options.runs or [options.outputs]))
    excluded = f"not finished, so excluded: {', '.join(unfinished)}" if unfinished else ""
    if not runs:
        where = ", ".join(options.runs) or options.outputs
        message = f"{where}: no finished run has the accuracy of a classifier; train one by ssvit finetune"
        raise UserError(f"{message}; {excluded}" if excluded else message)
    models, flops = table.columns(runs)
    text = table.results_table(models, flops) + (f"\n{excluded}\n" if excluded else "")
    print_lines(*text.split("\n"))
    if options.output is not None:
        numbers = {model: table.accuracies(scores) for model, scores in models.items()}
        for model, spent in flops.items():
            numbers[model][table.OPERATIONS] = [spent]
        _write(Path(options.output), text, numbers)
    return text


def _write(output: Path, text: str, numbers: object) -> None:
    """Write a table as JSON or Markdown, depending on the name of the file."""
    content = json.dumps(numbers, indent=1) + "\n" if output.suffix == ".json" else text
    atomic_io.replace(output, content.encode())


command = Command("table", run, positional="runs", options=Table)
