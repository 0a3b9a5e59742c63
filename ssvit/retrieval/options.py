"""Define the options of the commands on stores of pictures, and list the pictures in their arguments (no torch)."""

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

import safetensors
from annotated_types import Len
from pydantic import BeforeValidator

from ssvit.config.declaration import Count, Expect, Name, Options, Part, Size, Whole
from ssvit.data.sources import folder
from ssvit.data.sources.base_options import DataSet
from ssvit.data.windows_options import Windowed
from ssvit.devices import Inference
from ssvit.engine.atomic_io import check_regular
from ssvit.errors import OptionError, UserError, file_to_write
from ssvit.evaluation.options import Flat, OneLayer
from ssvit.exchange.options import ForeignEncoder
from ssvit.loading.options import Pretrained
from ssvit.values import value_of

PARTS, ALL, HELD_OUT = ("train", "validation", "test"), "all", "held_out"
Split = Literal["train", "validation", "test", "held_out"]
INDEX, QUERY, REMOVE = "index", "query", "remove"
ALIASES = {"data.image_size": "image_size"}  # the name of the option in commands on data sets
_LISTED = BeforeValidator(lambda value: value_of(f"[{value}]") if isinstance(value, str) else value)
FEWEST = 5  # fewest pictures to standardise by: standard deviations of two or three make neighbours worse
NPZ, PARQUET = ".npz", ".parquet"
PART_FILES = "part_*_*.safetensors"  # files of a store


class StoreError(UserError):
    """A store cannot be written, is damaged, or does not fit the encoder."""


class Pictures(Pretrained, Inference, Windowed):
    """Pictures, and the encoder that computes their features."""

    checkpoint: Name = "newest"
    """The folder of a checkpoint or of its run, a file of foreign weights, hf://OWNER/NAME, or an exported ONNX file;
    newest: that of the store, else the pre-training run that finished last."""
    data: Part[DataSet | None] = None
    """A data set whose images are used if no pictures are named: its name, or the path of a folder."""
    images: Sequence[Name] = ()
    """Pictures, or folders of pictures."""
    encoder: ForeignEncoder = ForeignEncoder()
    """Settings that another project's checkpoint may lack; null: as in the files next to it, or the usual value."""
    image_size: Size | None = None
    """Pixels to which images are resized, or [height, width]; null: that of the store, else the checkpoint's, or for
    weights of other projects that of the images, at most 224."""
    features: OneLayer = OneLayer()
    """The encoder outputs that serve as features."""
    batch_size: Count = 64
    """Pictures per forward pass of the encoder."""
    workers: Whole = 0
    """Loader processes for pictures in files."""


class Retrieve(Pictures):
    """Change or search a store of pictures. All features of a store come from one checkpoint and one layer."""

    action: Literal["index", "query", "remove"]
    """index: create a store, add pictures to it, or update changed ones; query: find the most similar pictures; remove:
    remove pictures, also of files that no longer exist."""
    store: Name
    """The folder of the store."""
    index: Part[Options | None] = None
    """Search index of a query, exact or approximate."""
    split: Split = "train"
    """Split of a data set; held_out: test images if there are any, else validation images."""
    standardize: Literal["auto"] | bool = "auto"
    """Whether a query standardises each feature over the store before comparison. auto: if the objective of the
    checkpoint's run declares `needs_standardizing`, as masked models do, and the store has 5 pictures or
    more."""
    k: Count = 10
    """Number of neighbours of a query."""
    patch: Annotated[Sequence[Whole], _LISTED, Len(2, 2), Expect("a position x,y in pixels")] | None = None
    """Position x,y in pixels of the pictures, from the upper left corner: the query is the patch at this position, and
    the neighbours are the most similar patches, for a store of patches (features.pooling=patches)."""
    sheet: Name | None = None
    """File for the contact sheet (PNG)."""
    output: Name | None = None
    """File for the neighbours (JSON)."""

    def check_consistency(self) -> None:
        """Check the store, the windows and the files to write."""
        super().check_consistency()
        if self.patch is not None and (self.action != QUERY or not isinstance(self.index, Flat | None)):
            raise OptionError("patch", [*self.patch], f"requires action={QUERY} and exact search (index=flat)")
        searched = None if isinstance(self.index, Flat) else self.index
        for name, value in (("sheet", self.sheet), ("output", self.output), ("index", searched)):
            if value is not None and self.action != QUERY:
                raise OptionError(name, value, f"requires action={QUERY}")
        _check_files(self.sheet, self.output, begins=["["])
        if self.action != INDEX and not Path(self.store).is_dir():
            raise OptionError("store", self.store, f"no such folder; action={INDEX} creates a store")
        if self.action == REMOVE and not (self.images and all(self.images)):  # "" would be the current folder
            raise OptionError("images", "", "must be the pictures to remove, or folders of them, after the options")


