"""Define the options of the data sets, validated as far as names and file sizes allow, and of writing shards."""

import io
import os
import tarfile
from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from importlib.util import find_spec
from itertools import islice
from typing import IO, Annotated, ClassVar, Literal

from annotated_types import Ge, Le

from ssvit.config.declaration import Count, Expect, Name, Options, Part, Positive, among
from ssvit.data.sources import folder, shard_folder, vtab
from ssvit.data.sources import table as tables
from ssvit.data.sources.base_options import DataSet, ImageFiles, Sample
from ssvit.data.sources.decode_options import Classes, MaskFormat
from ssvit.data.sources.folder import IMAGE_SUFFIXES, NPY
from ssvit.data.sources.splits import AUTO, Splits, resolve
from ssvit.errors import OptionError, UserError, folder_to_write


class Folder(MaskFormat, ImageFiles):
    """A folder of images, flat or with a subfolder for each class, or a folder with one such subfolder per split."""

    root: Name
    """The folder."""
    masks: Name | None = None
    """For segmentation, a folder with the mask masks/a/b.png of each image root/a/b.jpg."""

    @property
    def masked(self) -> bool:
        """Return whether images have masks."""
        return self.masks is not None

    def check_consistency(self) -> None:
        """Check the folders."""
        super().check_consistency()
        folder.check(self.root)
        _ = self.splits
        if self.masks is not None and not os.path.isdir(self.masks):
            raise OptionError("masks", self.masks, "no such folder; null for none")

    @cached_property
    def splits(self) -> Splits:
        """Return the subfolders by split."""
        return folder.splits(self.root, self.names)

    def count(self, at_most: int) -> int:
        """Return the number of training images, counting up to `at_most`."""
        return folder.count(self.splits.train[0], at_most)

    def sample(self, most: int) -> Sample:
        """Return up to about `most` training images, evenly spaced."""
        return Sample.of_paths(folder.paths(self.splits.train[:1]), most)


class Csv(MaskFormat, ImageFiles):
    """Image files that a table lists; see `ssvit.data.sources.table`."""

    table: Name
    """The CSV file, or a TSV file (.tsv), whose first line names the columns."""
    root: Name | None = None
    """The folder of relative paths; None: the folder of the table."""
    path: Name = "path"
    """The name of the column of paths."""
    label: Name | None = AUTO
    """The name of the column of labels; auto: label, if it exists; None: none."""
    separator: Name | None = None
    """The separator of the classes of an image in its cell, as | in cat|dog; None: each image has one class."""
    split: Name | None = AUTO
    """The name of the column of splits; auto: split, if it exists; None: none."""
    mask: Name | None = AUTO
    """The name of the column of paths of masks, for segmentation; auto: mask, if it exists; None: none."""

    @property
    def masked(self) -> bool:
        """Return whether images have masks."""
        return self.columns.mask is not None

    def check_consistency(self) -> None:
        """Check that the table is readable, and that the image in its first row exists."""
        super().check_consistency()
        if self.root is not None and not os.path.isdir(self.root):
            raise OptionError("root", self.root, "no such folder; null for the folder of the table")
        first = next(self.rows(self.splits.train))
        if not os.path.isfile(os.path.join(self.root_folder, first.path)):
            expected = f"{self.root_folder} has no file {first.path}, which line {first.line} of {self.table} names"
            raise OptionError("root", self.root, expected)
        rows = tables.rows(self.table, self.columns) if self.separator is not None else ()
        if rows and all(len(row.label or ()) < 2 for row in rows):
            expected = f"occurs in no cell of the column {self.columns.label}; null for one class each"
            raise OptionError("separator", self.separator, expected)

    @property
    def root_folder(self) -> str:
        """Return the folder that the paths are relative to."""
        return os.path.dirname(self.table) or os.curdir if self.root is None else self.root

    @cached_property
    def columns(self) -> tables.Columns:
        """Return the resolved names of the columns."""
        options = tables.Columns(self.path, self.label, self.split, self.mask, self.separator)
        return tables.columns(self.table, options)

    @cached_property
    def splits(self) -> Splits:
        """Return the values of the column of splits, by split."""
        return tables.splits(self.table, self.columns, self.names)

    def rows(self, splits: Sequence[str] | None = None) -> Iterator[tables.Row]:
        """Return the rows of some splits; None for all rows."""
        return (row for row in tables.rows(self.table, self.columns) if splits is None or row.split in splits)

    @property
    def labelled(self) -> bool:
        """Return whether the table has a column of labels."""
        return self.columns.label is not None

    @property
    def multi_label(self) -> bool:
        """Return whether an image may have several classes."""
        return self.columns.separator is not None

    def count(self, at_most: int) -> int:
        """Return the number of training images, counting up to `at_most`."""
        return sum(1 for _ in islice(self.rows(self.splits.train), at_most))

    def sample(self, most: int) -> Sample:
        """Return up to about `most` training images, evenly spaced."""
        paths = [os.path.join(self.root_folder, row.path) for row in self.rows(self.splits.train)]
        return Sample.of_paths(paths, most)


