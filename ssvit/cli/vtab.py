"""Print the table of VTAB-1k from finished runs.

Usage: ssvit vtab [RUNS…].
"""

import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from ssvit import atomic_io
from ssvit.checkpoints.configuration import Configuration
from ssvit.checkpoints.run_folder import rows
from ssvit.config.command import Command
from ssvit.config.composed import Config
from ssvit.config.declaration import Name, Options, Runs
from ssvit.data.sources.vtab import NAMES
from ssvit.options import OptionError, UserError, file_to_write, print_lines
from ssvit.studies import vtab
from ssvit.studies.vtab import TaskRun

_TEST = "test/accuracy"
_MEASURED = (_TEST, "validation/accuracy")


class Vtab(Options):
    """The runs in the table, which were trained by ssvit finetune data=vtab data.task=…."""

    runs: Sequence[Name] = ()
    """Folders of runs; []: all in outputs."""
    outputs: Runs = "outputs"
    """Folder of all runs."""
    output: Name | None = None
    """File for the table: JSON if its name ends in .json, otherwise Markdown; None: no file."""

    def check_consistency(self) -> None:
        """Check the folders of runs and the file to write."""
        for folder in self.runs:
            if not Path(folder, "config.yaml").is_file():
                raise OptionError("runs", folder, "must be the folder of a run")
        if self.output is not None:
            file_to_write("output", self.output)


def run(config: Config) -> str:
    """Print the table and write it if `output` is set, as JSON or Markdown; return the table."""
    options: Vtab = config.options
    folders = [Path(run) for run in options.runs] or sorted(Path(options.outputs).glob("*/"))
    models, unfinished = read(folders)
    excluded = f"not finished, so excluded: {', '.join(unfinished)}" if unfinished else ""
    if not models:
        where = ", ".join(options.runs) or options.outputs
        message = f"{where}: no run has a test accuracy on a task of VTAB-1k; train one by ssvit finetune data=vtab"
        raise UserError(f"{message}; {excluded}" if excluded else message)
    text = vtab.table(models) + (f"\n{excluded}\n" if excluded else "")
    print_lines(*text.split("\n"))
    if options.output is not None:
        output = Path(options.output)
        numbers = {model: {"runs": tasks, "means": vtab.means(tasks)} for model, tasks in models.items()}
        as_json = output.suffix == ".json"
        atomic_io.replace(output, (json.dumps(numbers, indent=1) + "\n" if as_json else text).encode())
    return text


def read(folders: Iterable[Path]) -> tuple[dict[str, dict[str, list[TaskRun]]], list[str]]:
    """Return the finished runs on a task by model, and the names of unfinished ones; other folders are skipped."""
    models: dict[str, dict[str, list[TaskRun]]] = {}
    unfinished = []
    for folder in folders:
        with suppress(UserError, OSError):
            config = Configuration.read(folder / "config.yaml")
            data = config.values.get("data") or {}
            if config.choices.get("data") != "vtab" or data.get("task") not in NAMES:
                continue
            tested = [row for row in rows(folder) if not row.keys().isdisjoint(_MEASURED)]
            if not tested:
                continue
            step, steps = tested[-1]["step"], (config.values.get("recipe") or {}).get("steps")
            if _TEST not in tested[-1] or step != steps:
                unfinished.append(f"{data['task']} ({folder}, step {step} of {steps})")
                continue
            model = str((config.values.get("encoder") or {}).get("path") or "random weights")
            model += "" if data.get("all_images") else " (800 images)"
            run = TaskRun(*(tested[-1][f"test/{name}"] for name in ("accuracy", "images", "accuracy_constant")))
            models.setdefault(model, {}).setdefault(data["task"], []).append(run)
    return models, unfinished


command = Command("vtab", run, positional="runs", options=Vtab)
