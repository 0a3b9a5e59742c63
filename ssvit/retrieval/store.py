"""A store of image features: a folder that grows by whole parts, is verified when it is opened, and runs no code.

part_00000000.safetensors, ... hold the features of images, and as JSON their names and classes. manifest.json lists the
sha256 of each part and has a checksum of its own. Parts are never changed, and a part that the manifest does not list
is not in the store: wherever a process ends, the folder holds all images of the parts that were complete.

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
    """A store cannot be written, or cannot be trusted."""


class Store:
    """The features of the images in a folder.

    Args:
        folder: The folder, which is created by the first `add`.
        encoder: The identity of the features, such as a checkpoint's checksum and a layer.
        standardize: Whether each feature is scaled to mean 0 and standard deviation 1 over the images of the store
            before features are compared.

    Attributes:
        places: The row of each image by its name.
        classes: The class of each image, None where it is not known.
    """

    def __init__(self, folder: str | Path, encoder: str, *, standardize: bool = False) -> None:
        self.folder, self.encoder, self.standardize = Path(folder), encoder, standardize
        self.places: dict[str, int] = {}
        self.classes: list[str | None] = []
        self._parts: list[Tensor] = []
        self._checksums: list[str] = []

    @classmethod
    def create(cls, folder: str | Path, encoder: str, *, standardize: bool = False) -> "Store":
        """Return an empty store. StoreError unless the folder is absent or holds only the rest of such an attempt."""
        begun = {LOCK, f".{MANIFEST}.part", _part(0), f".{_part(0)}.part"}
        if (folder := Path(folder)).exists() and {entry.name for entry in folder.iterdir()} - begun:
            raise StoreError(f"{folder}: holds something already; add to it if it is a store, or take another")
        return cls(folder, encoder, standardize=standardize)

    @classmethod
    def open(cls, folder: str | Path, *, encoder: str | None = None) -> "Store":
        """Read and verify a store.

        Args:
            folder: Its folder.
            encoder: The identity that its features must have; None: any.

        Raises:
            StoreError: It is damaged or of another encoder.
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
        """Write images as a new part, within `writing`; features (n, d).

        Raises:
            UserError: The store cannot hold them: a name is in it already or empty, or a vector has no direction.
            StoreError: The disk refuses; the store is unchanged.
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
        """The names of the images."""
        return list(self.places)

    @cached_property
    def features(self) -> Tensor:
        """(n, d) float32."""
        return torch.cat(self._parts)

    def absent(self, names: Sequence[str]) -> list[str]:
        """Those of some names that the store does not hold; whether a file has changed is not checked."""
        return [name for name in names if name not in self.places]

    def directions(self, features: Tensor) -> Tensor:
        """Features as the store compares them, standardised if it is to be, of length one: (n, d) -> (n, d) float32.

        StoreError if the images of the store do not differ and are to be standardised.
        """
        standard = Standard.of(self.features, standardize=self.standardize)
        if not standard.scale.any():
            right = "only images that differ can be standardised; others need standardize=false"
            raise StoreError(f"{self.folder}: {right}")
        return F.normalize(standard.scaled(features.float()), eps=torch.finfo(torch.float32).tiny)


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Keep other processes from writing a store during the block. StoreError names the process that writes it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(f"{folder}: cannot be written ({error.strerror})") from None
    try:
        with locked(folder / LOCK, lambda holder: StoreError(f"{folder}: {holder} is writing to it")):
            yield
    finally:
        with suppress(OSError):  # it holds something
            folder.rmdir()


def check_directions(features: Tensor, names: Sequence[str]) -> None:
    """UserError that names the first image whose vector is zero or not finite."""
    for row in (~features.isfinite().all(1) | (features == 0).all(1)).nonzero()[:1, 0].tolist():
        raise UserError(f"the vector of image {names[row]} has no direction: it is zero or not finite")


def _part(number: int) -> str:
    return f"part_{number:08d}.safetensors"


def _read_part(path: Path, checksum: str) -> tuple[list[str], list[str | None], Tensor]:
    """The names, classes and features of a part. StoreError unless it is the one that the manifest lists."""
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
    """The verified manifest of a store. StoreError if there is none or it is damaged."""
    path = folder / MANIFEST
    try:
        manifest, data = read_json(path)
        if manifest.get("kind") != KIND:
            raise StoreError(f"{folder}: is no store of {KIND} (its manifest.json is of something else)")
        if data != sealed(manifest):  # byte by byte, so that any damage is noticed
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