class Voc(MaskFormat, ImageFiles):
    """Pascal VOC's segmentation masks: JPEGImages/, SegmentationClass/, and lists in ImageSets/Segmentation/."""

    masked: ClassVar[bool] = True

    root: Name
    """The folder of a year, such as VOCdevkit/VOC2012."""
    mask_classes: Annotated[Classes, Expect("a list of names, {name: value or [r, g, b]}, or a number")] = (
        "background", "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow",
        "diningtable", "dog", "horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor",
    )  # fmt: skip
    """Classes of the masks, as in data=folder."""

    def check_consistency(self) -> None:
        """Check that there are lists of images."""
        super().check_consistency()
        _ = self.splits

    @cached_property
    def splits(self) -> Splits:
        """Return the names of the lists by split."""

        def find(name: str) -> tuple[str, ...]:
            return (name,) if os.path.isfile(self.list_of(name)) else ()

        return resolve(self.names, find, lambda held_out: (), expected=f"a list {self.list_of('NAME')}")

    def list_of(self, split: str) -> str:
        """Return the path of the list of the images of a split."""
        return os.path.join(self.root, "ImageSets", "Segmentation", f"{split}.txt")


class Shards(ImageFiles):
    """Uncompressed tar files in the layout of WebDataset, in a folder.

    A split is a subfolder or a pattern such as imagenet-train-*; auto also matches a known name within shard names.
    """

    root: Name
    """The folder."""

    def check_consistency(self) -> None:
        """Check that there are shards."""
        super().check_consistency()
        _ = self.splits

    @cached_property
    def splits(self) -> Splits:
        """Return the paths of the shards below the root, by split."""
        return shard_folder.splits(self.root, self.names)

    def sample(self, most: int) -> Sample:
        """Return images of the first shard; the number of all images is estimated from the sizes of the shards."""
        first, *_ = paths = [os.path.join(self.root, name) for name in self.splits.train]
        try:
            with tarfile.open(first, "r:") as shard:
                members = [member for member in shard if member.isreg()]
        except (OSError, tarfile.TarError) as error:
            raise UserError(f"{first}: cannot be read: {error}") from None
        for suffixes in (IMAGE_SUFFIXES, NPY):
            if images := [member for member in members if member.name.lower().endswith(suffixes)]:
                break
        count = round(len(images) * sum(map(os.path.getsize, paths)) / os.path.getsize(first))
        return Sample(count, first, [partial(_member, first, member) for member in images[:most]])


def _member(shard: str, member: tarfile.TarInfo) -> IO[bytes]:
    with open(shard, "rb") as file:
        file.seek(member.offset_data)
        return io.BytesIO(file.read(member.size))