class Embed(Pictures):
    """Write the features of pictures to one file."""

    data: Part[DataSet | None] = None
    """A data set whose images are added to the pictures: its name, or the path of a folder."""
    output: Name
    """The file: .npz of numpy, or .parquet with one row for each picture, or for each patch with
    features.pooling=patches."""
    split: Literal["all", "train", "validation", "test", "held_out"] = "all"
    """Split of a data set; all: every split; held_out: test images if there are any, else validation images."""
    anomaly: Name | None = None
    """The folder of a reference store of `ssvit retrieve action=index`: adds the cosine distance of each picture or
    patch to its nearest neighbour in the store, whose layer and pooling are the defaults."""
    sheet: Name | None = None
    """File for the pictures with the highest anomaly scores (PNG), for a store of patches with heat maps."""
    thumbnail: Count | None = None
    """Pixels of the longer side of the pictures or patches that a .parquet file contains as JPEG; null: none."""
    overwrite: bool = False
    """Whether an existing file may be replaced."""

    def check_consistency(self) -> None:
        """Check the windows and the file to write."""
        super().check_consistency()
        file = Path(self.output)
        if file.suffix not in (NPZ, PARQUET):
            raise OptionError("output", self.output, f"must end in {NPZ} or {PARQUET}")
        if file.suffix == PARQUET and find_spec("pyarrow") is None:
            raise OptionError("output", self.output, "requires pyarrow: pip install pyarrow")
        if self.thumbnail is not None and file.suffix != PARQUET:
            raise OptionError("thumbnail", self.thumbnail, f"requires an output {PARQUET}")
        if self.anomaly is not None and not Path(self.anomaly).is_dir():
            raise OptionError(
                "anomaly", self.anomaly, f"no such folder; `ssvit retrieve action={INDEX}` creates a store"
            )
        if self.split != ALL and self.data is None:
            raise OptionError("split", self.split, "requires a data set (data=…)")
        if self.sheet is not None and self.anomaly is None:
            raise OptionError("sheet", self.sheet, "requires a reference store (anomaly=STORE)")
        _check_files(self.sheet, self.output)
        if file.exists() and not self.overwrite:
            raise OptionError("output", self.output, "exists already; overwrite=true replaces it")


def _check_files(sheet: str | None, output: str | None, begins: Sequence[str] = ("",)) -> None:
    """Check that the files for the contact sheet and for the results are two files that can be written or replaced."""
    for name, file, starts in (("sheet", sheet, ["\ufffdPNG"]), ("output", output, begins)):
        if file is not None:
            file_to_write(name, file, starts)
    if sheet is not None and output is not None and os.path.realpath(sheet) == os.path.realpath(output):
        raise OptionError("sheet", sheet, "must be another file than output")


@contextmanager
def reading(part: Path) -> Iterator[None]:
    """Raise StoreError if a part of a store cannot be read in the block, or is none."""
    try:
        yield
    except OSError as error:
        raise StoreError(f"{part}: cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError, RecursionError, safetensors.SafetensorError):
        raise StoreError(f"{part}: is damaged, or not a part of a store") from None


def metadata(part: Path) -> dict[str, Any]:
    """Return the metadata of a part of a store; call it within `reading`."""
    check_regular(part)
    with safetensors.safe_open(part, "np") as file:
        return {name: json.loads(text) for name, text in (file.metadata() or {}).items()}


def encoder_of(store: str | Path, value: str = "encoder") -> str:
    """Return the identity of a store's features, or "" if there is no store.

    Args:
        store: Folder of the store.
        value: encoder, or checkpoint for the path of the checkpoint, "" if it is unknown.

    Raises:
        StoreError: The last part is damaged or cannot be read.
    """
    if (part := max(Path(store).glob(PART_FILES), default=None)) is None:
        return ""
    with reading(part):
        return str(metadata(part).get(value) or "")


def pictures(images: Sequence[object]) -> dict[str, str | None]:
    """List files and folders as {absolute path: class}, each picture once, also if links lead to it.

    The class is the name of the subfolder if a folder has one for each class, else None. A picture with several paths
    or classes has the first.

    Raises:
        OptionError: No path was passed, or a path does not exist or holds no picture.
    """
    if not images:
        raise OptionError("images", "", "must be pictures or folders after the options, or a data set (data=…)")
    found = [(os.path.abspath(path), name) for image in images for path, name in folder.pictures(str(image))]
    first: dict[str, str] = {}  # path of each file
    classes: dict[str, str | None] = {}
    for (path, name), file in zip(found, without_links(path for path, _ in found), strict=True):
        path = first.setdefault(file, path)
        classes[path] = classes.get(path) or name
    return classes


def without_links(paths: Iterable[str]) -> list[str]:
    """Return the path without links of each file. A path that is not absolute names no file, and is unchanged."""
    folder_without_links = cache(os.path.realpath)

    @cache
    def file(path: str) -> str:
        if not os.path.isabs(path):
            return path
        path = os.path.join(folder_without_links(os.path.dirname(path)), os.path.basename(path))
        return os.path.realpath(path) if os.path.islink(path) else path

    return [*map(file, paths)]
