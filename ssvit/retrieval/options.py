"""The options of a store of pictures and of its indexes, and the pictures in arguments. Standard library only."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ssvit.data import folder
from ssvit.evaluation.options import pooling_of
from ssvit.options import OptionError, file_to_write, flag, one_of, whole

PARTS = ("train", "validation", "test")
SPLITS, ALL = (*PARTS, "held_out"), "all"
ACTIONS = INDEX, ADD, QUERY = ("index", "add", "query")
EMBEDDINGS = (".npz", ".safetensors", ".parquet")


@dataclass(frozen=True, kw_only=True)
class Flat:
    """Exact search: a query is compared with every image of the store."""


@dataclass(frozen=True, kw_only=True)
class IVF:
    """Search in the nearest cells of a spherical k-means on 64 images a cell."""

    nlist: int | None = None
    """Number of cells; null: 4 sqrt(n), as faiss advises for up to a million images."""
    nprobe: int | None = None
    """Number of cells that are searched; null: sqrt(nlist)."""
    seed: int = 0
    """Seed of the images from which the cells are made."""

    def __post_init__(self) -> None:
        for name in ("nlist", "nprobe"):
            if getattr(self, name) is not None:
                whole(name, getattr(self, name))
        whole("seed", self.seed, 0)
        if self.nlist is not None and self.nprobe is not None and self.nprobe > self.nlist:
            raise OptionError("nprobe", self.nprobe, f"must be at most nlist={self.nlist}")


@dataclass(frozen=True, kw_only=True)
class HNSW:
    """Search in a graph of neighbours (Malkov and Yashunin 2018). Larger values are slower and more exact."""

    links: int = 32
    """Neighbours of an image (the paper's M; the lowest layer has twice as many)."""
    ef_construction: int = 80
    """Candidates kept while the graph is built."""
    ef_search: int = 64
    """Candidates kept while it is searched."""

    def __post_init__(self) -> None:
        whole("links", self.links, 2)
        whole("ef_construction", self.ef_construction)
        whole("ef_search", self.ef_search)


@dataclass(frozen=True, kw_only=True)
class Retrieve:
    """An action on a store of pictures."""

    action: str
    """index: make a store; add: add pictures to it; query: find the pictures that are most similar."""
    store: str
    """The folder of the store."""
    split: str
    """Which images of a data set; held_out: test images if there are any, else validation images."""
    batch_size: int
    workers: int
    """Threads that read pictures."""
    standardize: bool
    """Whether a new store scales each feature to mean 0 and standard deviation 1 over its pictures."""
    k: int
    """Neighbours of a query."""
    sheet: str | None
    """A file for the contact sheet as PNG."""
    output: str | None
    """A file for the neighbours as JSON."""
    ranking: bool
    """Whether to compute mAP over the complete ranking too, which sorts the store for each query."""

    def __post_init__(self) -> None:
        one_of("action", self.action, ACTIONS)
        one_of("split", self.split, SPLITS)
        if self.action != INDEX and not Path(str(self.store)).is_dir():
            raise OptionError("store", self.store, f"no such folder: action={INDEX} makes a store")
        for name in ("k", "batch_size", "workers"):
            whole(name, getattr(self, name))
        for name in ("ranking", "standardize"):
            flag(name, getattr(self, name))
        for name in ("sheet", "output"):
            if getattr(self, name) is not None:
                file_to_write(name, getattr(self, name))

    def features(self, options: Mapping[str, object]) -> dict[str, Any]:
        """The options of the features; a pooling that they leave open is that of an existing store."""
        is_open = options["pooling"] is None and self.action != INDEX
        return {**options, "pooling": pooling(self.store) if is_open else options["pooling"]}


@dataclass(frozen=True, kw_only=True)
class Embed:
    """The features of pictures in one file."""

    output: str
    """The file; its suffix is its format: .npz, .safetensors or .parquet."""
    split: str
    """Which images of a data set; all: those of every split; held_out: test images if there are any, else validation
    images."""
    batch_size: int
    workers: int
    """Threads that read pictures."""
    overwrite: bool
    """Whether an existing file may be replaced."""

    def __post_init__(self) -> None:
        one_of("split", self.split, (ALL, *SPLITS))
        for name in ("batch_size", "workers"):
            whole(name, getattr(self, name))
        flag("overwrite", self.overwrite)
        file = Path(str(self.output))
        if file.suffix not in EMBEDDINGS:
            raise OptionError("output", self.output, f"must end in {', '.join(EMBEDDINGS)}")
        file_to_write("output", self.output)
        if file.exists() and not self.overwrite:
            raise OptionError("output", self.output, "is there already; overwrite=true replaces it")
        if file.suffix == ".parquet" and find_spec("pyarrow") is None:
            raise OptionError("output", self.output, "needs pyarrow: pip install 'ssvit[parquet]'")


def pooling(store: object) -> str | None:
    """The pooling of a store's features; None if its manifest cannot be read, which opening the store reports."""
    try:
        return pooling_of(json.loads((Path(str(store)) / "manifest.json").read_bytes())["encoder"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def pictures(images: Sequence[object]) -> dict[str, str | None]:
    """Files and folders as {absolute path: class}, each picture once.

    The class is the name of the subfolder if a folder has one for each class, else None. OptionError if a path does not
    exist, holds no picture, or none is given.
    """
    if not images:
        raise OptionError("images", "", "name pictures, or folders of them, after the options, or a data set (data=…)")
    found: dict[str, str | None] = {}
    for image in map(str, images):
        paths = folder.pictures(image)
        for path, name in folder.list_images(image) if os.path.isdir(image) else [(path, None) for path in paths]:
            path = os.path.abspath(path)
            found[path] = name or found.get(path)
    return found
