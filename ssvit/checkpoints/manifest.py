"""Read manifest.json: step, training metadata, sha256 of each file, and a checksum of the manifest. No torch."""

import os
import re
from pathlib import Path
from typing import Any

from ssvit.atomic_io import check_schema, read_json, seal
from ssvit.checkpoints import configuration
from ssvit.options import UserError

SCHEMA = 2


class CheckpointError(UserError):
    """A checkpoint cannot be written, or failed verification."""


def read(path: Path) -> dict[str, Any]:
    """Return the verified manifest of a checkpoint folder; raise CheckpointError if it is missing or damaged."""
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
        for name in ("encoder", "view"):  # entries that become part of a configuration
            if part := configuration.foreign(manifest.get(name, {})):
                raise CheckpointError(f"{path}: {name}.{part}: may hold values only; nothing was run")
        return manifest
    except OSError as error:
        raise CheckpointError(f"{path}: no readable manifest.json ({error.strerror}), so it is no checkpoint") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise CheckpointError(f"{path / 'manifest.json'}: is damaged") from None


def steps(run: Path) -> dict[Path, tuple[int, int]]:
    """Return the entries of a run folder that have the name of a checkpoint, each with two steps.

    The first is the step in the verified manifest, or that in the name if there is no such manifest; the second is the
    step in the name. Raises OSError if the folder cannot be listed, since it must not be treated as empty.
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
    """Return the checkpoints in a run folder sorted by `steps`, newest last. Raises OSError if it cannot be listed."""
    found = {path: both for path, both in steps(run).items() if path.is_dir()}
    # If two checkpoints have the same step (one is a copy), the one whose name matches its step comes later.
    return sorted(found, key=lambda path: (found[path][0], found[path][0] == found[path][1], path.name))
