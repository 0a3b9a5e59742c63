"""Checkpoints: each is there whole or not at all, describes itself, and cannot run code.

step_00000500/ holds model.safetensors, optimizer.safetensors, ema.safetensors (if any) and manifest.json: the step, the
encoder's arguments ("backbone" names its module, if that is not encoder), what the run is bound to, versions, and the
sha256 of each file. It is written as a hidden folder, synchronised to disk and renamed; the newest three are kept, and
older ones get a hidden name before they are deleted. So it is whole wherever a process may die.
"""

import contextlib
import hashlib
import os
import re
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor, nn

from ssvit.atomic_io import check_regular, remove, sealed, synchronise, write
from ssvit.checkpoints import options
from ssvit.checkpoints.checkpoint import Checkpoint
from ssvit.checkpoints.manifest import SCHEMA, CheckpointError, complete, read, steps
from ssvit.checkpoints.run_folder import is_main_process
from ssvit.kernels.accelerate import accelerate
from ssvit.models import lora
from ssvit.models.vit import ViT
from ssvit.objectives.classify import Classify
from ssvit.options import UserError, command

KEPT = 3


def save(folder: Path, step: int, states: Mapping[str, Mapping[str, Tensor]], facts: Mapping[str, object]) -> Path:
    """Write step_<step>/ in `folder`: one file for each of `states`, {"model": {name: tensor}, …}, and the manifest.

    Anything in its place is set aside. CheckpointError if a weight is not finite or the disk refuses; then the
    checkpoints before it are unchanged.
    """
    for name, state in states.items():
        for key, tensor in state.items():
            if tensor.is_floating_point() and not tensor.isfinite().all():
                raise CheckpointError(f"step {step}: {key} of the {name} is not finite; nothing was saved")
    target = folder / f"step_{step:08d}"
    part = folder / f".{target.name}.part"
    try:
        remove(part)
        part.mkdir()
        sums = {}
        for name, state in states.items():
            data = safetensors.torch.save({key: tensor.contiguous() for key, tensor in state.items()})
            sums[f"{name}.safetensors"] = hashlib.sha256(data).hexdigest()
            write(part / f"{name}.safetensors", data)
        versions = {name: version(name) for name in ("torch", "safetensors")}
        manifest = {"schema": SCHEMA, "step": step, **facts, "versions": versions, "sha256": sums}
        write(part / "manifest.json", sealed(manifest))
        synchronise(part)
        if os.path.lexists(target):
            _set_aside(target)
        part.rename(target)
        synchronise(folder)
    except OSError as error:
        remove(part)
        file = Path(error.filename or part)
        named = target / file.name if file.parent == part else target
        right = "the checkpoints before it are whole: started again, the run goes on from the newest"
        raise CheckpointError(f"{named}: cannot be written ({error.strerror}); {right}") from None
    _delete_old(folder)
    return target


def _delete_old(folder: Path) -> None:
    """Delete all checkpoints but the newest, renamed durably first, so that no half of one is taken for one."""
    with contextlib.suppress(OSError):  # they are deleted after the next one
        hidden = []
        for old in complete(folder)[:-KEPT]:
            hidden.append(old.with_name(f".{old.name}.old"))
            remove(hidden[-1])
            old.rename(hidden[-1])
        synchronise(folder)
        for old in hidden:
            remove(old)


def _set_aside(path: Path) -> None:
    """Rename what is in the place of a checkpoint."""
    aside, number = path.with_name(f"aside_{path.name}"), 1
    while os.path.lexists(aside):
        number += 1
        aside = path.with_name(f"aside_{path.name}_{number}")
    path.rename(aside)


def load(checkpoint: Checkpoint, *, without: str = "") -> dict[str, dict[str, Tensor]]:
    """The verified states of a checkpoint, {"model": {name: tensor}, …}. CheckpointError names a damaged file.

    without: a state that is not read. Each file is read once, so that what was verified is what is returned. A foreign
    file has the state of an encoder alone.
    """
    if checkpoint.foreign:
        return {"model": {f"encoder.{name}": value for name, value in checkpoint.foreign.weights().items()}}
    states = {}
    for name, expected in checkpoint.facts["sha256"].items():
        path = checkpoint.path / name
        if path.stem == without:
            continue
        try:
            check_regular(path)
            data = path.read_bytes()
            if hashlib.sha256(data).hexdigest() != expected:
                raise CheckpointError(f"{path}: is damaged (its sha256 is not the manifest's)")
            states[path.stem] = safetensors.torch.load(data)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None
        except safetensors.SafetensorError as error:
            raise CheckpointError(f"{path}: is not a safetensors file ({error}), nothing of it was run") from None
    return states


