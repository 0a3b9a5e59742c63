"""manifest.json: the step of a checkpoint, what was trained, a sha256 of every file, and one of itself. No torch."""

import os
import re
from pathlib import Path
from typing import Any

from ssvit.atomic_io import check_schema, read_json, seal
from ssvit.checkpoints import configuration
from ssvit.options import UserError

SCHEMA = 2


class CheckpointError(UserError):
    """A checkpoint cannot be written, or cannot be trusted."""


def read(path: Path) -> dict[str, Any]:
    """The verified manifest of the checkpoint in a folder, else CheckpointError."""
    try:
        manifest, _ = read_json(path / "manifest.json")
        if manifest["seal"] != seal(manifest):
            raise ValueError
        check_schema(manifest["schema"], SCHEMA, path, CheckpointError)
        sums = manifest["sha256"]
        if not all(re.fullmatch(r"\w+\.safetensors", file, re.A) for file in sums):
            raise ValueError
        if not any(re.fullmatch(r"(model|part_\d+)\.safetensors", file, re.A) for file in sums):
            raise ValueError
        if isinstance(manifest["step"], bool) or not isinstance(manifest["step"], int) or manifest["step"] < 0:
            raise ValueError
        for name in ("encoder", "view"):  # what becomes a part of a configuration
            if part := configuration.foreign(manifest.get(name, {})):
                raise CheckpointError(f"{path}: {name}.{part}: may hold values only; nothing was run")
        return manifest
    except OSError as error:
        raise CheckpointError(f"{path}: no readable manifest.json ({error.strerror}), so it is no checkpoint") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise CheckpointError(f"{path / 'manifest.json'}: is damaged") from None


def steps(run: Path) -> dict[Path, tuple[int, int]]:
    """Everything in a run's folder that has a checkpoint's name: its step by its verified manifest (else by its name),
    and by its name. OSError if the folder cannot be listed: it must not be taken for an empty one.
    """
    found = {}
    for name in os.listdir(run):
        if match := re.fullmatch(r"step_(\d+)", name, re.A):
            named = int(match[1])
            try:
                found[run / name] = read(run / name)["step"], named
            except CheckpointError:
                found[run / name] = named, named
    return found


def complete(run: Path) -> list[Path]:
    """The checkpoints in a run's folder by their `steps`, the newest last. OSError if the folder cannot be listed."""
    found = {path: both for path, both in steps(run).items() if path.is_dir()}
    # Of two of the same step (one is a copy) the one that is named by it comes later.
    return sorted(found, key=lambda path: (found[path][0], found[path][0] == found[path][1], path.name))
