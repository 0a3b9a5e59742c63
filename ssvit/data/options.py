"""The options of the data sets, which are checked as far as names and numbers tell. No torch."""

import os
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from importlib.util import find_spec
from itertools import combinations, islice
from typing import Annotated, Any, ClassVar, Literal, Self

from annotated_types import Ge, Gt, Le, Len
from pydantic import model_validator

from ssvit.config.declaration import Count, Expect, Fraction, Name, OneOf, Options, Pair, Positive, Whole
from ssvit.data import chunk_folder, folder, saved_set, shard_folder, vtab
from ssvit.data import table as tables
from ssvit.options import OptionError, file_to_write, folder_to_write, number, whole

VALIDATION = "validation"
NO_LABELS = "the images have no labels to learn: give each class a folder of its own, or another data set (data=…)"
NO_VALIDATION = "there are no validation images; 0.1 for that fraction of the training images"
Verify = Literal["size", "content"]
MOST_CHANNELS = 16
MEASURED = "# Measured by ssvit normalization."  # how the file of that command begins
FULL, SCALED = DECODINGS = "full", "scaled"  # how much of a JPEG is decoded
PERMUTATION, BIJECTION = ORDERS = "permutation", "bijection"  # how the order of an epoch is made


HeldOutPart = Annotated[float, Gt(0), Le(0.9)]


def check_shares(*, batch_size: int, accumulate: int, processes: int) -> None:
    """OptionError if so many processes cannot share a batch evenly."""
    if batch_size % (processes * accumulate):
        right = f"must be divisible by processes * accumulate = {processes} * {accumulate}"
        fewer = [count for count in range(1, processes) if batch_size % (count * accumulate) == 0]
        hint = f"; {fewer[-1]} of these processes can share it" if fewer else ""
        raise OptionError("batch_size", batch_size, right + hint)


def bands(name: str, value: object, channels: int) -> None:
    """OptionError unless these are the places of three channels, of which pictures show them where there are more."""
    if not isinstance(value, list | tuple) or len(value) != 3:
        raise OptionError(name, value, "must be three channels, [red, green, blue], 0 for the first")
    for place in value:
        whole(name, place, at_least=0)
        if place >= max(channels, 3):
            raise OptionError(name, value, f"must be three of the {channels} channels, from 0 to {channels - 1}")


class DataSet(Options):
    """A data set, and what is known of it before its images are read; None for what is not."""

    @property
    def image_channels(self) -> int | None:
        """Channels of the images."""
        return None

    @property
    def labelled(self) -> bool | None:
        """Whether the images to train on have labels."""
        return None

    @property
    def multi_label(self) -> bool | None:
        """Whether an image may have several classes."""
        return None

    @property
    def validated(self) -> bool | None:
        """Whether there are validation images."""
        return None

    def count(self, at_most: int) -> int | None:
        """How many images there are to train on, as far as `at_most`."""
        return None


class Synthetic(DataSet):
    """The embedded set."""

    image_channels: ClassVar[int] = 3
    labelled: ClassVar[bool] = True
    validated: ClassVar[bool] = False

    size: Pair = (32, 32)
    """Pixels of an image's side, or [height, width]; kept as the pair."""
    images: Count = 8192
    """Images to train on."""
    held_out_images: Count = 2048
    """Images to measure on."""
    seed: Whole = 0
    """Seed of all scenes."""
    version: Literal[1, 2] = 1
    """1: small shapes at any angle; 2: large ones, nearly upright."""

    def count(self, at_most: int) -> int:
        return min(self.images, at_most)


class HeldOut(DataSet):
    """A data set that may have training images alone, some of which are then kept to measure on."""

    held_out: HeldOutPart = 0.1
    """Part of the images that is kept from training to test on, where there are neither validation nor test images."""
    seed: Whole = 0
    """Seed of which images are held out: the same for every run."""


