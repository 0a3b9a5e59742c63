"""A store of image vectors in a folder: written completely or not at all, verified when opened, unable to run code.

vectors_00000000.safetensors, … (the shards) hold each image's vector, name and label; manifest.json has the encoder,
how features are standardised, the names of the classes, the sha256 of each shard, and its own checksum. A file that the
manifest does not list is not in the store: new shards are written and synchronised first, then one rename of the
manifest adds them. Written shards are never changed, so they are read as mapped memory.

Letters: n images, d width.
"""

import hashlib
import os
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
from torch import Tensor

from ssvit.atomic_io import check_regular, locked, read_json, sealed, synchronise, write
from ssvit.data.sources.base import Labels
from ssvit.evaluation.probes.standard import Standard
from ssvit.options import UserError

KIND, SCHEMA = "image vectors", 1
UNKNOWN = -1  # the label of an image whose class is not known
_SHARD = 1 << 30  # bytes of vectors in a shard at most: they are in memory twice while they are written
_BLOCK = 1 << 16  # vectors normalised at a time


class StoreError(UserError):
    """A store cannot be written, or cannot be trusted."""


class _Shard(NamedTuple):
    vectors: Tensor  # (n, d) float32
    labels: Tensor  # (n,) int64
    names: Tensor  # (bytes,) uint8, a zero between two


def unit(vectors: Tensor, names: Sequence[str] | None = None, standard: Standard | None = None) -> Tensor:
    """Scale vectors to length one: (n, d) -> (n, d) float32. UserError names one that is zero or not finite.

    standard: scales their features before that.
    """
    scaled = torch.empty(vectors.shape, dtype=torch.float32)
    for start in range(0, len(vectors), _BLOCK):
        block = vectors[start : start + _BLOCK].double()
        block = block if standard is None else standard.scaled(block)
        scaled[start : start + _BLOCK] = block / block.square().sum(1, keepdim=True).sqrt()
    # Zero divided by zero is not a number either.
    for place in (~scaled.isfinite().all(1)).nonzero()[:, 0].tolist():
        name = f"number {place}" if names is None else names[place]
        raise UserError(f"the vector of image {name} has no direction: it is zero or not finite")
    return scaled


def check_vacant(folder: Path) -> None:
    """StoreError unless the folder is absent or empty."""
    if folder.exists() and any(folder.iterdir()):
        raise StoreError(f"{folder}: holds something already; add to it if it is a store, or take another")


