"""The folder of a run: who may write in it, and whether a command may go on with what is there. No torch.

outputs/<name>/ holds config.yaml, metrics.jsonl, TensorBoard's event files, the pictures and step_*/ (checkpoints).
"""

import fcntl
import os
import shutil
from pathlib import Path
from typing import TextIO

from ssvit import atomic_io
from ssvit.checkpoints.configuration import Configuration, ConfigurationError
from ssvit.options import OptionError, UserError, flag

_LONGEST = 200  # bytes of a name: file systems take 255, and files beside it have longer ones


class RunError(UserError):
    """The run folder cannot be used as asked."""


def is_main_process() -> bool:
    """Whether this process is the first of the run, as torchrun, SLURM and Fabric's own launcher tell it."""
    return all(os.environ.get(name, "0") == "0" for name in ("RANK", "LOCAL_RANK", "NODE_RANK", "SLURM_PROCID"))


class RunFolder:
    """A run's folder, held by one process from `open` to the end of that process (the system lets go of the lock)."""

    def __init__(self, outputs: str, name: str | int) -> None:
        if not isinstance(outputs, str) or not outputs:
            raise OptionError("outputs", outputs, "must be the folder of all runs")
        if name is None or str(name) in ("", ".", "..") or "/" in str(name) or len(os.fsencode(str(name))) > _LONGEST:
            right = f"must be the name of a folder in outputs, without a slash, of at most {_LONGEST} bytes"
            raise OptionError("name", name, right)
        self.path = Path(outputs, str(name))
        self._lock: TextIO | None = None

    def open(self, config: Configuration, *, overwrite: bool) -> None:
        """Take the folder for the run that `config` describes, and keep it there as config.yaml.

        OptionError if `overwrite` is no flag. RunError if another process has the folder, or if it holds a run that
        was configured otherwise, or something that is no run.
        """
        flag("overwrite", overwrite)
        stored = self.path / "config.yaml"
        try:
            if self.path.exists() and not stored.exists() and self._has_more() and not self._has_checkpoints():
                raise RunError(f"name={self.path.name}: {self.path} exists and holds no run; use another name")
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = open(self.path / "lock", "w")  # noqa: SIM115 (kept open: closing it lets go of the lock)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # A worker process that outlives this one for a moment must not hold the folder.
            os.register_at_fork(after_in_child=self._lock.close)
        except BlockingIOError:
            raise RunError(f"name={self.path.name}: another process writes in {self.path}; use another name") from None
        except OSError as error:
            raise RunError(f"outputs={self.path.parent}: cannot write {self.path} ({error.strerror})") from None
        if overwrite:
            self._clear()
        # A configuration alone is what a command leaves that failed before it trained: the next may mend it.
        if stored.exists() and self._has_trained():
            self._refuse_difference(config)
        else:
            self._store(config)

    def _refuse_difference(self, config: Configuration) -> None:
        stored = self.path / "config.yaml"
        try:
            old = Configuration.read(stored)
        except ConfigurationError as error:
            raise RunError(
                f"{error}; the checkpoints beside it are whole for all that: delete the file, and the same command "
                "goes on from them, without comparing its options with those of the start"
            ) from None
        if difference := config.difference(old):
            name, value, before = difference
            raise RunError(
                f"{name}={value}: the run in {self.path} was started with {before}; use that, another name=…, "
                "or overwrite=true"
            )

    def _store(self, config: Configuration) -> None:
        stored = self.path / "config.yaml"
        try:
            atomic_io.replace(stored, config.write())
            atomic_io.synchronise(self.path)
            atomic_io.synchronise(self.path.parent)
        except OSError as error:
            raise RunError(f"{stored}: cannot be written ({error.strerror})") from None

    def _has_trained(self) -> bool:
        """Whether the run, or one of the runs of a study, has begun."""
        return any(any(self.path.glob(trace)) for trace in ("metrics.jsonl", "*step_*", "*/config.yaml"))

    def _has_more(self) -> bool:
        """Whether there is more than a run leaves that ends before it has written its configuration."""
        return any(entry.name not in ("lock", ".config.yaml.part") for entry in self.path.iterdir())

    def _has_checkpoints(self) -> bool:
        """Whether there is a run, or a study of several, that has lost its configuration alone."""
        return any(any(self.path.glob(trace)) for trace in ("step_*/manifest.json", "*/step_*/manifest.json"))

    def _clear(self) -> None:
        # The configuration last: as long as it is there, the folder is known as a run's.
        for entry in sorted(self.path.iterdir(), key=lambda entry: entry.name == "config.yaml"):
            if entry.is_dir():
                shutil.rmtree(entry)
            elif entry.name != "lock":
                entry.unlink()