class PixelFormat(Options):
    """What a run takes of image files."""

    channels: Annotated[int, Ge(1), Le(MOST_CHANNELS)] = 3
    """Channels of every image. Without a range, 3 converts images to RGB of 8 bits, and 1 those with colours to their
    luminance."""
    range: Annotated[Sequence[Any], Expect("[least, most], the values that become 0 and 1")] | None = None
    """[least, most]: the values that become 0 and 1, one number or one for each channel; others are cut off. None:
    images of bytes, which stay bytes."""

    @model_validator(mode="after")
    def _check_range(self) -> Self:
        if self.range is None:
            return self
        if len(self.range) != 2:
            raise OptionError("range", self.range, "must be [least, most], the values that become 0 and 1, or null")
        ends = [list(end) if isinstance(end, list | tuple) else [end] for end in self.range]
        for end in ends:
            if len(end) not in (1, self.channels):
                right = f"must have one number, or one for each of the {self.channels} channels, for least and for most"
                raise OptionError("range", self.range, right)
            for value in end:
                number("range", value, float("-inf"))
        least, most = (end * (self.channels // len(end)) for end in ends)
        if any(low >= high for low, high in zip(least, most, strict=True)):
            raise OptionError("range", self.range, "must be [least, most], and a least value is not below the most")
        object.__setattr__(self, "range", (tuple(least), tuple(most)))
        return self

    @property
    def bytes_per_pixel(self) -> int:
        """Of an image as it is read."""
        return self.channels * (1 if self.range is None else 4)


RGB, GREY = PixelFormat(), PixelFormat(channels=1)


class ImageFiles(HeldOut, PixelFormat):
    """A data set of image files of any kind."""

    @property
    def image_channels(self) -> int:
        return self.channels

    @property
    def pixels(self) -> PixelFormat:
        """What is taken of them."""
        return PixelFormat(channels=self.channels, range=self.range)


class Folder(ImageFiles):
    """A folder of images, flat or with a subfolder for each class, or subfolders of those: see `folder.splits`."""

    root: Name | Sequence[Name]
    """The folder, or several, whose classes of one name are one."""
    train: Name | None = folder.AUTO
    """The subfolder to train on; auto: train/ where there is one; None: the whole folder."""
    validation: Name | None = folder.AUTO
    """The subfolder for choices and curves; auto: val/, validation/ or valid/; None: none."""
    test: Name | None = folder.AUTO
    """The subfolder for the reported figure; auto: test/; None: none."""
    verify: Verify = "size"
    """What a run is bound to: its images' names and sizes (size), or their bytes too, read at each start (content)."""
    masks: Name | None = None
    """For segmentation, a folder that holds for each image root/a/b.jpg its mask, masks/a/b.png."""

    @model_validator(mode="after")
    def _check_folders(self) -> Self:
        if not self.roots:
            raise OptionError("root", self.root, "must name a folder of images")
        for root in self.roots:
            folder.check(root)
        for one, other in combinations(map(os.path.realpath, self.roots), 2):
            if os.path.commonpath([one, other]) in (one, other):
                raise OptionError("root", self.root, f"{one} and {other} share images")
        _ = self.splits
        if self.masks is not None and not os.path.isdir(str(self.masks)):
            raise OptionError("masks", self.masks, "no such folder; null for none")
        if self.masks is not None and len(self.roots) > 1:
            raise OptionError("masks", self.masks, "must be null with several folders in data.root")
        return self

    @property
    def roots(self) -> tuple[str, ...]:
        """The folders."""
        return tuple(self.root) if isinstance(self.root, list | tuple) else (self.root,)  # type: ignore[return-value]

    @cached_property
    def splits(self) -> list[folder.Splits]:
        """The subfolders of each folder by what their images are for."""
        names = {"train": self.train, "validation": self.validation, "test": self.test}
        return [folder.splits(root, **names) for root in self.roots]

    @property
    def validated(self) -> bool:
        return any(split.validation for split in self.splits)

    def count(self, at_most: int) -> int:
        return min(at_most, sum(folder.count(split.train, at_most=at_most) for split in self.splits))


class Csv(ImageFiles):
    """Image files that a table names: see `ssvit.data.table`."""

    table: Name
    """The CSV file."""
    root: Name | None = None
    """The folder that paths begin at; None: that of the table."""
    path: Name = "path"
    """The name of the column of paths."""
    label: Name | Sequence[Name] | None = folder.AUTO
    """The name of the column of labels; auto: label where there is one; None: none. A list: of columns of 0 and 1, one
    for each class, of which an image may have several or none."""
    separator: Name | None = None
    """What stands between the classes of an image in its cell, as | in cat|dog; None: each image has one class."""
    split: Name | None = folder.AUTO
    """The name of the column of splits; auto: split where there is one; None: none."""
    train: Name | None = folder.AUTO
    """The split to train on; auto: train; None: all but those of validation and test."""
    validation: Name | None = folder.AUTO
    """The split for choices and curves; auto: val, validation or valid; None: none."""
    test: Name | None = folder.AUTO
    """The split for the reported figure; auto: test; None: none."""
    verify: Verify = "size"
    """What a run is bound to: its images' names, labels and sizes (size), or their bytes too (content)."""

    @model_validator(mode="after")
    def _check_table(self) -> Self:
        _ = self.splits
        if self.root is not None and not os.path.isdir(str(self.root)):
            raise OptionError("root", self.root, "no such folder; null for that of the table")
        first = next(self.rows("train"))
        if not os.path.isfile(os.path.join(self.top, first.path)):
            right = f"{self.top} has no file {first.path}, which line {first.line} of {self.table} names"
            raise OptionError("root", self.root, right)
        rows = tables.rows(self.table, self.columns) if self.separator is not None else ()
        if rows and all(len(row.label or ()) < 2 for row in rows):
            right = f"stands in no cell of the column {self.columns.label}; null for one class each"
            raise OptionError("separator", self.separator, right)
        return self

    @property
    def top(self) -> str:
        """The folder that paths begin at."""
        return os.path.dirname(self.table) or os.curdir if self.root is None else self.root

    @cached_property
    def columns(self) -> tables.Columns:
        """The names of the columns."""
        label = tuple(self.label) if isinstance(self.label, list | tuple) else self.label
        given = tables.Columns(self.path, label, self.split, self.separator)  # type: ignore[arg-type]  # no other sequence
        return tables.columns(self.table, given)

    @cached_property
    def splits(self) -> tables.Splits:
        """The splits by what their images are for."""
        names = {"train": self.train, "validation": self.validation, "test": self.test}
        return tables.splits(self.table, self.columns, **names)

    def rows(self, part: str | None) -> Iterator[tables.Row]:
        """The rows of a part: train, validation or test; None: those of none."""
        return (row for row in tables.rows(self.table, self.columns) if self.splits.part(row) == part)

    @property
    def labelled(self) -> bool:
        return self.columns.label is not None

    @property
    def multi_label(self) -> bool:
        return self.columns.is_multi_label and self.labelled

    @property
    def validated(self) -> bool:
        return self.splits.validation is not None

    def count(self, at_most: int) -> int:
        return sum(1 for _ in islice(self.rows("train"), at_most))


class HuggingFace(ImageFiles):
    """A data set of the library `datasets`: see `ssvit.data.saved_set`."""

    root: Name
    """A folder that save_to_disk wrote, or one with files of Parquet, or the name of a set in the cache."""
    config: Name | None = None
    """The configuration of a set that has several."""
    image: Name = folder.AUTO
    """The name of the column of images; auto: the only one."""
    label: Name | None = folder.AUTO
    """The name of the column of labels; auto: label, or the only column of classes; None: none. A column of lists must
    be named: images have several classes, or none."""
    train: Name = folder.AUTO
    """The split to train on; auto: train, or the only other one."""
    validation: Name | None = folder.AUTO
    """The split for choices and curves; auto: val, validation or valid; None: none."""
    test: Name | None = folder.AUTO
    """The split for the reported figure; auto: test; None: none."""
    verify: Verify = "size"
    """What a run is bound to: its images' labels and sizes (size), or their bytes too (content)."""
    download: bool = False
    """Whether a set that is not in the cache is fetched from the Hugging Face Hub."""

    @model_validator(mode="after")
    def _check_set(self) -> Self:
        if not self.root:
            raise OptionError("root", self.root, "must name a folder, or a data set in the cache")
        if find_spec("datasets") is None:
            raise OptionError("root", self.root, "needs datasets: pip install 'ssvit[huggingface]'")
        if not (self.download or os.path.isdir(self.root) or saved_set.is_cached(self.root)):
            right = "no such folder, nor a data set in the cache; data.download=true fetches one from the Hub"
            raise OptionError("root", self.root, right)
        if self.described is not None:
            if self.config is not None:
                raise OptionError("config", self.config, "must be null: save_to_disk wrote one configuration")
            self.columns_of(self.described[self.splits_of(self.described).train])
        return self

    @cached_property
    def described(self) -> dict[str, saved_set.Features] | None:
        """The splits of a folder and their columns; None if save_to_disk did not write it."""
        return saved_set.described(self.root)

    def splits_of(self, there: Iterable[str]) -> saved_set.Splits:
        """The splits, of those that are there, by what their images are for."""
        names = {"validation": self.validation, "test": self.test}
        return saved_set.splits(self.root, there, train=self.train, **names)

    def columns_of(self, features: saved_set.Features) -> tuple[str, str | None]:
        """The names of the columns of images and of labels, of those that are there."""
        return saved_set.columns(self.root, features, image=self.image, label=self.label)

    @property
    def labelled(self) -> bool | None:
        if self.described is None:
            return None
        label = self.columns_of(self.described[self.splits_of(self.described).train])[1]
        return None if label is not None else False  # a row of the column may have none

    @property
    def multi_label(self) -> bool | None:
        if self.described is None:
            return None
        features = self.described[self.splits_of(self.described).train]
        label = self.columns_of(features)[1]
        return label is not None and saved_set.element(features[label]) is not None

    @property
    def validated(self) -> bool | None:
        return None if self.described is None else self.splits_of(self.described).validation is not None


class Shards(ImageFiles):
    """Uncompressed tar files in the layout of WebDataset, in a folder or an object store: see `shard_folder.splits`."""

    root: Name
    """The folder, or an address, as s3://BUCKET/FOLDER."""
    train: Name | None = folder.AUTO
    """The shards to train on, a subfolder or a pattern; auto: those of train/, or with train in their names, or all."""
    validation: Name | None = folder.AUTO
    """The shards for choices and curves; auto: of val/, or with val in their names; None: none."""
    test: Name | None = folder.AUTO
    """The shards for the reported figure; auto: of test/, or with test in their names; None: none."""
    cache: Name | None = None
    """The folder for copies of what an address has; None: the user's folder for caches."""

    @model_validator(mode="after")
    def _check_shards(self) -> Self:
        if not self.root:
            raise OptionError("root", self.root, "must name a folder of shards, or an address")
        _ = self.splits
        if self.cache is not None and os.path.isfile(str(self.cache)):
            raise OptionError("cache", self.cache, "must be a folder, and this is a file")
        return self

    @cached_property
    def splits(self) -> shard_folder.Splits:
        """The shards by what their images are for."""
        return shard_folder.splits(self.root, train=self.train, validation=self.validation, test=self.test)

    @property
    def validated(self) -> bool:
        return bool(self.splits.validation)


class LitData(ImageFiles):
    """Chunks that LitData wrote: see `ssvit.data.chunk_folder`."""

    root: Name
    """The folder of index.json and the chunks, or of such a folder for each split."""
    image: Name = folder.AUTO
    """The key of the images in an item; auto: the only one."""
    label: Name | None = folder.AUTO
    """The key of the labels; auto: label, class or target, or in a tuple the only whole number or text; None: none."""
    train: Name = folder.AUTO
    """The subfolder to train on; auto: train where there is one, else the folder itself."""
    validation: Name | None = folder.AUTO
    """The subfolder for choices and curves; auto: val, validation or valid; None: none."""
    test: Name | None = folder.AUTO
    """The subfolder for the reported figure; auto: test; None: none."""

    @model_validator(mode="after")
    def _check_chunks(self) -> Self:
        _ = self.described
        return self

    @cached_property
    def splits(self) -> chunk_folder.Splits:
        """The folders of chunks by what their images are for."""
        return chunk_folder.splits(self.root, train=self.train, validation=self.validation, test=self.test)

    @cached_property
    def described(self) -> dict[str, chunk_folder.Described]:
        """What each of the folders holds."""
        names = {"image": self.image, "label": self.label}
        return {path: chunk_folder.described(path, **names) for path in self.splits if path is not None}

    @property
    def labelled(self) -> bool:
        return self.described[self.splits.train].label is not None

    @property
    def multi_label(self) -> bool:
        return False

    @property
    def validated(self) -> bool:
        return self.splits.validation is not None

    def count(self, at_most: int) -> int:
        return min(at_most, sum(chunk.items for chunk in self.described[self.splits.train].chunks))


class Imagenet(DataSet):
    """ImageNet in its usual layout: train/ and val/, in each a folder for every class, named by its wnid."""

    image_channels: ClassVar[int] = 3
    labelled: ClassVar[bool] = True
    validated: ClassVar[bool] = True

    root: Name
    """The folder that holds train/ and val/."""
    verify: Verify = "size"
    """What a run is bound to: its images' names and sizes (size), or their bytes too (content)."""

    @model_validator(mode="after")
    def _check_folders(self) -> Self:
        folder.check(self.root)
        for name in ("train", "val"):
            if not os.path.isdir(os.path.join(self.root, name)):
                right = f"holds no folder {name}: ImageNet's usual layout is train/ and val/"
                raise OptionError("root", self.root, right)
        return self


class Vtab(DataSet):
    """A task of VTAB-1k (Zhai et al. 2019) as lists of image files: see `ssvit.data.vtab`."""

    image_channels: ClassVar[int] = 3
    labelled: ClassVar[bool] = True

    root: Name
    """The folder that holds a folder for each task."""
    task: Annotated[str, OneOf(vtab.NAMES)]
    """The task's folder, as cifar or dsprites_loc."""
    all_images: bool = False
    """Whether all 1,000 images are trained on, as for the reported figure, with none left for choices."""
    verify: Verify = "size"
    """What a run is bound to: its images' names, labels and sizes (size), or their bytes too (content)."""

    @model_validator(mode="after")
    def _check_lists(self) -> Self:
        if not os.path.isdir(self.top):
            raise OptionError("root", self.root, f"holds no folder {self.task}")
        for name in self.lists:
            if name and not os.path.isfile(os.path.join(self.top, name)):
                raise OptionError("root", self.root, f"{self.task} has no list {name}, of lines `path label`")
        return self

    @property
    def top(self) -> str:
        """The folder of the task, where its lists lie, and to which their paths are relative."""
        return os.path.join(self.root, self.task)

    @property
    def lists(self) -> tuple[str, str | None, str]:
        """The lists of the images to train on, to choose by, and of the reported figure."""
        return (vtab.ALL, None, vtab.TEST) if self.all_images else (vtab.TRAIN, vtab.VALIDATION, vtab.TEST)

    @property
    def validated(self) -> bool:
        return not self.all_images


class Voc(DataSet):
    """Pascal VOC's images with a mask for segmentation, in its usual layout."""

    image_channels: ClassVar[int] = 3
    labelled: ClassVar[bool] = False
    validated: ClassVar[bool] = True

    root: Name
    """The folder that holds JPEGImages/, SegmentationClass/ and ImageSets/Segmentation/, as VOCdevkit/VOC2012."""
    verify: Verify = "size"
    """What a run is bound to: its images' names and sizes (size), or their bytes too (content)."""

    @model_validator(mode="after")
    def _check_folders(self) -> Self:
        if not os.path.isdir(self.root):
            raise OptionError("root", self.root, "no such folder")
        for part in ("train", "val"):
            if not os.path.isfile(self.names(part)):
                raise OptionError("root", self.root, f"holds no ImageSets/Segmentation/{part}.txt")
        return self

    def names(self, part: str) -> str:
        """The file that names the images of a part, train or val."""
        return os.path.join(self.root, "ImageSets", "Segmentation", f"{part}.txt")


class TorchvisionSet(DataSet):
    """A public data set as torchvision reads it."""

    image_channels: ClassVar[int] = 3
    validated: ClassVar[bool] = False

    name: Literal["cifar10", "cifar100", "stl10", "flowers102", "oxford_pets"]
    """The name of the data set."""
    root: Name
    """The folder that holds it."""
    download: bool = False
    """Whether to fetch it into that folder."""
    split: Name | None = None
    """unlabeled: STL-10's unlabelled images; None: all labelled ones that are not the set's test images."""

    @model_validator(mode="after")
    def _check_set(self) -> Self:
        if self.split is not None and (self.name, self.split) != ("stl10", "unlabeled"):
            raise OptionError("split", self.split, "must be left out, or unlabeled for stl10")
        if not self.download and not os.path.isdir(str(self.root)):
            right = f"no such folder; give the one that holds {self.name}, or data.download=true"
            raise OptionError("root", self.root, right)
        return self

    @property
    def labelled(self) -> bool:
        return self.split is None


class Pack(Options):
    """Shards made of a data set."""

    output: Name
    """The folder; each split gets a subfolder of it."""
    size: Count | None
    """Pixels of the shorter side to which larger images are made smaller; None: files as they are."""
    quality: Annotated[int, Ge(1), Le(100)]
    """Of the JPEGs that are written then, up to 100."""
    shard_size: Positive
    """Megabytes after which the next shard begins."""
    workers: Count
    """Threads that read and resize."""
    verify: bool
    """Whether to compare the checksums of what is there, instead of writing."""
    overwrite: bool
    """Whether shards that are there may be thrown away."""

    @model_validator(mode="after")
    def _check_output(self) -> Self:
        output = self.output
        if self.verify:
            if not os.path.isdir(output):
                raise OptionError("output", self.output, "no such folder")
            return self
        if not os.path.isdir(os.path.dirname(os.path.abspath(output))):
            raise OptionError("output", self.output, "there is no such folder to write it into")
        folder_to_write("output", output)
        return self


class Normalization(Options):
    """What is measured of a data set's channels."""

    output: Name | None
    """A file for the options, which data.normalization=FILE gives to a run; None: they are only printed."""
    workers: Count
    """Threads that read images."""

    @model_validator(mode="after")
    def _check_output(self) -> Self:
        if self.output is not None:
            file_to_write("output", self.output, begins=[MEASURED])
        return self


class Subset(Options):
    """Fewer images of a source."""

    part: Annotated[Sequence[Fraction], Len(2, 2), Expect("two numbers, [from, to]")] = (0, 1)
    """Those whose hash lies in [from, to): parts that do not overlap share no image."""
    images: Count | None = None
    """Only so many of them, as many of each class as of any other as far as there are; None for all."""

    @model_validator(mode="after")
    def _check_part(self) -> Self:
        if self.part[0] >= self.part[1]:
            raise OptionError("part", self.part, "must be [from, to], and the first is not less than the second")
        return self


def development(value: float | str | None) -> None:
    """OptionError unless this can be what is measured on in place of the test images: None for the test images."""
    if value not in (None, VALIDATION):
        try:
            number("development", value, 0, 0.9, above=True)
        except OptionError as error:
            raise OptionError("development", value, f"{error.right}, or {VALIDATION}") from None
