"""Lock a run's folder, and check whether a command may continue the run in it. No torch.

outputs/<name>/ contains config.yaml, metrics.jsonl, TensorBoard's event files, figures and checkpoints (step_*/).
"""

import contextlib
import json
import os
import shutil
from pathlib import Path
from typing import Any, Self, TextIO

from ssvit import atomic_io
from ssvit.checkpoints.configuration import Configuration, ConfigurationError
from ssvit.options import OptionError, UserError, flag

# Files in the folder of a run that has not started.
_UNBEGUN = {"lock", "config.yaml", ".config.yaml.part"}
_LONGEST = 200  # maximum bytes of a name: file systems allow 255, and derived file names are longer


class RunError(UserError):
    """A run's folder cannot be used."""


def reported_run(folder: Path) -> Path:
    """Return the folder of the first pre-trained run of a comparison, or the folder itself for a single run."""
    runs = folder.glob("pretrained_seed*")
    return min(runs, key=lambda run: (len(run.name), run.name), default=folder)  # seed 9 before seed 10


def rows(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of a run's metrics.jsonl, each with its "step"; empty if there is no file.

    Incomplete lines, written by a killed process, are skipped. Raises UserError if the file cannot be read.
    """
    found = []
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
            found.append(row)
    return found


class RunFolder:
    """Lock a run's folder for one process, from `open` to the end of the `with` block.

    A folder that `open` created is removed if the block fails before anything else is written to it.

    Args:
        outputs: Folder of all runs.
        name: Name of the run.

    Raises:
        OptionError: One of the arguments is not a valid name.
    """

    def __init__(self, outputs: str, name: str | None) -> None:
        if not isinstance(outputs, str) or not outputs:
            raise OptionError("outputs", outputs, "must be the folder of all runs")
        if name is None or str(name) in ("", ".", "..") or "/" in str(name) or len(os.fsencode(str(name))) > _LONGEST:
            right = f"must be the name of a folder in outputs, without a slash, of at most {_LONGEST} bytes"
            raise OptionError("name", name, right)
        self.path = Path(outputs, str(name))
        self._stored = self.path / "config.yaml"
        self._lock: TextIO | None = None
        self._created: list[Path] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._lock is None:
            return
        if error[0] is not None and self._created and not {entry.name for entry in self.path.iterdir()} - _UNBEGUN:
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
            overwrite: Whether to delete an existing run.

        Raises:
            OptionError: `overwrite` is not a flag.
            RunError: Another process uses the folder, or it contains a run with other options or files of another kind.
        """
        flag("overwrite", overwrite)
        try:
            # Other programs also write files named config.yaml.
            is_run = self._holds("step_*/manifest.json", "*/step_*/manifest.json") or self._is_configured()
            # These are the only files of a run that ended before its configuration was stored.
            unfinished = _UNBEGUN - {"config.yaml"}
            if self.path.exists() and not is_run and {entry.name for entry in self.path.iterdir()} - unfinished:
                raise RunError(f"name={self.path.name}: {self.path} exists and holds no run; use another name")
            created = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = atomic_io.lock(self.path / "lock", self._refusal)
            self._created = created
        except OSError as error:
            raise RunError(f"outputs={self.path.parent}: cannot write {self.path} ({error.strerror})") from None
        if overwrite:
            self._clear()
        # A command that failed before training has stored only a configuration, which is replaced.
        if self._stored.exists() and self._holds("metrics.jsonl", "*step_*", "*/config.yaml"):
            self._refuse_difference(config)
        else:
            self._store(config)

    def _is_configured(self) -> bool:
        try:
            Configuration.read(self._stored)
        except (FileNotFoundError, ConfigurationError):
            return False
        return True

    def _refusal(self, holder: str) -> RunError:
        right = "wait until it has ended, or use another name"
        return RunError(f"name={self.path.name}: {holder} writes in {self.path}; {right}")

    def _refuse_difference(self, config: Configuration) -> None:
        try:
            old = Configuration.read(self._stored)
        except ConfigurationError as error:
            raise RunError(
                f"{error}; the checkpoints beside it are whole for all that: delete the file, and the run, "
                "started again, goes on from them, without comparing its options with those of the start"
            ) from None
        if difference := config.difference(old):
            name, value, before = difference
            right = "use that, another name=…, or overwrite=true"
            raise RunError(f"{name}={value}: the run in {self.path} was started with {before}; {right}")

    def _store(self, config: Configuration) -> None:
        try:
            atomic_io.replace(self._stored, config.write())
            atomic_io.synchronise(self.path)
            atomic_io.synchronise(self.path.parent)
        except OSError as error:
            raise RunError(f"{self._stored}: cannot be written ({error.strerror})") from None

    def _holds(self, *patterns: str) -> bool:
        return any(any(self.path.glob(pattern)) for pattern in patterns)

    def _clear(self) -> None:
        # The configuration is deleted last, since it identifies the folder as a run folder.
        for entry in sorted(self.path.iterdir(), key=lambda entry: entry.name == "config.yaml"):
            if entry.is_dir():
                shutil.rmtree(entry)
            elif entry.name != "lock":
                entry.unlink()
