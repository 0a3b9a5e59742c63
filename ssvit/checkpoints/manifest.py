"""Read manifest.json: step, training metadata, sha256 of each file, and a checksum of the manifest. No torch."""

import os
import re
from pathlib import Path
from typing import Any

from ssvit.checkpoints import configuration
from ssvit.engine.atomic_io import check_schema, read_json, seal
from ssvit.errors import UserError

SCHEMA = 2


class CheckpointError(UserError):
    """A checkpoint cannot be written, or failed verification."""


def read_manifest(path: Path) -> dict[str, Any]:
    """Return the verified manifest of a checkpoint folder; raise CheckpointError if it is missing or damaged."""
    try:
        manifest, _ = read_json(path / "manifest.json")
        if manifest["seal"] != seal(manifest):
            raise ValueError
        check_schema(manifest["schema"], SCHEMA, path, CheckpointError)
        files, step = manifest["sha256"], manifest["step"]
        are_states = all(re.fullmatch(r"\w+\.safetensors", file, re.A) for file in files)
        has_model = any(re.fullmatch(r"(model|part_\d+)\.safetensors", file, re.A) for file in files)
        if not (are_states and has_model and type(step) is int and step >= 0):
            raise ValueError
        for name in ("encoder", "view"):  # entries that become part of a configuration
            if part := configuration.code_entry(manifest.get(name, {})):
                raise CheckpointError(f"{path}: {name}.{part}: must be a value, not code; nothing was executed")
        return manifest
    except OSError as error:
        raise CheckpointError(f"{path}: is not a checkpoint: manifest.json cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise CheckpointError(f"{path / 'manifest.json'}: is damaged") from None


def step_of(path: Path) -> int:
    """Return the step in the name of a checkpoint folder."""
    return int(path.name.removeprefix("step_"))


def complete(run: Path) -> list[Path]:
    """Return the checkpoints in a run folder by their step, newest last.

    Raises:
        OSError: The folder cannot be listed, which must not be treated as an empty folder.
    """
    paths = [run / name for name in os.listdir(run) if re.fullmatch(r"step_\d+", name, re.A)]
    return sorted((path for path in paths if path.is_dir()), key=step_of)
