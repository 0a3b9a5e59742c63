"""Checkpoints that are there whole or not at all, say what they are, and cannot run code.

step_00000500/ holds model.safetensors, optimizer.safetensors, ema.safetensors (if any) and manifest.json, which has
the step, the encoder's own arguments, what the run is bound to, versions, and the sha256 of each file. It is written
as a hidden folder beside its place, synchronised to disk and renamed; the newest three are kept.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor

from ssvit.encoder.vit import ViT
from ssvit.options import OptionError, UserError

SCHEMA = 1
KEPT = 3


class CheckpointError(UserError):
    """A checkpoint cannot be written, or cannot be trusted."""


def save(folder: Path, step: int, states: Mapping[str, Mapping[str, Tensor]], facts: Mapping[str, Any]) -> Path:
    """Write step_<step>/ in `folder`: one file for each of `states`, {"model": {name: tensor}, …}, and the manifest.

    CheckpointError if a weight is not finite or the disk refuses; then nothing has changed on disk.
    """
    for name, state in states.items():
        for key, tensor in state.items():
            if tensor.is_floating_point() and not tensor.isfinite().all():
                raise CheckpointError(f"step {step}: {key} of the {name} is not finite; nothing was saved")
    target = folder / f"step_{step:08d}"
    part = folder / f".{target.name}.part"
    try:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()
        sums = {}
        for name, state in states.items():
            data = safetensors.torch.save({key: tensor.contiguous() for key, tensor in state.items()})
            sums[f"{name}.safetensors"] = hashlib.sha256(data).hexdigest()
            _write(part / f"{name}.safetensors", data)
        versions = {name: version(name) for name in ("torch", "safetensors")}
        manifest = {"schema": SCHEMA, "step": step, **facts, "versions": versions, "sha256": sums}
        _write(part / "manifest.json", json.dumps({**manifest, "seal": seal(manifest)}, indent=1).encode())
        _synchronise(part)
        part.rename(target)
        _synchronise(folder)
    except OSError as error:
        shutil.rmtree(part, ignore_errors=True)
        raise CheckpointError(
            f"{target}: cannot be written ({error.strerror}); the checkpoints before it are whole, "
            "and the same command goes on from the newest"
        ) from None
    for old in _complete(folder)[:-KEPT]:
        shutil.rmtree(old, ignore_errors=True)
    return target


def load(path: Path) -> tuple[dict[str, Any], dict[str, dict[str, Tensor]]]:
    """Read and verify a checkpoint: (manifest, states). CheckpointError says what is wrong with which file.

    What was verified is what is returned: each file is read once, and safetensors holds nothing but numbers.
    """
    try:
        manifest = json.loads((path / "manifest.json").read_bytes())
        if manifest.pop("seal") != seal(manifest):
            raise ValueError
        if manifest["schema"] != SCHEMA:
            raise CheckpointError(f"{path}: has schema {manifest['schema']}, this version reads {SCHEMA}")
        sums = manifest["sha256"]
    except OSError as error:
        raise CheckpointError(f"{path}: no readable manifest.json ({error.strerror}), so it is no checkpoint") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise CheckpointError(f"{path / 'manifest.json'}: is damaged") from None
    states = {}
    for name, expected in sums.items():
        try:
            data = (path / Path(name).name).read_bytes()
            if hashlib.sha256(data).hexdigest() != expected:
                raise CheckpointError(f"{path / name}: is damaged (its sha256 is not the manifest's)")
            states[Path(name).stem] = safetensors.torch.load(data)
        except OSError as error:
            raise CheckpointError(f"{path / name}: cannot be read ({error.strerror})") from None
        except safetensors.SafetensorError as error:
            raise CheckpointError(
                f"{path / name}: is not a safetensors file ({error}), nothing of it was run"
            ) from None
    return manifest, states


def seal(manifest: Mapping[str, Any]) -> str:
    """The sha256 of what a manifest says, which stands in it beside that: a flipped bit in a step number shows."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def newest(folder: Path, warn: Callable[[str], None]) -> tuple[dict[str, Any], dict[str, dict[str, Tensor]]] | None:
    """The newest usable checkpoint in a run's folder, or None where there has been none.

    Leftovers of interrupted writing are removed. A damaged checkpoint is passed over with a warning; CheckpointError
    if there are checkpoints and none is usable, since starting anew would lose what the user believes to have.
    """
    for leftover in folder.glob(".step_*.part"):
        shutil.rmtree(leftover, ignore_errors=True)
    candidates = _complete(folder)
    for path in reversed(candidates):
        try:
            return load(path)
        except CheckpointError as error:
            warn(f"warning: {error}; falling back to the checkpoint before it")
            last = error
    if candidates:
        raise CheckpointError(
            f"{folder}: none of its {len(candidates)} checkpoints is usable ({last}); "
            "overwrite=true starts the run anew"
        )
    return None


def set_aside_after(folder: Path, step: int) -> None:
    """Rename the damaged checkpoints beyond `step`, whose places a continued run will write again."""
    for path in _complete(folder):
        if int(path.name.removeprefix("step_")) > step:
            aside = path.with_name(f"damaged_{path.name}")
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)


def load_encoder(path: Path) -> ViT:
    """The encoder of a checkpoint, the averaged one if there is one, in eval mode.

    CheckpointError unless every tensor has its place.
    """
    manifest, states = load(path)
    state = {
        name.removeprefix("encoder."): tensor
        for name, tensor in states.get("ema", states["model"]).items()
        if name.startswith("encoder.")
    }
    try:
        encoder = ViT(**manifest["encoder"])
        encoder.load_state_dict(state)
    except (KeyError, TypeError, OptionError, RuntimeError) as error:
        raise CheckpointError(f"{path}: its encoder cannot be built: {' '.join(str(error).split())}") from None
    return encoder.eval()


def _complete(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("step_*") if path.name.removeprefix("step_").isdigit())


def _write(path: Path, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _synchronise(folder: Path) -> None:
    """Make a folder's entries durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
