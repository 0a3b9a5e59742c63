"""Checkpoints: each is there whole or not at all, describes itself, and cannot run code.

step_00000500/ holds model.safetensors, optimizer.safetensors, ema.safetensors (if any) and manifest.json: the step, the
encoder's arguments ("backbone" names its module, if that is not encoder), what the run is bound to, versions, and the
sha256 of each file. It is written as a hidden folder, synchronised to disk and renamed; the newest three are kept, and
older ones get a hidden name before they are deleted; best/ is one of them under a second name. So it is whole wherever
a process may die. While a sharded run goes on, part_00000.safetensors, … hold what each process has of all states; see
`parts`.
"""

import contextlib
import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor

from ssvit.atomic_io import check_regular, remove, replace, replaced_folder, sealed, synchronise, write, written
from ssvit.checkpoints.checkpoint import Checkpoint
from ssvit.checkpoints.manifest import SCHEMA, CheckpointError, complete, read, steps

KEPT = 3
PLACES = "DCP_SHARDING_INFO"  # in the header of a part: where its pieces lie, as torch's own writer has it
# As the format orders them, the last ones first.
_NAMES = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16", torch.float16: "F16",
    torch.bfloat16: "BF16", torch.int32: "I32", torch.float32: "F32", torch.float64: "F64", torch.int64: "I64",
}  # fmt: skip
_ORDER = {dtype: place for place, dtype in enumerate(_NAMES)}


