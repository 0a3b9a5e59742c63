"""Locate the reports of a checkpoint, one folder for each data set. This module does not import torch."""

import hashlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ssvit.checkpoints.checkpoint import Checkpoint
from ssvit.checkpoints.configuration import Configuration
from ssvit.checkpoints.run_folder import REPORTS
from ssvit.data.sources.base_options import DataSet
from ssvit.engine.atomic_io import read_json
from ssvit.errors import UserError

_REPORT = "report.json"


def path_of(source: Mapping[str, Any]) -> str | None:
    """Return the absolute path of a data set from its options, that of its table or folder; None if it has none."""
    path = source.get("table") or source.get("root")
    return path and str(Path(path, source.get("task") or source.get("config") or "").absolute())


def folder_of(checkpoint: Checkpoint, data: DataSet, choice: str, outputs: str) -> Path:
    """Return the default folder of the report of a checkpoint on a data set.

    It is `REPORTS` in the folder of the run for the run's data set, and has a subfolder for each other data set.

    Args:
        checkpoint: The checkpoint.
        data: Options of the data set.
        choice: Name of the data set.
        outputs: Folder of all runs.
    """
    home, source = checkpoint.home(outputs), data.values()
    path = path_of(source)
    with suppress(UserError, OSError, LookupError, TypeError):
        run = Configuration.read(home / "config.yaml")
        if checkpoint.run_folder and (run.choices["data"], path_of(run.values["data"])) == (choice, path):
            return home / REPORTS
    name = source.get("name") or Path(path or choice).name or choice
    folder = home / REPORTS / name
    with suppress(OSError, ValueError, LookupError, TypeError, RecursionError):
        if read_json(folder / _REPORT)[0]["metadata"]["path"] != path:  # another data set of this name
            folder = folder.with_name(f"{name}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}")
    return folder


def report_for(checkpoint: Checkpoint, data: DataSet | None, choice: str, outputs: str) -> Path:
    """Return the file of the report whose choice of a layer applies to the pictures of a command.

    It is the report on the data set of the command, else that on the data set of the run. For pictures of no data set,
    it is the report on the data set of the run, else the newest. Arguments are those of `folder_of`.
    """
    home = checkpoint.home(outputs) / REPORTS
    files = [home / _REPORT, *sorted(home.glob(f"*/{_REPORT}"), key=lambda file: -file.stat().st_mtime)]
    if data is not None:
        files = [folder_of(checkpoint, data, choice, outputs) / _REPORT, home / _REPORT]
    return next(filter(Path.is_file, files), home / _REPORT)
