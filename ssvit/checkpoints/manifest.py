"""The manifest of a checkpoint, read without torch.

manifest.json has the step, what was trained ("encoder", "stage", …), and a sha256 of every file and of itself ("seal").
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ssvit.atomic_io import read_json, seal
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
        if manifest["schema"] != SCHEMA:
            raise CheckpointError(f"{path}: has schema {manifest['schema']}, this version reads {SCHEMA}")
        sums = manifest["sha256"]
        if "model.safetensors" not in sums or not all(re.fullmatch(r"\w+\.safetensors", file, re.A) for file in sums):
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


def places(run: Path) -> dict[Path, int]:
    """Everything in a run's folder that has a checkpoint's name, and the step in the name.

    OSError if the folder cannot be listed: it must not be taken for an empty one.
    """
    names = {name: re.fullmatch(r"step_(\d+)", name, re.A) for name in os.listdir(run)}
    return {run / name: int(match[1]) for name, match in names.items() if match}


def completed(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """A manifest with the options that those of the first edition lack, whose dropout was of attention weights too."""
    defaults = {
        "encoder": {"attention_dropout": manifest.get("encoder", {}).get("dropout"), "gelu": "exact"},
        "classifier": {"loss": "softmax"},
        "view": {"fit": "cover"},
    }
    return {**manifest, **{name: part | manifest[name] for name, part in defaults.items() if name in manifest}}


def complete(run: Path) -> list[Path]:
    """The checkpoints in a run's folder by the steps in their manifests, the newest last.

    One whose manifest cannot be trusted is sorted by its name. OSError if the folder cannot be listed.
    """
    named = {path: step for path, step in places(run).items() if path.is_dir()}
    steps = {path: step_of(path, otherwise=step) for path, step in named.items()}
    # Of two of the same step (one is a copy) the one that is named by it comes later.
    return sorted(steps, key=lambda path: (steps[path], steps[path] == named[path], path.name))


def step_of(path: Path, otherwise: int) -> int:
    """The step in a checkpoint's verified manifest, or `otherwise` if there is none."""
    try:
        return read(path)["step"]
    except UserError:
        return otherwise
