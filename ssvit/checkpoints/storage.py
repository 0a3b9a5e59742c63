"""Write and read checkpoints, which are written atomically, are self-describing and contain no code.

step_00000500/ contains model.safetensors, optimizer.safetensors, ema.safetensors (if any) and manifest.json: the step,
the encoder's arguments ("backbone" is the name of its module, if not encoder), the identity of the run, versions, and
the sha256 of each file. A checkpoint is written to a hidden folder, synchronised to disk and renamed, so that a process
that is killed leaves no incomplete checkpoint. The newest three are kept; older ones are renamed to a hidden name
before they are deleted; best/ is a second name of one of them. While a sharded run continues, part_00000.safetensors, …
contain the shards of each process; see `parts`.
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

from ssvit.checkpoints.checkpoint import Checkpoint
from ssvit.checkpoints.manifest import SCHEMA, CheckpointError, complete, read_manifest, step_of
from ssvit.engine.atomic_io import check_regular, remove, replace, replaced_folder, sealed, synchronise, write, written

KEPT = 3
PLACES = "DCP_SHARDING_INFO"  # header entry of a part with the offsets of its shards, as written by torch
# A safetensors file stores tensors in the reverse order of their types in this list.
_NAMES = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16", torch.float16: "F16",
    torch.bfloat16: "BF16", torch.int32: "I32", torch.float32: "F32", torch.float64: "F64", torch.int64: "I64",
}  # fmt: skip
_ORDER = {dtype: index for index, dtype in enumerate(_NAMES)}


class Pending:
    """Write a checkpoint step_<step>/ of a run in a hidden folder, which is renamed when it is complete.

    The methods raise CheckpointError if a file cannot be written; earlier checkpoints are then unchanged.

    Args:
        folder: The run folder.
        step: Number of complete updates.
        entries: Entries of the manifest.
    """

    def __init__(self, folder: Path, step: int, entries: Mapping[str, object]) -> None:
        self.step, self._entries = step, entries
        self._target = folder / f"step_{step:08d}"
        self._part = folder / f".{self._target.name}.part"

    def begin(self) -> None:
        """Create an empty hidden folder."""
        with self._naming():
            remove(self._part)
            self._part.mkdir()

    def add(self, file: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> str:
        """Write a file.

        Args:
            file: Name of the file.
            tensors: The tensors by name.
            metadata: Entries of the header's metadata, by name.

        Returns:
            The sha256 of the file.
        """
        with self._naming():
            return write_tensors(self._part / file, tensors, metadata)

    def complete(self, sums: Mapping[str, str]) -> Path:
        """Write the manifest with the files' checksums, and rename the folder to its final name.

        Args:
            sums: sha256 of each file by name.

        Returns:
            The folder of the checkpoint. An existing entry of this name is renamed.
        """
        with self._naming():
            versions = {name: version(name) for name in ("torch", "safetensors")}
            fixed = {"versions": versions, "sha256": dict(sums)}
            manifest = {"schema": SCHEMA, "step": self.step, **self._entries, **fixed}
            write(self._part / "manifest.json", sealed(manifest))
            synchronise(self._part)
            if os.path.lexists(self._target):
                _set_aside(self._target)
            self._part.rename(self._target)
            synchronise(self._target.parent)
        _delete_old(self._target.parent)
        return self._target

    def drop(self) -> None:
        """Delete the hidden folder."""
        remove(self._part)

    @contextlib.contextmanager
    def _naming(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            file = Path(error.filename or self._part)
            named = self._target / file.name if file.parent == self._part else self._target
            hint = "earlier checkpoints are unchanged; the same command without overwrite=true continues"
            raise CheckpointError(f"{named}: cannot be written ({error.strerror}); {hint}") from None


def save(folder: Path, step: int, states: Mapping[str, Mapping[str, Tensor]], entries: Mapping[str, object]) -> Path:
    """Write the checkpoint step_<step>/ with one file for each state. An existing entry of this name is renamed.

    Args:
        folder: The run folder.
        step: Number of complete updates.
        states: The states, {"model": {name: tensor}, …}.
        entries: Entries of the manifest.

    Returns:
        The folder of the checkpoint.

    Raises:
        CheckpointError: A weight is not finite, or a file cannot be written. Earlier checkpoints are unchanged.
    """
    for name, state in states.items():
        check_finite(step, name, state)
    pending = Pending(folder, step, entries)
    try:
        pending.begin()
        return pending.complete({file: pending.add(file, state) for file, state in _files(states).items()})
    except CheckpointError:
        pending.drop()
        raise


def check_finite(step: int, name: str, state: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError if a tensor of a state is not finite.

    Args:
        step: Step of the checkpoint, for the message.
        name: Name of the state, for the message.
        state: The tensors by name.
    """
    for key, tensor in state.items():
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise CheckpointError(f"step {step}: {key} of the {name} is not finite; no checkpoint was written")


