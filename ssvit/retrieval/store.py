"""A store of image features: an append-only folder that is verified when it is opened and never executes code.

Each part, part_00000000_SHA256.safetensors and so on, holds features of images, with their names, classes and
checksums, and the names of images of earlier parts that it removes or replaces, and has its checksum in its name. Parts
are written completely or not at all and never change: after an interruption at any time, the store contains the images
of all complete parts.

Shapes use n images, y, x rows and columns of patches, d width.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from ssvit.engine.atomic_io import check_schema, locked, replace, synchronise
from ssvit.errors import UserError
from ssvit.retrieval.options import PART_FILES, StoreError, metadata, reading

SCHEMA = 3
LOCK = "lock"


class Store:
    """Features of images, stored in a folder.

    Args:
        folder: Folder of the store; the first `add` creates it.
        encoder: Identity of the features, such as the checksum of a checkpoint and a layer.
        checkpoint: Path of the checkpoint, which `add` writes into the part.

    Attributes:
        row_of: Row of each image by name.
        names: Name of each image.
        classes: Class of each image, None where unknown.
        contents: Checksum of each image's content, "" where unknown.
    """

    def __init__(self, folder: str | Path, encoder: str, checkpoint: str | Path | None = None) -> None:
        self.folder, self.encoder = Path(folder), encoder
        self.checkpoint = None if checkpoint is None else os.path.abspath(checkpoint)
        self.row_of: dict[str, int] = {}
        self.names: list[str] = []
        self.classes: list[str | None] = []
        self.contents: list[str] = []
        self.count = 0  # of parts
        self._parts: list[Tensor] = []

    @classmethod
    def open(
        cls, folder: str | Path, encoder: str, *, checkpoint: str | Path | None = None, create: bool = False
    ) -> "Store":
        """Read and verify a store.

        Args:
            folder: Folder of the store.
            encoder: Identity of its features.
            checkpoint: Path of the checkpoint of features that are added; None: the path that the store contains.
            create: Whether to return an empty store if the folder does not exist or is empty.

        Raises:
            StoreError: The store is damaged or was made with another encoder, or the folder holds other files.
        """
        store = cls(folder, encoder, checkpoint)
        paths = sorted(store.folder.glob(PART_FILES))
        others = {path.name for path in store.folder.glob("*") if not path.name.startswith(".part_")} - {LOCK}
        if not paths and (others or not create):
            raise StoreError(f"{folder}: is not a store, since it has no file {PART_FILES}")
        for number, path in enumerate(paths):
            part = _read_part(path)
            if part["encoder"] != encoder:
                reason = f"was made with the encoder {part['encoder']}, not with {encoder}"
                raise StoreError(f"{folder}: {reason}: their vectors cannot be compared")
            if not path.name.startswith(f"part_{number:08d}_"):
                raise StoreError(f"{folder}: is damaged, since part {number} is missing")
            if len({features.shape[1:] for features in (*store._parts, part["features"])}) == 1:
                store._append(part)
            if checkpoint is None:
                store.checkpoint = part.get("checkpoint")
            if len(store.row_of) < len(store) or store.count == number:
                raise StoreError(f"{folder}: is damaged, since its parts do not fit together")
        return store

    def add(
        self,
        names: Sequence[str],
        classes: Sequence[str | None],
        features: Tensor,
        *,
        contents: Sequence[str] = (),
        removed: Sequence[str] = (),
    ) -> None:
        """Append images as a new part, which replaces images of the same names; call it within `writing`.

        Args:
            names: Names of the images.
            classes: Classes of the images, None where unknown.
            features: Features of images, (n, d), or of their patches, (n, y, x, d), floating point.
            contents: Checksums of the images' contents; () if unknown.
            removed: Names of further images to remove.

        Raises:
            UserError: A vector is zero or not finite.
            StoreError: A file cannot be written; the store is unchanged.
        """
        check_directions(features, names)
        features = features.float().contiguous()
        part: dict[str, Any] = {"schema": SCHEMA, "encoder": self.encoder, "checkpoint": self.checkpoint}
        part |= {"names": list(names), "classes": list(classes)}
        part["contents"] = list(contents or [""] * len(names))
        part["removed"] = [*removed, *(name for name in names if name in self.row_of)]
        texts = {name: json.dumps(value) for name, value in part.items()}
        data = safetensors.torch.save({"features": features}, texts)
        name = f"part_{self.count:08d}_{hashlib.sha256(data).hexdigest()}.safetensors"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            replace(self.folder / name, data)
            synchronise(self.folder)
        except OSError as error:
            raise StoreError(f"{self.folder}: cannot be written ({error.strerror}); the store is unchanged") from None
        self._append({**part, "features": features})

    def _append(self, part: Mapping[str, Any]) -> None:
        if removed := self.row_of.keys() & part["removed"]:
            rows = [row for row, name in enumerate(self.names) if name not in removed]
            self._parts = [self.features[rows]]
            self.names, self.contents = ([column[row] for row in rows] for column in (self.names, self.contents))
            self.classes = [self.classes[row] for row in rows]
            self.row_of = {name: row for row, name in enumerate(self.names)}
        self.row_of |= {name: row for row, name in enumerate(part["names"], start=len(self))}
        self.names += part["names"]
        self.classes += part["classes"]
        self.contents += part["contents"]
        self._parts.append(part["features"])
        self.count += 1
        self.__dict__.pop("features", None)

    def __len__(self) -> int:
        return len(self.names)

    @cached_property
    def features(self) -> Tensor:
        """Return the features of all images, (n, d), or of their patches, (n, y, x, d), float32."""
        self._parts = [torch.cat(self._parts)]  # without a second copy of the features
        return self._parts[0]


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
    """Check that the features of every image, (n, d) or (n, y, x, d), are finite and not all zero.

    Raises:
        UserError: A vector is zero or not finite; the error names the first such image.
    """
    features = features.flatten(1)
    for row in (~features.isfinite().all(1) | (features == 0).all(1)).nonzero()[:1, 0].tolist():
        raise UserError(f"the vector of image {names[row]} has no direction: it is zero or not finite")


def _read_part(path: Path) -> dict[str, Any]:
    """Return names, classes, checksums and features of a part, the names that it removes, and the store's encoder.

    Raises:
        StoreError: The part is damaged, of another format, or cannot be read.
    """
    with reading(path):
        part = metadata(path)
        with open(path, "rb") as file:
            checksum = hashlib.file_digest(file, "sha256").hexdigest()
        if not path.stem.endswith(f"_{checksum}"):
            raise StoreError(f"{path}: is damaged (its sha256 differs from its name)")
        check_schema(part["schema"], SCHEMA, path, StoreError)
        with safetensors.safe_open(path, "np") as tensors:  # with "pt", a file that cannot be read is a RuntimeError
            part["features"] = features = torch.from_numpy(tensors.get_tensor("features"))
        columns = [part[name] for name in ("names", "classes", "contents")]
        texts = (part["encoder"], part.get("checkpoint"), *part["removed"], *chain(*columns))
        if not all(isinstance(text, str) for text in texts if text is not None):
            raise ValueError
        if features.dtype != torch.float32 or features.ndim not in (2, 4) or {*map(len, columns)} != {len(features)}:
            raise ValueError
        return part