class Store:
    """The vectors that a folder holds. Made by `create` or `open`; `add` adds to the folder and to this object.

    encoder: the identity of the features, as given to `create`. width: of the vectors. classes: their names.
    """

    def __init__(self, folder: Path, manifest: Mapping[str, Any]) -> None:
        self.folder, self._manifest = folder, manifest
        self.encoder, self.width, self.classes = manifest["encoder"], manifest["width"], tuple(manifest["classes"])
        self._standard = _standard(manifest)
        self._shards = [_map(folder, entry, manifest) for entry in manifest["shards"]]

    @classmethod
    def create(
        cls,
        folder: str | Path,
        vectors: Tensor,
        names: Sequence[str],
        labels: Labels = None,
        classes: Sequence[str] = (),
        *,
        encoder: str,
        standardize: bool = False,
    ) -> "Store":
        """A new store of vectors (n, d), which are scaled to length one; `folder` must be absent or empty.

        standardize: first scale each feature to mean 0 and standard deviation 1 over these images. Images added later
        and queries are scaled by the same numbers.

        names: of the images, all different (a path, or a place in a data set). labels (n,): into `classes`, -1 for
        none; left out, no image has one. encoder: the identity of the features, such as a checkpoint's checksum
        and a layer. StoreError if the disk refuses, UserError for wrong values; then nothing has changed.
        """
        folder = Path(os.path.abspath(folder))
        if not len(vectors):
            raise UserError(f"{folder}: there are no vectors to make a store of")
        labels = _checked(len(vectors), names, labels, classes)
        manifest: dict[str, Any] = {"kind": KIND, "schema": SCHEMA, "encoder": encoder}
        manifest |= {"width": vectors.shape[1], "classes": list(classes), "shards": []}
        if standardize:
            standard = Standard.of(vectors[vectors.isfinite().all(1)].float(), standardize=True)
            if not standard.scale.any():
                raise UserError(f"{folder}: only images that differ can be standardised; others need standardize=false")
            manifest["standard"] = {name: values.tolist() for name, values in standard._asdict().items()}
        vectors = unit(vectors, names, _standard(manifest))
        part = folder.with_name(f".{folder.name}.part")
        try:
            check_vacant(folder)
            part.mkdir(parents=True, exist_ok=True)
            with _held(folder.with_name(f".{folder.name}.lock"), folder):
                for leftover in part.iterdir():
                    leftover.unlink()
                _append(part, manifest, vectors, names, labels)
                part.rename(folder)
                synchronise(folder.parent)
        except OSError as error:
            shutil.rmtree(part, ignore_errors=True)
            raise StoreError(f"{folder}: cannot be written ({error.strerror})") from None
        return cls(folder, _read_manifest(folder))

    @classmethod
    def open(cls, folder: str | Path, *, encoder: str | None = None) -> "Store":
        """Read and verify a store. StoreError says what is wrong with which file.

        encoder: refuse a store whose vectors another one made; None opens any.
        """
        folder = Path(folder)
        manifest = _read_manifest(folder)
        if encoder is not None and manifest["encoder"] != encoder:
            raise StoreError(
                f"{folder}: was made with the encoder {manifest['encoder']}, not with {encoder}: "
                "their vectors cannot be compared"
            )
        for entry in manifest["shards"]:
            path = folder / entry["file"]
            try:
                check_regular(path)
                with path.open("rb") as file:
                    if hashlib.file_digest(file, "sha256").hexdigest() != entry["sha256"]:
                        raise StoreError(f"{path}: is damaged (its sha256 is not the manifest's)")
            except OSError as error:
                raise StoreError(f"{path}: cannot be read ({error.strerror})") from None
        return cls(folder, manifest)

    def add(
        self, vectors: Tensor, names: Sequence[str], labels: Any = None, classes: Sequence[str] | None = None
    ) -> None:
        """Add the vectors of more images, of the same encoder; those of the store keep their places.

        classes: of `labels`, by default the store's; new ones are appended to these. StoreError if a name is there
        already (see `absent`), if another process is adding or has added since the store was opened, or if the disk
        refuses: then the store is unchanged. Killed at any moment, the folder holds the old store or the new.
        """
        if not len(vectors):
            return
        if vectors.shape[1:] != (self.width,):
            raise UserError(f"{self.folder}: holds vectors of width {self.width}, not {vectors.shape[1]}")
        if known := [name for name in names if name in self._places]:
            raise StoreError(
                f"{self.folder}: holds {len(known)} of the {len(names)} images already, such as {known[0]}"
            )
        classes = self.classes if classes is None else classes
        labels = _checked(len(vectors), names, labels, classes)
        merged = {name: number for number, name in enumerate(dict.fromkeys((*self.classes, *classes)))}
        labels = torch.tensor([*(merged[name] for name in classes), UNKNOWN])[labels]  # -1 takes the last
        vectors = self.directions(vectors, names)
        try:
            with _held(self.folder / "lock", self.folder):
                listed = _read_manifest(self.folder)
                if listed["seal"] != self._manifest["seal"]:
                    raise StoreError(f"{self.folder}: has been added to since it was opened; open it again")
                _sweep(self.folder)
                try:
                    _append(self.folder, {**listed, "classes": list(merged)}, vectors, names, labels)
                except OSError:
                    _sweep(self.folder)
                    raise
                manifest = _read_manifest(self.folder)
        except OSError as error:
            raise StoreError(f"{self.folder}: cannot be added to ({error.strerror}); what it held is whole") from None
        self.__dict__ = Store(self.folder, manifest).__dict__  # with nothing cached

    def directions(self, vectors: Tensor, names: Sequence[str]) -> Tensor:
        """Features of named images as the store compares them, of length one: (n, d) -> (n, d) float32.

        UserError names an image whose vector is zero or not finite.
        """
        return unit(vectors, names, self._standard)

    def absent(self, names: Sequence[str]) -> list[int]:
        """Places in `names` of those that the store does not hold; whether a file has changed is not checked."""
        return [place for place, name in enumerate(names) if name not in self._places]

    def places(self, names: Sequence[str]) -> Tensor:
        """The places of images in the store: (len(names),) int64, -1 for one that it does not hold."""
        return torch.tensor([self._places.get(name, -1) for name in names], dtype=torch.int64)

    def __len__(self) -> int:
        return sum(len(shard.vectors) for shard in self._shards)

    @cached_property
    def vectors(self) -> Tensor:
        """(n, d) float32, of length one: mapped memory where there is one shard, else a copy in memory."""
        return self._shards[0].vectors if len(self._shards) == 1 else torch.cat([s.vectors for s in self._shards])

    @cached_property
    def labels(self) -> Tensor:
        """(n,) int64 into `classes`, -1 where the class is not known."""
        return torch.cat([shard.labels for shard in self._shards])

    @cached_property
    def names(self) -> list[str]:
        """Of the images, in the order of the vectors."""
        texts = (shard.names.numpy().tobytes().decode(errors="surrogateescape") for shard in self._shards)
        return [name for text in texts for name in text.split("\0")]

    @cached_property
    def _places(self) -> dict[str, int]:
        return {name: place for place, name in enumerate(self.names)}


def _checked(n: int, names: Sequence[str], labels: Labels, classes: Sequence[str]) -> Tensor:
    """The labels of n images, (n,) int64. UserError for names and labels that a store cannot hold."""
    numbers = torch.full((n,), UNKNOWN) if labels is None else torch.as_tensor(labels, dtype=torch.int64)
    if len(names) != n or numbers.shape != (n,):
        raise UserError(f"{n} vectors, {len(names)} names and {len(numbers)} labels do not belong together")
    if len(set(classes)) < len(classes):
        raise UserError("two classes have the same name")
    if wrong := numbers[(numbers < UNKNOWN) | (numbers >= len(classes))][:1].tolist():
        raise UserError(f"label {wrong[0]} is outside of [0, {len(classes)}), the range of the classes")
    for name, times in Counter(names).items():
        if times > 1:
            raise UserError(f"the image {name} is given twice")
        if not name or "\0" in name:
            raise UserError(f"an image cannot be named {name!r}")
    return numbers


