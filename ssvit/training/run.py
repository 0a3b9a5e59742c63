"""The folder of a run: who may write in it, and whether a command may go on with what is there. No torch.

outputs/<name>/ holds config.yaml, metrics.jsonl, TensorBoard's event files, the pictures and step_*/ (checkpoints).
"""

import fcntl
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

import yaml

from ssvit import rules
from ssvit.options import OptionError, UserError, flag

# What may differ between a run and its continuation: it changes where and how fast, not what is computed.
# The fingerprint of the images stands for their folder, and the precision that was used for recipe.precision=auto:
# both are in the checkpoint, and so is which weights a fine-tuning started from. Probes look on.
FREE = (
    "overwrite", "outputs", "workers", "fabric", "data.root", "data.download", "data.source", "recipe.precision",
    "checkpoint", "encoder.path", "encoder.activation_checkpointing", "seeds", "probe", "probing",
)  # fmt: skip


class RunError(UserError):
    """The run folder cannot be used as asked."""


def is_main_process() -> bool:
    """Whether this process is the first of the run, as torchrun, SLURM and Fabric's own launcher tell it."""
    return all(os.environ.get(name, "0") == "0" for name in ("RANK", "LOCAL_RANK", "NODE_RANK", "SLURM_PROCID"))


def flatten(config: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of nested dictionaries: ("recipe.lr", 0.001), …"""
    if isinstance(config, Mapping):
        for key, value in config.items():
            yield from flatten(value, f"{name}.{key}" if name else str(key))
    else:
        yield name, config


def refuse_difference(old: Mapping[str, Any], new: Mapping[str, Any], folder: Path) -> None:
    """RunError naming the first option in which two configurations differ, of those that matter."""
    added = dict(flatten(rules.ADDED, "encoder"))
    before, now = (added | dict(flatten(config)) for config in (old, new))
    for key in [*now, *before]:
        if before.get(key) != now.get(key) and not any(key == free or key.startswith(f"{free}.") for free in FREE):
            raise RunError(
                f"{key}={now.get(key, '(absent)')}: the run in {folder} was started with "
                f"{before.get(key, '(absent)')}; use that, another name=…, or overwrite=true"
            )


class RunFolder:
    """A run's folder, held by one process from `open` to the end of that process (the system lets go of the lock)."""

    def __init__(self, outputs: str, name: str | int) -> None:
        name = str(name)
        if name in ("", ".", "..") or "/" in name:
            raise OptionError("name", name, "must be the name of a folder in outputs, without a slash")
        self.path = Path(outputs) / name
        self._lock: TextIO | None = None

    def open(self, config: Mapping[str, Any], *, overwrite: bool) -> None:
        """Take the folder for the run that `config`, the whole configuration as plain data, describes.

        OptionError if `overwrite` is no flag. RunError if another process has the folder, or if it holds a run that
        was configured otherwise, or something that is no run.
        """
        flag("overwrite", overwrite)
        stored = self.path / "config.yaml"
        try:
            if self.path.exists() and not stored.exists() and self._has_more():
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
            try:
                old = yaml.safe_load(stored.read_text())
                refuse_difference(old, config, self.path)
            except (yaml.YAMLError, AttributeError, UnicodeDecodeError):
                raise RunError(f"{stored}: cannot be read; overwrite=true starts the run anew") from None
        else:
            _write(stored, yaml.safe_dump(dict(config), sort_keys=False))

    def _has_trained(self) -> bool:
        """Whether the run, or one of the runs of a study, has begun."""
        return any(any(self.path.glob(trace)) for trace in ("metrics.jsonl", "*step_*", "*/config.yaml"))

    def _has_more(self) -> bool:
        """Whether there is more than a run leaves that ends before it has written its configuration."""
        return any(entry.name not in ("lock", "config.yaml.part") for entry in self.path.iterdir())

    def _clear(self) -> None:
        # The configuration last: as long as it is there, the folder is known as a run's.
        for entry in sorted(self.path.iterdir(), key=lambda entry: entry.name == "config.yaml"):
            if entry.is_dir():
                shutil.rmtree(entry)
            elif entry.name != "lock":
                entry.unlink()


def _write(path: Path, text: str) -> None:
    """Write a small file so that it is there whole or not at all."""
    beside = path.with_name(path.name + ".part")
    beside.write_text(text)
    beside.replace(path)
