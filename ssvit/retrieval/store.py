"""A store of image features: an append-only folder that is verified when it is opened and never executes code.

Each part, part_00000000.safetensors and so on, holds features of images, with names and classes as JSON. manifest.json
lists the sha256 of each part and contains its checksum. Parts never change, and a part that the manifest does not list
is ignored: after an interruption at any time, the store contains the images of all complete parts.

Letters: n images, d width.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.nn.functional as F
from torch import Tensor

from ssvit.atomic_io import check_regular, check_schema, locked, read_json, replace, sealed, synchronise
from ssvit.evaluation.probes.standard import Standard
from ssvit.options import UserError

KIND, SCHEMA = "image features", 2
MANIFEST, LOCK = "manifest.json", "lock"


class StoreError(UserError):
    """A store cannot be written, is damaged, or does not fit the encoder."""


class Store:
    """Features of images, stored in a folder.

    Args:
        folder: Folder of the store; the first `add` creates it.
        encoder: Identity of the features, such as the checksum of a checkpoint and a layer.
        standardize: Whether features are standardised to mean 0 and standard deviation 1 over the images of the store
            before they are compared.

    Attributes:
        places: Row of each image by name.
        classes: Class of each image, None where unknown.
    """

    def __init__(self, folder: str | Path, encoder: str, *, standardize: bool = False) -> None:
        self.folder, self.encoder, self.standardize = Path(folder), encoder, standardize
        self.places: dict[str, int] = {}
        self.classes: list[str | None] = []
        self._parts: list[Tensor] = []
        self._checksums: list[str] = []

    @classmethod
    def create(cls, folder: str | Path, encoder: str, *, standardize: bool = False) -> "Store":
        """Return an empty store.

        Args:
            folder: Folder of the store.
            encoder: Identity of the features.
            standardize: Whether to standardise features before they are compared.

        Raises:
            StoreError: The folder contains files other than those of an interrupted first `add`.
        """
        begun = {LOCK, f".{MANIFEST}.part", _part(0), f".{_part(0)}.part"}
        if (folder := Path(folder)).exists() and {entry.name for entry in folder.iterdir()} - begun:
            raise StoreError(f"{folder}: holds something already; add to it if it is a store, or take another")
        return cls(folder, encoder, standardize=standardize)

    @classmethod
    def open(cls, folder: str | Path, *, encoder: str | None = None) -> "Store":
        """Read and verify a store.

        Args:
            folder: Folder of the store.
            encoder: Required identity of its features; None accepts any.

        Raises:
            StoreError: The store is damaged or was made with another encoder.
        """
        folder = Path(folder)
        manifest = _read_manifest(folder)
        if encoder not in (None, manifest["encoder"]):
            made = f"was made with the encoder {manifest['encoder']}, not with {encoder}"
            raise StoreError(f"{folder}: {made}: their vectors cannot be compared")
        store = cls(folder, manifest["encoder"], standardize=manifest["standardize"])
        for checksum in manifest["parts"]:
            store._append(*_read_part(folder / _part(len(store._parts)), checksum), checksum)
        if len(store.places) < len(store.classes) or len({part.shape[1] for part in store._parts}) > 1:
            raise StoreError(f"{folder}: its parts do not fit together")
        return store

    def add(self, names: Sequence[str], classes: Sequence[str | None], features: Tensor) -> None:
        """Append images as a new part; call it within `writing`.

        Args:
            names: Names of the images, unique within the store and not empty.
            classes: Classes of the images, None where unknown.
            features: (n, d) floating point.

        Raises:
            UserError: A name is empty or not unique, lengths or widths differ, or a vector is zero or not finite.
            StoreError: A file cannot be written; the store is unchanged.
        """
        if not len(names) == len(classes) == len(features):
            raise UserError(f"{len(features)} vectors, {len(names)} names and {len(classes)} classes differ in number")
        if self._parts and features.shape[1] != self._parts[0].shape[1]:
            raise UserError(f"{self.folder}: its vectors have width {self._parts[0].shape[1]}, not {features.shape[1]}")
        if "" in names or len(self.places.keys() | names) < len(self.places) + len(names):
            raise UserError(f"{self.folder}: each of its images needs a name of its own")
        check_directions(features, names)
        features = features.float().contiguous()
        images = bytearray(json.dumps([list(names), list(classes)]).encode())
        data = safetensors.torch.save({"features": features, "images": torch.frombuffer(images, dtype=torch.uint8)})
        parts = [*self._checksums, hashlib.sha256(data).hexdigest()]
        manifest = {"kind": KIND, "schema": SCHEMA, "encoder": self.encoder, "standardize": self.standardize}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            replace(self.folder / _part(len(self._parts)), data)
            synchronise(self.folder)
            replace(self.folder / MANIFEST, sealed({**manifest, "parts": parts}))
            synchronise(self.folder)
        except OSError as error:
            raise StoreError(f"{self.folder}: cannot be added to ({error.strerror}); what it held is whole") from None
        self._append(names, classes, features, parts[-1])

    def _append(self, names: Sequence[str], classes: Sequence[str | None], features: Tensor, checksum: str) -> None:
        self.places |= {name: row for row, name in enumerate(names, start=len(self.classes))}
        self.classes += classes
        self._parts.append(features)
        self._checksums.append(checksum)
        self.__dict__.pop("features", None)

    def __len__(self) -> int:
        return len(self.classes)

    @property
    def names(self) -> list[str]:
        """Return the names of the images."""
        return list(self.places)

    @cached_property
    def features(self) -> Tensor:
        """Return the features of all images, (n, d) float32."""
        return torch.cat(self._parts)

    def absent(self, names: Sequence[str]) -> list[str]:
        """Return the names that the store lacks; changes of a file's content are not detected."""
        return [name for name in names if name not in self.places]

    def directions(self, features: Tensor) -> Tensor:
        """Normalise features to length one, after standardisation if the store uses it: (n, d) -> (n, d) float32.

        Raises:
            StoreError: The features are to be standardised, but all images of the store have the same ones.
        """
        standard = Standard.of(self.features, standardize=self.standardize)
        if not standard.scale.any():
            right = "only images that differ can be standardised; others need standardize=false"
            raise StoreError(f"{self.folder}: {right}")
        return F.normalize(standard.scaled(features.float()), eps=torch.finfo(torch.float32).tiny)


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Lock a store for writing during the block.

    Raises:
        StoreError: The folder cannot be written, or another process holds the lock; the error names that process.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(f"{folder}: cannot be written ({error.strerror})") from None
    try:
        with locked(folder / LOCK, lambda holder: StoreError(f"{folder}: {holder} is writing to it")):
            yield
    finally:
        with suppress(OSError):  # the folder is not empty
            folder.rmdir()