def merge(checkpoint: Checkpoint) -> Checkpoint:
    """Merge the parts of a sharded checkpoint into one file for each state.

    If the process is killed at any point, the checkpoint remains readable.

    Raises:
        CheckpointError: The checkpoint is damaged, or a file cannot be written.
    """
    if not is_in_parts(checkpoint):
        return checkpoint
    path, parts = checkpoint.path, checkpoint.manifest["sha256"]
    states = load(checkpoint)
    try:
        sums = {file: write_tensors(path / file, state) for file, state in _files(states).items()}
        synchronise(path)
        replace(path / "manifest.json", sealed({**checkpoint.manifest, "sha256": sums}))
        synchronise(path)
    except OSError as error:
        raise CheckpointError(f"{error.filename or path}: cannot be written ({error.strerror})") from None
    for file in parts:
        remove(path / file)
    return Checkpoint(path, read_manifest(path))


def is_in_parts(checkpoint: Checkpoint) -> bool:
    """Return whether a checkpoint consists of the parts that the processes of a sharded run have written."""
    return checkpoint.foreign is None and "model.safetensors" not in checkpoint.manifest["sha256"]


def _files(states: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Mapping[str, Tensor]]:
    return {f"{name}.safetensors": state for name, state in states.items()}


def _delete_old(folder: Path) -> None:
    """Delete all but the newest checkpoints, renamed durably first: a half-deleted one must not look complete."""
    with contextlib.suppress(OSError):  # a later call deletes them
        hidden = []
        for old in complete(folder)[:-KEPT]:
            hidden.append(old.with_name(f".{old.name}.old"))
            remove(hidden[-1])
            old.rename(hidden[-1])
        synchronise(folder)
        for old in hidden:
            remove(old)


