"""Checkpoints that are there whole or not at all, say what they are, and cannot run code.

step_00000500/ holds model.safetensors, optimizer.safetensors, ema.safetensors (if any) and manifest.json, which has
the step, the encoder's own arguments ("backbone" names its module, if that is not encoder), what the run is bound to,
versions, and the sha256 of each file. It is written as a hidden folder beside its place, synchronised to disk and
renamed; the newest three are kept, and older ones get a hidden name before they are deleted. So a process may die
anywhere: what bears a checkpoint's name is whole.
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
from ssvit.checkpoints.manifest import SCHEMA, CheckpointError, complete, places, read, step_of
from ssvit.checkpoints.run_folder import is_main_process
from ssvit.kernels.accelerate import accelerate
from ssvit.models.vit import ViT
from ssvit.objectives.classify import Classify
from ssvit.options import UserError

KEPT = 3


def save(folder: Path, step: int, states: Mapping[str, Mapping[str, Tensor]], facts: Mapping[str, Any]) -> Path:
    """Write step_<step>/ in `folder`: one file for each of `states`, {"model": {name: tensor}, …}, and the manifest.

    What lies in its place already is set aside. CheckpointError if a weight is not finite or the disk refuses; then
    the checkpoints before it are as they were.
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
        raise CheckpointError(
            f"{target / file.name if file.parent == part else target}: cannot be written ({error.strerror}); the "
            "checkpoints before it are whole, and the same command goes on from the newest"
        ) from None
    _delete_old(folder)
    return target


def _delete_old(folder: Path) -> None:
    """Delete all checkpoints but the newest: hidden first, and durably so, lest a half of one be taken for one."""
    with contextlib.suppress(OSError):  # what stays now goes with the next
        hidden = []
        for old in complete(folder)[:-KEPT]:
            hidden.append(old.with_name(f".{old.name}.old"))
            remove(hidden[-1])
            old.rename(hidden[-1])
        synchronise(folder)
        for old in hidden:
            remove(old)


def _set_aside(path: Path) -> None:
    """Rename what stands in the place of a checkpoint, and keep it, whatever it is."""
    aside, number = path.with_name(f"aside_{path.name}"), 1
    while os.path.lexists(aside):
        number += 1
        aside = path.with_name(f"aside_{path.name}_{number}")
    path.rename(aside)


def load(checkpoint: Checkpoint, *, without: str = "") -> dict[str, dict[str, Tensor]]:
    """The verified states of a checkpoint, {"model": {name: tensor}, …}. CheckpointError says which file is damaged.

    `without` names a state that is left unread. What was verified is what is returned: each file is read once, and
    safetensors holds nothing but numbers. A foreign file has the state of an encoder alone.
    """
    if checkpoint.foreign is not None:
        return {"model": {f"encoder.{name}": value for name, value in checkpoint.foreign.weights().items()}}
    path = checkpoint.path
    states = {}
    for name, expected in checkpoint.facts["sha256"].items():
        if Path(name).stem == without:
            continue
        try:
            check_regular(path / name)
            data = (path / name).read_bytes()
            if hashlib.sha256(data).hexdigest() != expected:
                raise CheckpointError(f"{path / name}: is damaged (its sha256 is not the manifest's)")
            states[Path(name).stem] = safetensors.torch.load(data)
        except OSError as error:
            raise CheckpointError(f"{path / name}: cannot be read ({error.strerror})") from None
        except safetensors.SafetensorError as error:
            raise CheckpointError(
                f"{path / name}: is not a safetensors file ({error}), nothing of it was run"
            ) from None
    return states


