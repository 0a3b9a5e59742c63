"""Define the options of the commands on stores of pictures, and list the pictures in their arguments (no torch)."""

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
FEWEST = 5  # fewest pictures to standardise by: standard deviations of two or three make neighbours worse
EMBEDDINGS = (".npz", ".safetensors", ".parquet")


class Pictures(Pretrained):
    """Pictures, and the encoder that computes their features."""

    data: Part = None
    """A data set whose images are used if no pictures are named: its name, or the path of a folder."""
    images: Sequence[Name] = ()
    """Pictures, or folders of pictures."""
    encoder: ForeignEncoder = ForeignEncoder()
    """Settings that another project's checkpoint may lack; null: as in the files next to it, or the usual value."""
    features: OneLayer = OneLayer()
    """The encoder outputs that serve as features."""
    batch_size: Count = 64
    """Pictures per forward pass of the encoder."""
    workers: Count = 4
    """Number of threads that read pictures."""


class Retrieve(Pictures):
    """Create, extend or search a store of pictures. All features of a store come from one checkpoint and one layer."""

    action: Literal["index", "add", "query"]
    """index: create a store; add: add pictures to it; query: find the most similar pictures."""
    store: Name
    """The folder of the store."""
    index: Part = None
    """Search index of a query, exact or approximate."""
    split: Split = "train"
    """Split of a data set; held_out: test images if there are any, else validation images."""
    standardize: Literal["auto"] | bool = "auto"
    """Whether a new store standardises each feature over its pictures before comparison. auto: if the objective of the
    checkpoint's run declares `needs_standardizing`, as those of masked models do, and the store begins with 5 pictures
    or more."""
    k: Count = 10
    """Number of neighbours of a query."""
    sheet: Name | None = None
    """File for the contact sheet (PNG)."""
    output: Name | None = None
    """File for the neighbours (JSON)."""
    ranking: bool = True
    """Whether to also compute mAP over the complete ranking, which sorts the store for each query."""

    @model_validator(mode="after")
    def _check_files(self) -> Self:
        if self.action != INDEX and not Path(self.store).is_dir():
            raise OptionError("store", self.store, f"no such folder: action={INDEX} makes a store")
        for name in ("sheet", "output"):
            if getattr(self, name) is not None:
                file_to_write(name, getattr(self, name))
        return self


class Embed(Pictures):
    """Write the features of pictures to one file."""

    output: Name
    """The file; its suffix selects the format: .npz, .safetensors or .parquet."""
    split: Literal["all", "train", "validation", "test", "held_out"] = "all"
    """Split of a data set; all: every split; held_out: test images if there are any, else validation images."""
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
    """Return the identity of a store's features, or "" if its manifest cannot be read."""
    try:
        return str(json.loads((Path(store) / "manifest.json").read_bytes())["encoder"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return ""


def pictures(images: Sequence[object]) -> dict[str, str | None]:
    """List files and folders as {absolute path: class}, each picture once.

    The class is the name of the subfolder if a folder has one for each class, else None.

    Raises:
        OptionError: No path was passed, or a path does not exist or holds no picture.
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