def newest(folder: Path, warn: Callable[[str], None]) -> tuple[Checkpoint, dict[str, dict[str, Tensor]]] | None:
    """The newest usable checkpoint in a run's folder and its states, or None if there has been no checkpoint.

    Leftovers of interrupted writing and deleting are removed, and what cannot be used is skipped with a warning.
    CheckpointError if there are checkpoints and none is usable, since starting anew would lose what the user believes
    to have, or if the folder cannot be read.
    """
    try:
        for name in os.listdir(folder):
            if re.fullmatch(r"\.step_\d+\.(part|old)", name):
                remove(folder / name)
        found, candidates = steps(folder), complete(folder)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be read ({error.strerror})") from None
    for path in sorted(found.keys() - set(candidates)):
        warn(f"warning: {path}: is no folder, so no checkpoint; it is passed over, and renamed if its place is needed")
    for path in candidates:
        step, named = found[path]
        if step != named:
            warn(f"warning: {path}: is the checkpoint of step {step}, as its manifest says and its name does not")
    for path in reversed(candidates):
        try:
            checkpoint = Checkpoint(path, read(path))
            return checkpoint, load(checkpoint)
        except CheckpointError as error:
            warn(f"warning: {error}; falling back to the checkpoint before it")
            last = error
    if candidates:
        right = "overwrite=true starts the run anew"
        raise CheckpointError(f"{folder}: none of its {len(candidates)} checkpoints is usable ({last}); {right}")
    return None


def set_aside_after(folder: Path, step: int) -> None:
    """Rename what is beyond `step` by its name or its manifest: a continued run will write there again."""
    try:
        for path, found in steps(folder).items():
            if max(found) > step:
                _set_aside(path)
    except OSError as error:
        raise CheckpointError(f"{error.filename or folder}: cannot be renamed ({error.strerror})") from None


def load_encoder(path: str | Path, **given: Any) -> ViT:
    """The encoder of a checkpoint (with averaged weights, if there are any) in eval mode.

    path: the folder of a checkpoint, or of its run for the newest in it, or a file of another framework's weights. The
    options are those of `options.LoadEncoder`. CheckpointError unless the tensors are exactly those of the encoder.
    """
    loading = options.LoadEncoder(path=path, **given)
    checkpoint = loading.checkpoint()
    states = load(checkpoint, without="optimizer")
    try:
        weights = _trained(checkpoint, states)
        trained = ViT(**checkpoint.encoder)
        loaded = _load(trained, weights, prefix=f"{checkpoint.backbone}.")
        encoder = _changed(trained, loading)
    except (KeyError, TypeError, UserError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{checkpoint.path}: its encoder cannot be built: {reason}") from None
    if loading.announce and is_main_process():
        averaged = ", averaged weights" if "ema" in states else ""
        notes = [f"{checkpoint.path}: loaded {len(loaded)} of {len(loaded)} tensors of the encoder{averaged}"]
        before, after = ("x".join(map(str, vit.grid)) for vit in (trained, encoder))
        if before != after and trained.rotary is None:
            notes.append(f"positions resized from {before} to {after} patches ({loading.resize})")
        if left := sorted({name.split(".")[0] for name in weights.keys() - loaded}):
            notes.append(f"left behind: {', '.join(left)}")
        print(*notes, *checkpoint.facts.get("notes", ()), sep="; ", flush=True)
    accelerate(encoder)
    return encoder.eval()


def load_layers(path: str | Path | None, layer: int | None) -> ViT | None:
    """The encoder of a checkpoint up to a layer, and its last norm; None without a path. Errors: see `load_encoder`."""
    loading = options.LoadLayers(path=path, layer=layer)
    if loading.path is None:
        return None
    encoder = load_encoder(loading.path, announce=True)
    encoder.blocks = encoder.blocks[: loading.layer]
    return encoder


def load_classifier(path: str | Path, **given: Any) -> Classify:
    """The classifier of a fine-tuning or supervised checkpoint in eval mode; CheckpointError if it has none.

    The options are those of `load_encoder`. Called on images (b, c, h, w) it gives logits (b, k).
    """
    loading = options.LoadEncoder(path=path, **given)
    checkpoint = loading.checkpoint()
    states = load(checkpoint, without="optimizer")
    if not checkpoint.has_classifier:
        right = f"holds no classifier, only an encoder: {command('finetune')} makes one of it"
        raise CheckpointError(f"{checkpoint.path}: {right}")
    try:
        classifier = Classify(encoder=ViT(**checkpoint.encoder), **checkpoint.facts["classifier"])
        _load(classifier, _trained(checkpoint, states), prefix="")
        classifier.encoder = _changed(classifier.encoder, loading)
    except (KeyError, TypeError, UserError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{checkpoint.path}: its classifier cannot be built: {reason}") from None
    accelerate(classifier)
    return classifier.eval()


def _trained(checkpoint: Checkpoint, states: Mapping[str, Mapping[str, Tensor]]) -> Mapping[str, Tensor]:
    """The averaged weights, if there are any, else the weights; LoRA's matrices merged into those that they change."""
    weights = states.get("ema", states["model"])
    return lora.merged(weights, **checkpoint.facts["lora"]) if "lora" in checkpoint.facts else weights


def _changed(trained: ViT, loading: options.LoadEncoder) -> ViT:
    """An encoder with the same weights and other options, itself if none differs."""
    if all(trained.arguments.get(name) == value for name, value in loading.changes.items()):
        return trained
    encoder = ViT(**trained.arguments | loading.changes)
    encoder.take(trained, how=loading.resize)
    return encoder


def _load(module: nn.Module, weights: Mapping[str, Tensor], prefix: str) -> set[str]:
    """Load the tensors with a prefix, strictly; returns their names."""
    names = {name for name in weights if name.startswith(prefix)}
    module.load_state_dict({name.removeprefix(prefix): weights[name] for name in names})
    return names
