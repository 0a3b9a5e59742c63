"""The table of VTAB-1k from the runs that are there: ssvit vtab [RUNS…]"""

import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

from pydantic import model_validator

from ssvit import atomic_io
from ssvit.checkpoints import manifest
from ssvit.checkpoints.configuration import Configuration
from ssvit.checkpoints.run_folder import rows
from ssvit.config.command import Command
from ssvit.config.composed import Config
from ssvit.config.declaration import Name, Options, Runs
from ssvit.data.sources.vtab import NAMES
from ssvit.options import OptionError, UserError, file_to_write, print_lines
from ssvit.studies import vtab
from ssvit.studies.vtab import Run

_TEST = "test/accuracy"
_MEASURED = (_TEST, "validation/accuracy")


class Vtab(Options):
    """The runs in the table, which are those of ssvit finetune data=vtab data.task=…"""

    runs: Sequence[Name] = ()
    """Folders of runs; none: all in outputs."""
    outputs: Runs = "outputs"
    """The folder of all runs."""
    output: Name | None = None
    """A file for the table: JSON if its name ends in .json, otherwise Markdown."""

    @model_validator(mode="after")
    def _check_files(self) -> Self:
        for folder in self.runs:
            if not Path(folder, "config.yaml").is_file():
                raise OptionError("runs", folder, "must be the folder of a run")
        if self.output is not None:
            file_to_write("output", self.output)
        return self


def run(config: Config) -> str:
    """Print the table, and write it where output= names a file: as JSON if that ends so. Returns the table."""
    options: Vtab = config.options
    runs, unfinished = found([Path(one) for one in options.runs] or sorted(Path(options.outputs).glob("*/")))
    left_out = f"not finished, so left out: {', '.join(unfinished)}" if unfinished else ""
    if not runs:
        where = ", ".join(options.runs) or options.outputs
        none = f"{where}: no run has a test accuracy on a task of VTAB-1k: ssvit finetune data=vtab makes one"
        raise UserError(f"{none}; {left_out}" if left_out else none)
    text = vtab.table(runs) + (f"\n{left_out}\n" if left_out else "")
    print_lines(*text.split("\n"))
    if options.output is not None:
        output = Path(options.output)
        as_json = output.suffix == ".json"
        atomic_io.replace(output, (json.dumps(vtab.facts(runs), indent=1) + "\n" if as_json else text).encode())
    return text


def found(folders: Iterable[Path]) -> tuple[list[Run], list[str]]:
    """The finished runs on a task among folders, and the others in words; what is damaged, or no run of ours, is passed
    over.
    """
    runs, unfinished = [], []
    for folder in folders:
        with suppress(UserError, OSError):
            config = Configuration.read(folder / "config.yaml")
            data = config.values.get("data") or {}
            if config.choices.get("data") != "vtab" or data.get("task") not in NAMES:
                continue
            tested = [row for row in rows(folder) if not row.keys().isdisjoint(_MEASURED)]
            if not tested:
                continue
            last, steps = tested[-1], (config.values.get("recipe") or {}).get("steps")
            if _TEST not in last or (last["step"] != steps and last["step"] != _ended_early(folder)):
                unfinished.append(f"{data['task']} ({folder}, step {last['step']} of {steps})")
                continue
            model = str((config.values.get("encoder") or {}).get("path") or "random weights")
            part = "" if data.get("all_images") else " (800 images)"
            values = (last[f"test/{name}"] for name in ("accuracy", "images", "accuracy_constant"))
            runs.append(Run(model + part, data["task"], *values))
    return runs, unfinished


def _ended_early(folder: Path) -> int | None:
    """The step after which recipe.patience ended a run, None if it did not."""
    newest = [manifest.read(path) for path in manifest.complete(folder)[-1:]]
    return next((facts["step"] for facts in newest if facts.get("ended")), None)


command = Command("vtab", run, positional="runs", options=Vtab)