def link(path: Path, target: Path) -> None:
    """Hard-link a checkpoint to a second folder, which is replaced; files are copied if the disk has no hard links.

    Raises:
        CheckpointError: The folder cannot be written.
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
    """Rename an entry that occupies the name of a checkpoint."""
    aside, number = path.with_name(f"aside_{path.name}"), 1
    while os.path.lexists(aside):
        number += 1
        aside = path.with_name(f"aside_{path.name}_{number}")
    path.rename(aside)


def load(checkpoint: Checkpoint, *, without: str = "") -> dict[str, dict[str, Tensor]]:
    """Read and verify the states of a checkpoint.

    Each file is read once, so that the returned bytes are exactly those that were verified.

    Args:
        checkpoint: The checkpoint. A foreign file has only the state "model".
        without: Name of a state that is not read.

    Returns:
        The states, {"model": {name: tensor}, …}.

    Raises:
        CheckpointError: A file is damaged or cannot be read.
    """
    if checkpoint.foreign:
        return {"model": checkpoint.foreign()}
    states: dict[str, dict[str, Tensor]] = {}
    pieces: dict[str, list[tuple[tuple[slice, ...], Tensor]]] = {}
    for name, expected in checkpoint.manifest["sha256"].items():
        path = checkpoint.path / name
        if path.stem == without:
            continue
        try:
            check_regular(path)
            data = path.read_bytes()
            if hashlib.sha256(data).hexdigest() != expected:
                raise CheckpointError(f"{path}: is damaged: its sha256 differs from the manifest")
            tensors = safetensors.torch.load(data)
            if not is_in_parts(checkpoint):
                states[path.stem] = tensors
                continue
            shard_offsets = json.loads(metadata(data)[PLACES])
            for key, piece in tensors.items():
                if key.partition("/")[0] != without:
                    offsets = zip(shard_offsets[key]["saved_offsets"], piece.shape, strict=True)
                    pieces.setdefault(key, []).append((tuple(slice(at, at + size) for at, size in offsets), piece))
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None
        except safetensors.SafetensorError as error:
            raise CheckpointError(f"{path}: is not a safetensors file ({error}); nothing was executed") from None
        except (ValueError, KeyError, TypeError):
            raise CheckpointError(f"{path}: does not contain the offsets of its shards") from None
    for key in list(pieces):
        state, _, name = key.partition("/")
        states.setdefault(state, {})[name] = _assembled(checkpoint, key, pieces.pop(key))
    return states


def _assembled(checkpoint: Checkpoint, name: str, pieces: Sequence[tuple[tuple[slice, ...], Tensor]]) -> Tensor:
    """Assemble a tensor from its shards and their slices."""
    shape = [max(part.stop for part in axis) for axis in zip(*(slices for slices, _ in pieces), strict=False)]
    if math.prod(shape) != sum(piece.numel() for _, piece in pieces):
        raise CheckpointError(f"{checkpoint.path}: the shards of {name} are incomplete")
    whole = pieces[0][1].new_empty(shape)
    for slices, piece in pieces:
        whole[slices] = piece
    return whole


def newest(folder: Path, warn: Callable[[str], None]) -> tuple[Checkpoint, dict[str, dict[str, Tensor]]] | None:
    """Return the newest usable checkpoint of a run folder and its states; None if the folder contains no checkpoint.

    Remains of interrupted writing and deleting are removed, and unusable checkpoints are skipped with a warning.

    Args:
        folder: The run folder.
        warn: Function that prints a line.

    Raises:
        CheckpointError: No checkpoint is usable (starting again would lose the training), or the folder cannot be read.
    """
    try:
        for name in os.listdir(folder):
            if re.fullmatch(r"\.(step_\d+|best)\.(part|old)", name):
                remove(folder / name)
        candidates = complete(folder)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be read ({error.strerror})") from None
    for path in reversed(candidates):
        try:
            checkpoint = Checkpoint(path, read_manifest(path))
            if checkpoint.step != step_of(path):
                raise CheckpointError(f"{path}: contains the checkpoint of another step, {checkpoint.step}")
            return checkpoint, load(checkpoint)
        except CheckpointError as error:
            warn(f"warning: {error}; falling back to the previous checkpoint")
            last = error
    if candidates:
        hint = "overwrite=true starts the run from the beginning"
        raise CheckpointError(f"{folder}: none of the {len(candidates)} checkpoints can be used ({last}); {hint}")
    return None


def set_aside_after(folder: Path, step: int) -> None:
    """Rename checkpoints of later steps, since a continued run writes them again."""
    try:
        for path in complete(folder):
            if step_of(path) > step:
                _set_aside(path)
    except OSError as error:
        raise CheckpointError(f"{error.filename or folder}: cannot be renamed ({error.strerror})") from None


def write_tensors(path: Path, tensors: Mapping[str, Tensor], entries: Mapping[str, str] | None = None) -> str:
    """Write a safetensors file tensor by tensor, without a second copy of them, and return its sha256.

    The bytes equal the output of `safetensors.torch.save`.

    Args:
        path: The file; it is synchronised to the disk (fsync) before the function returns.
        tensors: The tensors by name.
        entries: Entries of the header's metadata, by name.
    """
    digest = hashlib.sha256()
    with written(path) as file:
        for part in _parts(tensors, entries):
            digest.update(part)
            file.write(part)
    return digest.hexdigest()


def metadata(data: bytes) -> dict[str, str]:
    """Return the metadata in the header of a safetensors file from its content."""
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]).get("__metadata__", {})


def _parts(tensors: Mapping[str, Tensor], entries: Mapping[str, str] | None) -> Iterator[bytes | memoryview]:
    """Yield the content of a safetensors file in pieces."""
    ordered = sorted(tensors, key=lambda name: (-_ORDER[tensors[name].dtype], name))
    header: dict[str, object] = {"__metadata__": dict(entries)} if entries else {}
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
