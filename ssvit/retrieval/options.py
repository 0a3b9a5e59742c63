"""The options of a store of pictures, and the pictures in arguments. Standard library only."""

import json
import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, Self

from pydantic import model_validator

from ssvit.config.declaration import Count, Name, Part
from ssvit.data.sources import folder
from ssvit.evaluation.features_options import OneLayer
from ssvit.exchange.reading_options import ForeignEncoder
from ssvit.loading.finding_options import Pretrained
from ssvit.options import OptionError, file_to_write

PARTS, ALL = ("train", "validation", "test"), "all"
Split = Literal["train", "validation", "test", "held_out"]
INDEX, ADD, QUERY = "index", "add", "query"
FEWEST = 5  # pictures whose deviations are good enough to standardise by: with two or three, neighbours get worse
EMBEDDINGS = (".npz", ".safetensors", ".parquet")


class Pictures(Pretrained):
    """Pictures, and the features that an encoder computes of them."""

    data: Part = None
    """A data set whose images are used if no pictures are named: its name, or the path of a folder."""
    images: Sequence[Name] = ()
    """Pictures, or folders of them."""
    encoder: ForeignEncoder = ForeignEncoder()
    """What another project's file may not contain; null: what the files next to it have, or the usual value."""
    features: OneLayer = OneLayer()
    """Which outputs of the encoder are the features."""
    batch_size: Count = 64
    """Pictures encoded at a time."""
    workers: Count = 4
    """Threads that read pictures."""


class Retrieve(Pictures):
    """An action on a store of pictures. All features of a store are of one checkpoint and one layer."""

    action: Literal["index", "add", "query"]
    """index: make a store; add: add pictures to it; query: find the pictures that are most similar."""
    store: Name
    """The folder of the store."""
    index: Part = None
    """How a query searches."""
    split: Split = "train"
    """Which images of a data set; held_out: test images if there are any, else validation images."""
    standardize: Literal["auto"] | bool = "auto"
    """Whether a new store scales each feature to mean 0 and standard deviation 1 over all of its pictures when they are
    compared. auto: if the objective of the checkpoint's run declares `needs_standardizing`, as those of masked models
    do, and the store begins with 5 pictures or more."""
    k: Count = 10
    """Neighbours of a query."""
    sheet: Name | None = None
    """A file for the contact sheet as PNG."""
    output: Name | None = None
    """A file for the neighbours as JSON."""
    ranking: bool = True
    """Whether to compute mAP over the complete ranking too, which sorts the store for each query."""

    @model_validator(mode="after")
    def _check_files(self) -> Self:
        if self.action != INDEX and not Path(self.store).is_dir():
            raise OptionError("store", self.store, f"no such folder: action={INDEX} makes a store")
        for name in ("sheet", "output"):
            if getattr(self, name) is not None:
                file_to_write(name, getattr(self, name))
        return self


class Embed(Pictures):
    """The features of pictures in one file."""

    output: Name
    """The file; its suffix is its format: .npz, .safetensors or .parquet."""
    split: Literal["all", "train", "validation", "test", "held_out"] = "all"
    """Which images of a data set; all: those of every split; held_out: test images if there are any, else validation
    images."""
    overwrite: bool = False
    """Whether an existing file may be replaced."""

    @model_validator(mode="after")
    def _check_output(self) -> Self:
        file = Path(self.output)
        if file.suffix not in EMBEDDINGS:
            raise OptionError("output", self.output, f"must end in {', '.join(EMBEDDINGS)}")
        file_to_write("output", self.output)
        if file.exists() and not self.overwrite:
            raise OptionError("output", self.output, "is there already; overwrite=true replaces it")
        if file.suffix == ".parquet" and find_spec("pyarrow") is None:
            raise OptionError("output", self.output, "needs pyarrow: pip install 'ssvit[parquet]'")
        return self


def encoder_of(store: str | Path) -> str:
    """The identity of a store's features; "" if its manifest cannot be read, which opening the store reports."""
    try:
        return str(json.loads((Path(store) / "manifest.json").read_bytes())["encoder"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return ""


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