class Pending:
    """A checkpoint step_<step>/ of a run's folder while it is written, in a hidden folder beside its place.

    CheckpointError if the disk refuses; then the checkpoints before it are unchanged.
    """

    def __init__(self, folder: Path, step: int, facts: Mapping[str, object]) -> None:
        self.step, self._facts = step, facts
        self._target = folder / f"step_{step:08d}"
        self._part = folder / f".{self._target.name}.part"

    def begin(self) -> None:
        """Make the folder, anew."""
        with self._naming():
            remove(self._part)
            self._part.mkdir()

    def add(self, file: str, tensors: Mapping[str, Tensor], notes: Mapping[str, str] | None = None) -> str:
        """Write a file; returns its sha256."""
        with self._naming():
            return write_tensors(self._part / file, tensors, notes)

    def complete(self, sums: Mapping[str, str]) -> Path:
        """Write the manifest, with the files' checksums, and move the folder to its place; set aside what is there."""
        with self._naming():
            versions = {name: version(name) for name in ("torch", "safetensors")}
            manifest = {"schema": SCHEMA, "step": self.step, **self._facts, "versions": versions, "sha256": dict(sums)}
            write(self._part / "manifest.json", sealed(manifest))
            synchronise(self._part)
            if os.path.lexists(self._target):
                _set_aside(self._target)
            self._part.rename(self._target)
            synchronise(self._target.parent)
        _delete_old(self._target.parent)
        return self._target

    def drop(self) -> None:
        """Delete what has been written."""
        remove(self._part)

    @contextlib.contextmanager
    def _naming(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            file = Path(error.filename or self._part)
            named = self._target / file.name if file.parent == self._part else self._target
            right = "the checkpoints before it are whole: started again, the run goes on from the newest"
            raise CheckpointError(f"{named}: cannot be written ({error.strerror}); {right}") from None


def save(folder: Path, step: int, states: Mapping[str, Mapping[str, Tensor]], facts: Mapping[str, object]) -> Path:
    """Write step_<step>/ in `folder`: one file for each of `states`, {"model": {name: tensor}, …}, and the manifest.

    Anything in its place is set aside. CheckpointError if a weight is not finite or the disk refuses; then the
    checkpoints before it are unchanged.
    """
    for name, state in states.items():
        check_finite(step, name, state)
    pending = Pending(folder, step, facts)
    try:
        pending.begin()
        return pending.complete({file: pending.add(file, state) for file, state in _files(states).items()})
    except CheckpointError:
        pending.drop()
        raise


def check_finite(step: int, name: str, state: Mapping[str, Tensor]) -> None:
    """CheckpointError if a weight of a state is not finite."""
    for key, tensor in state.items():
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise CheckpointError(f"step {step}: {key} of the {name} is not finite; nothing was saved")


def merge(checkpoint: Checkpoint) -> Checkpoint:
    """Make one file for each state of a checkpoint in parts; it is whole wherever the process may die.

    CheckpointError if it is damaged, or cannot be written.
    """
    if not is_in_parts(checkpoint):
        return checkpoint
    path, parts = checkpoint.path, checkpoint.facts["sha256"]
    states = load(checkpoint)
    try:
        sums = {file: write_tensors(path / file, state) for file, state in _files(states).items()}
        synchronise(path)
        replace(path / "manifest.json", sealed({**checkpoint.facts, "sha256": sums}))
        synchronise(path)
    except OSError as error:
        raise CheckpointError(f"{error.filename or path}: cannot be written ({error.strerror})") from None
    for file in parts:
        remove(path / file)
    return Checkpoint(path, read(path))


def is_in_parts(checkpoint: Checkpoint) -> bool:
    """Whether each process of a sharded run has written its part, so that no file holds the whole weights."""
    return checkpoint.foreign is None and "model.safetensors" not in checkpoint.facts["sha256"]


def _files(states: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Mapping[str, Tensor]]:
    return {f"{name}.safetensors": state for name, state in states.items()}


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


def link(path: Path, target: Path) -> None:
    """Give a checkpoint a second folder, by links to its files, in place of what is there. CheckpointError if refused.

    Where a disk has no links, its files are copied.
    """
    try:
        with replaced_folder(target) as part:
            for file in path.iterdir():
                try:
                    os.link(file, part / file.name)
                except OSError:
                    write(part / file.name, file.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{target}: cannot be written ({error.strerror})") from None


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
    states: dict[str, dict[str, Tensor]] = {}
    pieces: dict[str, list[tuple[tuple[slice, ...], Tensor]]] = {}
    for name, expected in checkpoint.facts["sha256"].items():
        path = checkpoint.path / name
        if path.stem == without:
            continue
        try:
            check_regular(path)
            data = path.read_bytes()
            if hashlib.sha256(data).hexdigest() != expected:
                raise CheckpointError(f"{path}: is damaged (its sha256 is not the manifest's)")
            tensors = safetensors.torch.load(data)
            if not is_in_parts(checkpoint):
                states[path.stem] = tensors
                continue
            places = json.loads(metadata(data)[PLACES])
            for key, piece in tensors.items():
                if key.partition("/")[0] != without:
                    place = zip(places[key]["saved_offsets"], piece.shape, strict=True)
                    pieces.setdefault(key, []).append((tuple(slice(at, at + size) for at, size in place), piece))
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None
        except safetensors.SafetensorError as error:
            raise CheckpointError(f"{path}: is not a safetensors file ({error}), nothing of it was run") from None
        except (ValueError, KeyError, TypeError):
            raise CheckpointError(f"{path}: does not say where its parts lie") from None
    for key in list(pieces):
        state, _, name = key.partition("/")
        states.setdefault(state, {})[name] = _assembled(checkpoint, key, pieces.pop(key))
    return states


def _assembled(checkpoint: Checkpoint, name: str, pieces: Sequence[tuple[tuple[slice, ...], Tensor]]) -> Tensor:
    """A tensor from its pieces, each with its place."""
    shape = [max(one.stop for one in dimension) for dimension in zip(*(place for place, _ in pieces), strict=False)]
    if math.prod(shape) != sum(piece.numel() for _, piece in pieces):
        raise CheckpointError(f"{checkpoint.path}: its parts of {name} do not make a whole")
    whole = pieces[0][1].new_empty(shape)
    for place, piece in pieces:
        whole[place] = piece
    return whole


def newest(folder: Path, warn: Callable[[str], None]) -> tuple[Checkpoint, dict[str, dict[str, Tensor]]] | None:
    """The newest usable checkpoint in a run's folder and its states, or None if there has been no checkpoint.

    Leftovers of interrupted writing and deleting are removed, and what cannot be used is skipped with a warning.
    CheckpointError if there are checkpoints and none is usable, since starting anew would lose what the user believes
    to have, or if the folder cannot be read.
    """
    try:
        for name in os.listdir(folder):
            if re.fullmatch(r"\.(step_\d+|best)\.(part|old)", name):
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


def write_tensors(path: Path, tensors: Mapping[str, Tensor], notes: Mapping[str, str] | None = None) -> str:
    """Write a safetensors file tensor by tensor, without a second copy of them, and return its sha256.

    The bytes are those of `safetensors.torch.save`.

    Args:
        path: The file, which is on the disk afterwards.
        tensors: The tensors by name.
        notes: Texts in the file's header, by name.
    """
    digest = hashlib.sha256()
    with written(path) as file:
        for part in _parts(tensors, notes):
            digest.update(part)
            file.write(part)
    return digest.hexdigest()


def metadata(data: bytes) -> dict[str, str]:
    """The texts in the header of a file's content."""
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]).get("__metadata__", {})


def _parts(tensors: Mapping[str, Tensor], notes: Mapping[str, str] | None) -> Iterator[bytes | memoryview]:
    """The file's content in pieces."""
    ordered = sorted(tensors, key=lambda name: (-_ORDER[tensors[name].dtype], name))
    header: dict[str, object] = {"__metadata__": dict(notes)} if notes else {}
    end = 0
    for name in ordered:
        tensor = tensors[name]
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name in ordered:
        yield tensors[name].detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