def newest(folder: Path, warn: Callable[[str], None]) -> tuple[Checkpoint, dict[str, dict[str, Tensor]]] | None:
    """The newest usable checkpoint in a run's folder, or None where there has been none.

    Leftovers of interrupted writing and deleting are removed. What is damaged, or no checkpoint, is passed over with a
    warning; CheckpointError if there are checkpoints and none is usable, since starting anew would lose what the user
    believes to have, or if the folder cannot be read.
    """
    try:
        for name in os.listdir(folder):
            if re.fullmatch(r"\.step_\d+\.(part|old)", name):
                remove(folder / name)
        named, candidates = places(folder), complete(folder)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be read ({error.strerror})") from None
    for path in sorted(named.keys() - set(candidates)):
        warn(f"warning: {path}: is no folder, so no checkpoint; it is passed over, and renamed if its place is needed")
    for path in candidates:
        if (step := step_of(path, otherwise=named[path])) != named[path]:
            warn(f"warning: {path}: is the checkpoint of step {step}, as its manifest says and its name does not")
    for path in reversed(candidates):
        try:
            checkpoint = Checkpoint(path, read(path))
            return checkpoint, load(checkpoint)
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
    """Rename what is beyond `step`, or named so, damaged or wrongly named: a continued run will write there again."""
    try:
        for path, named in places(folder).items():
            if max(named, step_of(path, otherwise=named)) > step:
                _set_aside(path)
    except OSError as error:
        raise CheckpointError(f"{error.filename or folder}: cannot be renamed ({error.strerror})") from None


def load_encoder(path: str | Path, **given: Any) -> ViT:
    """The encoder of a checkpoint (the averaged one if there is one), in eval mode, without the objective's own parts.

    path: the folder of a checkpoint, or of its run for the newest in it, or a file of another framework's weights. The
    options are those of `options.LoadEncoder`. CheckpointError unless every tensor of the encoder has its place and
    every place its tensor.
    """
    asked = options.LoadEncoder(path=path, **given)
    checkpoint = asked.checkpoint()
    states = load(checkpoint, without="optimizer")
    weights = states.get("ema", states["model"])
    try:
        trained = ViT(**checkpoint.encoder)
        own = _load(trained, weights, prefix=f"{checkpoint.backbone}.")
        encoder = _changed(trained, asked)
    except (KeyError, TypeError, UserError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{checkpoint.path}: its encoder cannot be built: {reason}") from None
    if asked.announce and is_main_process():
        left = sorted({name.split(".")[0] for name in weights.keys() - own})
        before, after = ("x".join(map(str, vit.grid)) for vit in (trained, encoder))
        moved = f"; positions resized from {before} to {after} patches ({asked.resize})" if before != after else ""
        print(
            f"{checkpoint.path}: loaded {len(own)} of {len(own)} tensors of the encoder"
            + (", averaged weights" if "ema" in states else "")
            + moved
            + (f"; left behind: {', '.join(left)}" if left else "")
            + "".join(f"; {note}" for note in checkpoint.facts.get("notes", ())),
            flush=True,
        )
    accelerate(encoder)
    return encoder.eval()


def load_classifier(path: str | Path, **given: Any) -> Classify:
    """The classifier of a fine-tuning or supervised checkpoint, in eval mode; CheckpointError if it has none.

    path: the folder of a checkpoint, or of its run for the newest in it. The options are of its encoder, as in
    `load_encoder`. Called on images alone, (b, c, h, w), it gives logits (b, k).
    """
    asked = options.LoadEncoder(path=path, **given)
    checkpoint = asked.checkpoint()
    states = load(checkpoint, without="optimizer")
    if not checkpoint.has_classifier:
        right = "holds no classifier, only an encoder: tools/finetune.py makes one of it"
        raise CheckpointError(f"{checkpoint.path}: {right}")
    try:
        classifier = Classify(encoder=ViT(**checkpoint.encoder), **checkpoint.facts["classifier"])
        _load(classifier, states.get("ema", states["model"]), prefix="")
        classifier.encoder = _changed(classifier.encoder, asked)
    except (KeyError, TypeError, UserError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{checkpoint.path}: its classifier cannot be built: {reason}") from None
    accelerate(classifier)
    return classifier.eval()


def _changed(trained: ViT, asked: options.LoadEncoder) -> ViT:
    """An encoder built with some other options and the same weights, itself where none is another."""
    if all(trained.arguments.get(name) == value for name, value in asked.changes.items()):
        return trained
    encoder = ViT(**trained.arguments | asked.changes)
    encoder.take(trained, how=asked.resize)
    return encoder


def _load(module: nn.Module, weights: Mapping[str, Tensor], prefix: str) -> set[str]:
    """Load what stands under a prefix, strictly; returns the names of the tensors loaded."""
    own = {name for name in weights if name.startswith(prefix)}
    module.load_state_dict({name.removeprefix(prefix): weights[name] for name in own})
    return own
