"""Checkpoints that are there whole or not at all, say what they are, and cannot run code.

step_00000500/ holds model.safetensors, optimizer.safetensors, ema.safetensors (if any) and manifest.json, which has
the step, the encoder's own arguments, what the run is bound to, versions, and the sha256 of each file. It is written
as a hidden folder beside its place, synchronised to disk and renamed; the newest three are kept.
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor, nn

from ssvit.durable import seal, synchronise, write
from ssvit.encoder.vit import ViT
from ssvit.exchange import reading
from ssvit.objectives.classify import Classify
from ssvit.options import UserError
from ssvit.training.manifest import SCHEMA, CheckpointError, complete, located, read, untold
from ssvit.training.run import is_main_process

KEPT = 3


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
            write(part / f"{name}.safetensors", data)
        versions = {name: version(name) for name in ("torch", "safetensors")}
        manifest = {"schema": SCHEMA, "step": step, **facts, "versions": versions, "sha256": sums}
        write(part / "manifest.json", json.dumps({**manifest, "seal": seal(manifest)}, indent=1).encode())
        synchronise(part)
        part.rename(target)
        synchronise(folder)
    except OSError as error:
        shutil.rmtree(part, ignore_errors=True)
        raise CheckpointError(
            f"{target}: cannot be written ({error.strerror}); the checkpoints before it are whole, "
            "and the same command goes on from the newest"
        ) from None
    for old in complete(folder)[:-KEPT]:
        shutil.rmtree(old, ignore_errors=True)
    return target


def load(
    path: Path, *, without: str = "", told: Mapping[str, Any] | None = None
) -> tuple[dict[str, Any], dict[str, dict[str, Tensor]]]:
    """Read and verify a checkpoint: (manifest, states). CheckpointError says what is wrong with which file.

    `without` names a state that is left unread. What was verified is what is returned: each file is read once, and
    safetensors holds nothing but numbers. A foreign file has the state of an encoder alone; see `manifest.read`.
    """
    if path.is_file():
        foreign = reading.read(path, told or {})
        return foreign.facts, {"model": {f"encoder.{name}": value for name, value in foreign.weights().items()}}
    manifest = read(path)
    states = {}
    for name, expected in manifest["sha256"].items():
        if Path(name).stem == without:
            continue
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


def newest(folder: Path, warn: Callable[[str], None]) -> tuple[dict[str, Any], dict[str, dict[str, Tensor]]] | None:
    """The newest usable checkpoint in a run's folder, or None where there has been none.

    Leftovers of interrupted writing are removed. A damaged checkpoint is passed over with a warning; CheckpointError
    if there are checkpoints and none is usable, since starting anew would lose what the user believes to have.
    """
    for leftover in folder.glob(".step_*.part"):
        shutil.rmtree(leftover, ignore_errors=True)
    candidates = complete(folder)
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
    for path in complete(folder):
        if int(path.name.removeprefix("step_")) > step:
            aside = path.with_name(f"damaged_{path.name}")
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)


def load_encoder(path: str | Path, *, resize: str = "paper", announce: bool = False, **changes: Any) -> ViT:
    """The encoder of a checkpoint (the averaged one if there is one), in eval mode, without the objective's own parts.

    changes: arguments to build it with in place of its own, of those in `rules.CHANGEABLE`. Another image size
    resizes the position embeddings, in the way that `resize` says (see `ViT.take`). announce: say on the console what
    was loaded. CheckpointError unless every tensor of the encoder has its place and every place its tensor.

    path: the folder of a checkpoint, or of its run for the newest in it. It may also be a file of another framework's
    weights; then heads, mean, std and trained_size (the size of the images
    that it was trained on) tell what its tensors do not, and None leaves it to what is usual.
    """
    path = located(path)
    manifest, states = load(path, without="optimizer", told=changes)
    weights = states.get("ema", states["model"])
    try:
        trained = ViT(**manifest["encoder"])
        own = _load(trained, weights, prefix="encoder.")
        encoder = _changed(trained, untold(path, changes), resize)
    except (KeyError, TypeError, UserError, RuntimeError) as error:
        raise CheckpointError(f"{path}: its encoder cannot be built: {' '.join(str(error).split())}") from None
    if announce and is_main_process():
        left = sorted({name.split(".")[0] for name in weights.keys() - own})
        grids = ["x".join(map(str, vit.grid)) for vit in (trained, encoder)]
        print(
            f"{path}: loaded {len(own)} of {len(own)} tensors of the encoder"
            + (", averaged weights" if "ema" in states else "")
            + (f"; positions resized from {grids[0]} to {grids[1]} patches ({resize})" if grids[0] != grids[1] else "")
            + (f"; left behind: {', '.join(left)}" if left else "")
            + "".join(f"; {note}" for note in manifest.get("notes", ())),
            flush=True,
        )
    return encoder.eval()


def load_classifier(path: str | Path, *, resize: str = "paper", **changes: Any) -> Classify:
    """The classifier of a fine-tuning or supervised checkpoint, in eval mode; CheckpointError if it has none.

    path: the folder of a checkpoint, or of its run for the newest in it. resize, changes: of its encoder, as in
    `load_encoder`. Called on images alone, (b, c, h, w), it gives logits (b, k).
    """
    path = located(path)
    manifest, states = load(path, without="optimizer")
    if "classifier" not in manifest:
        raise CheckpointError(f"{path}: holds no classifier, only an encoder: tools/finetune.py makes one of it")
    try:
        classifier = Classify(encoder=ViT(**manifest["encoder"]), **manifest["classifier"])
        _load(classifier, states.get("ema", states["model"]), prefix="")
        classifier.encoder = _changed(classifier.encoder, changes, resize)
    except (KeyError, TypeError, UserError, RuntimeError) as error:
        raise CheckpointError(f"{path}: its classifier cannot be built: {' '.join(str(error).split())}") from None
    return classifier.eval()


def _changed(trained: ViT, changes: Mapping[str, Any], resize: str) -> ViT:
    """An encoder built with some other arguments and the same weights, itself where none is another."""
    if all(trained.arguments.get(name) == value for name, value in changes.items()):
        return trained
    encoder = ViT(**{**trained.arguments, **changes})
    encoder.take(trained, how=resize)
    return encoder


def _load(module: nn.Module, weights: Mapping[str, Tensor], prefix: str) -> set[str]:
    """Load what stands under a prefix, strictly; returns the names of the tensors loaded."""
    own = {name for name in weights if name.startswith(prefix)}
    module.load_state_dict({name.removeprefix(prefix): weights[name] for name in own})
    return own
