"""Lock a run's folder, and check whether a command may continue the run in it. No torch.

outputs/<name>/ contains config.yaml, metrics.jsonl, TensorBoard's event files, figures and checkpoints (step_*/).
"""

import contextlib
import json
import os
import shutil
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Self, TextIO

from ssvit.checkpoints.configuration import Configuration, ConfigurationError
from ssvit.engine import atomic_io
from ssvit.errors import OptionError, UserError, typed

REPORTS = "evaluation"  # folder of the reports of evaluations, in the folder of the run
# The former run during the start of one that overwrites it, complete, or while its files are moved.
_FORMER, _MOVED = ".former", ".former.part"
# Files in the folder of a run that has not started.
_UNSTARTED = {"lock", "config.yaml", _FORMER, _MOVED}
FLOPS = "flops_per_step"  # name in metrics.jsonl of the operations of an update
_MAX_NAME = 200  # maximum bytes of a name: file systems allow 255, and derived file names are longer


class RunError(UserError):
    """A run's folder cannot be used."""


def reported_run(folder: Path) -> Path:
    """Return the folder of the first pre-trained run of a comparison, or of the run with the chosen learning rate.

    For a single run, it is the folder itself.
    """
    runs = (*folder.glob("pretrained_seed*"), *folder.glob("chosen"))
    return min(runs, key=lambda run: (len(run.name), run.name), default=folder)  # seed 9 before seed 10


def rows(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of a run's metrics.jsonl, each with its "step"; empty if there is no file.

    Incomplete lines, written by a killed process, are skipped. Raises UserError if the file cannot be read.
    """
    rows = []
    path = folder / "metrics.jsonl"
    try:
        atomic_io.check_regular(path)
        text = path.read_text(errors="replace")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    for line in text.splitlines():
        with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
            row = json.loads(line)
            row["step"] + 0  # raises TypeError if the step is not a number
            rows.append(row)
    return rows


def last_values(history: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the last value of each metric in the rows of a run."""
    return {name: value for row in history for name, value in row.items() if value is not None}


def discard_former(folder: Path) -> None:
    """Delete the run that the run in a folder overwrites, after which its failure restores nothing."""
    shutil.rmtree(folder / _FORMER, ignore_errors=True)


class RunFolder:
    """Lock a run's folder for one process, from `open` to the end of the `with` block.

    If the block fails before other files are written, a folder that `open` created is removed. If it fails before
    `discard_former` is called, the run that was to be overwritten is restored.

    Args:
        outputs: Folder of all runs.
        name: Name of the run.

    Raises:
        OptionError: The name is not valid.
    """

    def __init__(self, outputs: str, name: str | None) -> None:
        if str(name or "") in ("", ".", "..") or {*"/\0"} & {*str(name)} or len(os.fsencode(str(name))) > _MAX_NAME:
            expected = f"must be the name of a folder in outputs, without a slash, of at most {_MAX_NAME} bytes"
            raise OptionError("name", name, expected)
        self.path = Path(outputs, str(name))
        self._stored = self.path / "config.yaml"
        self._lock: TextIO | None = None
        self._created: list[Path] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._lock is None:
            return
        if error[0] is None:
            discard_former(self.path)
        else:
            self._restore()
        if error[0] is not None and self._created and not self._others(_UNSTARTED):
            shutil.rmtree(self.path, ignore_errors=True)
            with contextlib.suppress(OSError):  # another run has written to the folder
                for parent in self._created[1:]:
                    parent.rmdir()
        self._lock.truncate(0)  # removes the id of this process
        self._lock.close()

    def open(self, config: Configuration, *, overwrite: bool) -> None:
        """Lock the folder for the run that a configuration describes, and store the configuration as config.yaml.

        Args:
            config: Configuration of the run.
            overwrite: Whether to replace an existing run.

        Raises:
            RunError: Another process uses the folder, it contains a run with other options or files of other programs,
                or it cannot be written.
        """
        try:
            is_run = self._contains(_FORMER, _MOVED, "step_*/manifest.json", "*/step_*/manifest.json")
            is_run = is_run or Configuration.find(self._stored) is not None
            # These are the only files of a run that ended before its configuration was stored.
            if self.path.exists() and not is_run and self._others(_UNSTARTED - {"config.yaml"}):
                raise RunError(f"name={self.path.name}: {self.path} exists and is not a run folder")
            created = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = atomic_io.lock(self.path / "lock", self._locked)
            self._created = created
            self._restore()  # after a process that was killed
            if overwrite:
                self._set_aside()
            # A command that failed before training has stored only a configuration, which is replaced.
            if self._has_started():
                self._check_difference(config)
                return
            atomic_io.replace(self._stored, config.serialized())
            atomic_io.synchronise(self.path)
            atomic_io.synchronise(self.path.parent)
        except OSError as error:
            raise RunError(f"{error.filename or self.path}: cannot be written ({error.strerror})") from None

    def started(self) -> Configuration | None:
        """Return the configuration of the run in the folder; None if none has started, or if it cannot be read."""
        return Configuration.find(self._stored) if self._has_started() else None

    def _has_started(self) -> bool:
        return self._stored.exists() and self._contains("metrics.jsonl", "*step_*", "*/config.yaml")

    def _locked(self, holder: str) -> RunError:
        hint = "wait until it has ended, or choose another name"
        return RunError(f"name={self.path.name}: {holder} is writing to {self.path}; {hint}")

    def _check_difference(self, config: Configuration) -> None:
        try:
            stored = Configuration.read(self._stored)
        except ConfigurationError as error:
            hint = "without this file, the same command continues from the checkpoints and does not check the options"
            raise RunError(f"{error}; {hint}") from None
        if difference := config.difference(stored):
            name, value, before = difference
            roots = [values.get("data", {}).get("root") for values in (config.values, stored.values)]
            if roots[0] != roots[1] and not name.startswith("data"):  # possibly a folder that was moved
                name, (value, before) = "data", roots
            hint = "use that value, another name=…, or overwrite=true"
            raise RunError(f"{name}={typed(value)}: the run in {self.path} was started with {typed(before)}; {hint}")

    def _others(self, names: Collection[str]) -> bool:
        """Return whether the folder has entries other than these and an incomplete configuration."""
        entries = (entry.name for entry in self.path.iterdir())
        return any(name not in names and not name.startswith(".config.yaml.") for name in entries)

    def _contains(self, *patterns: str) -> bool:
        return any(any(self.path.glob(pattern)) for pattern in patterns)

    def _files(self) -> list[Path]:
        """Return the files and folders of the run in the folder."""
        return [entry for entry in self.path.iterdir() if entry.name not in ("lock", _FORMER, _MOVED)]

    def _set_aside(self) -> None:
        if files := self._files():
            moved = self.path / _MOVED / "run"  # so deep that nothing there is found as a part of the run in the folder
            moved.mkdir(parents=True)
            for entry in files:
                entry.rename(moved / entry.name)
            (self.path / _MOVED).rename(self.path / _FORMER)

    def _restore(self) -> None:
        if (former := self.path / _FORMER).exists():
            for entry in self._files():
                if entry.is_dir():
                    shutil.rmtree(entry)
                else:
                    entry.unlink()
            former.rename(self.path / _MOVED)
        if (moved := self.path / _MOVED).exists():
            for entry in moved.glob("run/*"):
                entry.rename(self.path / entry.name)
            shutil.rmtree(moved)