class Vtab(DataSet):
    """A task of VTAB-1k (Zhai et al. 2019) as lists of image files; see `ssvit.data.sources.vtab`."""

    image_channels: ClassVar[int] = 3
    labelled: ClassVar[bool] = True

    root: Name
    """The folder of all tasks."""
    task: Annotated[str, *among(vtab.NAMES)]
    """The folder of the task, such as cifar or dsprites_loc."""
    all_images: bool = False
    """Whether to train on all 1,000 images, as for the reported figure, without validation images."""

    def check_consistency(self) -> None:
        """Check that the lists exist."""
        for path in filter(None, self.lists):
            if not os.path.exists(os.path.join(self.root, self.task, path)):
                raise OptionError("root", self.root, f"contains no {self.task}/{path}")

    @property
    def lists(self) -> tuple[str, str | None, str]:
        """Return the lists of training, validation and test images; None for no validation images."""
        return (vtab.ALL, None, vtab.TEST) if self.all_images else (vtab.TRAIN, vtab.VALIDATION, vtab.TEST)

    @property
    def validated(self) -> bool:
        """Return whether there are validation images."""
        return not self.all_images


class TorchvisionSet(DataSet):
    """A public data set read by torchvision."""

    image_channels: ClassVar[int] = 3
    validated: ClassVar[bool] = False

    name: Literal["cifar10", "cifar100", "stl10", "flowers102", "oxford_pets"]
    """The name of the data set."""
    root: Name
    """The folder of the data set."""
    download: bool = False
    """Whether to download the data set into that folder."""
    split: Name | None = None
    """unlabeled: STL-10's unlabelled images; None: all labelled images other than the test images."""

    def check_consistency(self) -> None:
        """Check the split and the folder."""
        if self.split is not None and (self.name, self.split) != ("stl10", "unlabeled"):
            raise OptionError("split", self.split, "must be null, or unlabeled for data.name=stl10")
        if not self.download and not os.path.isdir(self.root):
            expected = f"must be an existing folder that contains {self.name}; data.download=true downloads it"
            raise OptionError("root", self.root, expected)

    @property
    def labelled(self) -> bool:
        """Return whether the training images have labels."""
        return self.split is None


class HuggingFace(ImageFiles):
    """A data set of the library `datasets`, with its splits; train=auto also selects the only remaining one."""

    root: Name
    """A folder that save_to_disk wrote, a folder of Parquet files, or the name of a data set in the cache."""
    config: Name | None = None
    """The configuration, if the data set has several."""
    image: Name = AUTO
    """The name of the column of images; auto: the only one."""
    label: Name | None = AUTO
    """The name of the column of labels; auto: label, or the only column of classes; None: none. A column of lists must
    be named; an image then has several classes, or none."""
    download: bool = False
    """Whether to fetch a data set that is not in the cache from the Hugging Face Hub."""

    validated: ClassVar[bool | None] = None  # unknown before the data set is read

    def check_consistency(self) -> None:
        """Check the name of the data set and the library that reads it."""
        super().check_consistency()
        if not self.root:
            raise OptionError("root", self.root, "must name a folder, or a data set in the cache")
        if find_spec("datasets") is None:
            raise OptionError("root", self.root, "requires datasets: pip install datasets")
        if self.is_saved and self.config is not None:
            raise OptionError("config", self.config, "must be null: save_to_disk wrote one configuration")

    @property
    def is_saved(self) -> bool:
        """Return whether save_to_disk wrote the folder."""
        return any(os.path.isfile(os.path.join(self.root, name)) for name in ("state.json", "dataset_dict.json"))


class Pack(Options):
    """Write a data set as shards."""

    output: Name
    """Folder of the shards, with a subfolder for each split: train, val, test."""
    data: Part[DataSet | None] = None
    """The images: a data set, or the path of a folder."""
    size: Count | None = None
    """Shorter side in pixels to which larger images are resized, stored as JPEG; null: files are copied unchanged."""
    quality: Annotated[int, Ge(1), Le(100)] = 95
    """JPEG quality of resized images."""
    shard_size: Positive = 512
    """Size of a shard in megabytes."""
    workers: Count = 4
    """Number of threads that read and resize images."""
    overwrite: bool = False
    """Whether existing shards may be deleted."""

    def check_consistency(self) -> None:
        """Check the folder to write."""
        if not os.path.isdir(os.path.dirname(os.path.abspath(self.output))):
            raise OptionError("output", self.output, "must be in a folder that exists")
        folder_to_write("output", self.output)
