"""The table of VTAB-1k from the runs that are there: ssvit vtab [RUNS…]"""

import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from omegaconf import DictConfig

from ssvit import atomic_io
from ssvit.checkpoints.configuration import Configuration
from ssvit.cli.launch import Plain, Tool
from ssvit.data.vtab import NAMES
from ssvit.evaluation import vtab
from ssvit.evaluation.vtab import Run
from ssvit.options import OptionError, UserError


def run(config: DictConfig, plain: Plain) -> str:
    """Print the table, and write it where output= names a file: as JSON if that ends so. Returns the table."""
    named = [Path(str(one)) for one in plain["runs"]]
    for folder in named:
        if not (folder / "config.yaml").is_file():
            raise OptionError("runs", folder, "must be the folder of a run")
    output = None if plain["output"] is None else Path(plain["output"])
    if output is not None and not output.absolute().parent.is_dir():
        raise OptionError("output", output, "there is no such folder")
    runs = list(found(named or sorted(Path(plain["outputs"]).glob("*/"))))
    if not runs:
        where = ", ".join(map(str, named)) or plain["outputs"]
        raise UserError(f"{where}: no run has a test accuracy on a task of VTAB-1k: ssvit finetune data=vtab makes one")
    text = vtab.table(runs)
    print(text)
    if output is not None:
        as_json = output.suffix == ".json"
        atomic_io.replace(output, (json.dumps(vtab.facts(runs), indent=1) + "\n" if as_json else text).encode())
    return text


def found(folders: Iterable[Path]) -> Iterator[Run]:
    """The runs among folders that have a test accuracy on a task; what is damaged, or no run of ours, is left out."""
    from ssvit.training import metrics_log

    for folder in folders:
        with suppress(UserError, FileNotFoundError):
            config = Configuration.read(folder / "config.yaml")
            data = config.values.get("data") or {}
            if config.choices.get("data") != "vtab" or data.get("task") not in NAMES:
                continue
            tests = [row for row in metrics_log.rows(folder) if "test/accuracy" in row]
            if tests:
                model = str((config.values.get("encoder") or {}).get("path") or "random weights")
                part = "" if data.get("all_images") else " (800 images)"
                values = (tests[-1][f"test/{name}"] for name in ("accuracy", "images", "accuracy_constant"))
                yield Run(model + part, data["task"], *values)


tool = Tool("vtab", "make the table of VTAB-1k's 19 tasks from the runs that are there", run, positional="runs")