def check_directions(features: Tensor, names: Sequence[str]) -> None:
    """Check that every feature vector is finite and not zero.

    Raises:
        UserError: A vector is zero or not finite; the error names the first such image.
    """
    for row in (~features.isfinite().all(1) | (features == 0).all(1)).nonzero()[:1, 0].tolist():
        raise UserError(f"the vector of image {names[row]} has no direction: it is zero or not finite")


def _part(number: int) -> str:
    return f"part_{number:08d}.safetensors"


def _read_part(path: Path, checksum: str) -> tuple[list[str], list[str | None], Tensor]:
    """Return names, classes and features of a part.

    Raises:
        StoreError: The part is damaged, or its checksum differs from the manifest.
    """
    try:
        check_regular(path)
        data = path.read_bytes()
        if hashlib.sha256(data).hexdigest() != checksum:
            raise StoreError(f"{path}: is damaged (its sha256 is not the manifest's)")
        part = safetensors.torch.load(data)
        names, classes = json.loads(part["images"].numpy().tobytes())
        features, texts = part["features"], [*names, *(name for name in classes if name is not None)]
        if features.dtype != torch.float32 or not all(isinstance(text, str) for text in texts):
            raise ValueError
        if features.ndim != 2 or not len(names) == len(classes) == len(features):
            raise ValueError
        return names, classes, features
    except OSError as error:
        raise StoreError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError, RecursionError, RuntimeError, safetensors.SafetensorError):
        raise StoreError(f"{path}: is no part of a store; nothing of it was run") from None


def _read_manifest(folder: Path) -> dict[str, Any]:
    """Return the verified manifest of a store.

    Raises:
        StoreError: The manifest is missing or damaged.
    """
    path = folder / MANIFEST
    try:
        manifest, data = read_json(path)
        if manifest.get("kind") != KIND:
            raise StoreError(f"{folder}: is no store of {KIND} (its manifest.json is of something else)")
        if data != sealed(manifest):  # comparing all bytes detects any damage
            raise ValueError
        check_schema(manifest["schema"], SCHEMA, folder, StoreError)
        kinds = {"encoder": str, "standardize": bool, "parts": list}
        if not all(isinstance(manifest[name], kind) for name, kind in kinds.items()) or not manifest["parts"]:
            raise ValueError
        return manifest
    except OSError as error:
        raise StoreError(f"{folder}: no readable manifest.json ({error.strerror}), so it is no store") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise StoreError(f"{path}: is damaged") from None