def _standard(manifest: Mapping[str, Any]) -> Standard | None:
    """How a store standardises features; None if it does not."""
    found = manifest.get("standard")
    if found is None:
        return None
    return Standard(*(torch.tensor(found[name], dtype=torch.float64) for name in Standard._fields))


def _append(folder: Path, manifest: Mapping[str, Any], vectors: Tensor, names: Sequence[str], labels: Tensor) -> None:
    """Write images as new shards, then by one rename the manifest that lists them too."""
    rows = max(1, _SHARD // (4 * vectors.shape[1]))
    entries = list(manifest["shards"])
    for number, start in enumerate(range(0, len(vectors), rows), start=len(entries)):
        part = slice(start, start + rows)
        # A path can be of bytes that are no UTF-8.
        text = bytearray("\0".join(names[part]).encode(errors="surrogateescape"))
        shard = _Shard(vectors[part], labels[part].contiguous(), torch.frombuffer(text, dtype=torch.uint8))
        data, file = safetensors.torch.save(shard._asdict()), f"vectors_{number:08d}.safetensors"
        write(folder / file, data)
        entries.append({"file": file, "count": len(shard.vectors), "sha256": hashlib.sha256(data).hexdigest()})
    synchronise(folder)
    beside = folder / "manifest.json.part"
    write(beside, sealed({**manifest, "shards": entries}))
    beside.rename(folder / "manifest.json")
    synchronise(folder)


def _map(folder: Path, entry: Mapping[str, Any], manifest: Mapping[str, Any]) -> _Shard:
    """A shard as mapped memory. StoreError unless it holds what the manifest says."""
    path = folder / entry["file"]
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            shard = _Shard(*(file.get_tensor(field) for field in _Shard._fields))
    except OSError as error:
        raise StoreError(f"{path}: cannot be read ({error.strerror})") from None
    except safetensors.SafetensorError as error:
        raise StoreError(f"{path}: is not a shard of vectors ({error}), nothing of it was run") from None
    except RuntimeError as error:  # torch's, for a file that the system does not let it map
        raise StoreError(f"{path}: cannot be read ({error})") from None
    form = [(tensor.dtype, tuple(tensor.shape)) for tensor in shard[:2]]
    n, classes = entry["count"], len(manifest["classes"])
    if (
        form != [(torch.float32, (n, manifest["width"])), (torch.int64, (n,))]
        or shard.names.dtype != torch.uint8
        or int((shard.names == 0).sum()) != n - 1
        or not ((shard.labels >= UNKNOWN) & (shard.labels < classes)).all()
    ):
        raise StoreError(f"{path}: does not hold what the manifest says")
    return shard


def _read_manifest(folder: Path) -> dict[str, Any]:
    """The verified manifest of a store. StoreError says what is wrong with it."""
    path = folder / "manifest.json"
    try:
        manifest, data = read_json(path)
        if manifest.get("kind") != KIND:
            raise StoreError(f"{folder}: is no store of image vectors (its manifest.json is of something else)")
        # Byte by byte, so that any damage is noticed.
        if data != sealed(manifest):
            raise ValueError
        if manifest["schema"] != SCHEMA:
            raise StoreError(f"{folder}: has schema {manifest['schema']}, this version reads {SCHEMA}")
        if not _has(manifest, encoder=str, width=int, classes=list, shards=list) or not manifest["shards"]:
            raise ValueError
        for entry in manifest["shards"]:
            # A shard lies in the folder, nowhere else.
            if not _has(entry, file=str, count=int, sha256=str) or Path(entry["file"]).name != entry["file"]:
                raise ValueError
        if any(values.shape != (manifest["width"],) for values in _standard(manifest) or ()):
            raise ValueError
        return manifest
    except OSError as error:
        raise StoreError(f"{folder}: no readable manifest.json ({error.strerror}), so it is no store") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise StoreError(f"{path}: is damaged") from None


def _has(values: Mapping[str, object], **kinds: type) -> bool:
    return all(isinstance(values[key], kind) for key, kind in kinds.items())


def _sweep(folder: Path) -> None:
    """Remove what an interrupted `add` has left: all that the manifest does not list."""
    listed = {entry["file"] for entry in _read_manifest(folder)["shards"]}
    for path in (folder / "manifest.json.part", *folder.glob("vectors_*.safetensors")):
        if path.name not in listed:
            path.unlink(missing_ok=True)


def _held(lock: Path, folder: Path) -> AbstractContextManager[None]:
    """Keep other processes from writing a store during the block. StoreError names the one that writes it already."""
    return locked(lock, lambda holder: StoreError(f"{folder}: {holder} is writing to it; wait until it has ended"))
