"""Build data sets: read the training, validation and test images that options select.

The options of `torchvision_set` are `datasets_options.TorchvisionSet`, and so on.
"""

import io
import math
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path

import torch
from tqdm import tqdm

from ssvit.data.sources import datasets_options, decode, rasters
from ssvit.data.sources.base import Data, Label, Source, number_labels, split_data
from ssvit.data.sources.base_options import ImageFiles
from ssvit.data.sources.files import Encoded, Files
from ssvit.data.sources.folder import list_images, unused_folders
from ssvit.data.sources.memory import Memory
from ssvit.data.sources.shards import open_shards
from ssvit.data.sources.splits import AUTO, Items, Splits, are_like_splits
from ssvit.data.sources.vtab import read_vtab_list
from ssvit.engine.atomic_io import exclusive
from ssvit.errors import UserError, printable

_SAMPLED = 16  # images whose headers are read at the start
_COMPOSITED = 4  # maximum number of those with an alpha channel that are decoded


def read_splits(
    options: ImageFiles,
    splits: Splits,
    names: Sequence[str],
    read: Callable[[Items, Sequence[str]], Source],
    *,
    unused: Collection[str] = (),
) -> Data:
    """Read the splits of a data set.

    Next to validation images, test=auto skips test images that lack labels of the training classes.

    Args:
        options: Options of the data set.
        splits: Resolved splits.
        names: Name of each split, for messages.
        read: Reads the items of a split with labels that index the training classes; () for the training split itself.
        unused: Names of further items of the data set.

    Raises:
        UserError: The images cannot be read, or validation or test images have a class that training lacks.
    """
    train = read(splits.train, ())
    validation = read(splits.validation, train.classes) if splits.validation else None
    test, skipped = None, ""
    optional = options.test == AUTO and validation is not None
    try:
        test = read(splits.test, train.classes) if splits.test else None
        if optional and test is not None and train.classes and test.labels is None:
            test, skipped = None, "its images have no labels"
    except UserError as error:
        if not optional:
            raise
        skipped = str(error)
    data = split_data(names, train, validation, test, held_out=options.held_out, seed=options.seed, skipped=skipped)
    notes = [train.note, *_notes(train)] if isinstance(train, Encoded) else []
    if unused:
        notes.append(f"not used: {printable(', '.join(sorted(unused)))}")
    return replace(data, summary="; ".join([data.summary, *filter(None, notes)]))


def _notes(source: Encoded) -> Iterator[str]:
    """Yield notes on a sample of images: transparent pixels, several pages, 16-bit values without a range or mixed."""
    maxima, composited, transparent, vanished, paged = dict[str, float](), 0, 0, 0, 0
    for index in range(0, len(source), math.ceil(len(source) / _SAMPLED)):
        with suppress(UserError):  # the loader replaces unreadable images
            data = source.file(index)
            image = decode.header(io.BytesIO(data.data))
            if image is not None and source.pixels.is_photo and image.format == "TIFF" and len(image.getbands()) == 1:
                paged += int(getattr(image, "n_frames", 1) > 1)
            if image is None or not decode.is_8_bit(image):
                values = source.values(index)
                maxima[values.dtype.name] = max(maxima.get(values.dtype.name, 0), values.max().item())
                continue
            maxima.setdefault("uint8", 0)
            if source.pixels.is_photo and composited < _COMPOSITED and rasters.has_alpha(image):
                composited += 1
                low, high = decode.extrema(data, source.name(index), source.pixels.background).T
                transparent += int(low[3] < 255)
                vanished += int(8 * max(high[:3] - low[:3]) < high[3] - low[3])
    onto = source.pixels.background
    if transparent:
        verb = "have transparent pixels, which are composited onto"
        yield f"{transparent} sampled images {verb} {onto or 'black'} (data.background)"
    if vanished:
        yield f"warning: {vanished} of these images become uniform; try data.background={'black' if onto else 'white'}"
    if paged:
        remedy = "data.channels=NUMBER with data.range reads pages as channels"
        yield f"warning: of {paged} sampled TIFF files with several grey pages, only the first page is read; {remedy}"
    wide = maxima.keys() & {"uint16", "int32"}  # Pillow before 11.3 opens some 16-bit files as int32
    limits = source.pixels.range
    if wide and "uint8" in maxima:
        scale = "different factors, since data.range is not set" if limits is None else "the same data.range"
        yield f"warning: 8-bit and 16-bit images are mixed, which are rescaled by {scale}"
    elif wide and limits is None:
        largest = max(maxima[name] for name in wide)
        remedy = f"data.range=[0,{largest:g}] uses the maximum of a sample, ssvit normalization measures all images"
        yield f"warning: 16-bit values up to {largest:g} are divided by 65535, since data.range is not set: {remedy}"


def folder(options: datasets_options.Folder) -> Data:
    """Build a data set of the image files in a folder."""
    others = Counter[str]()

    def read(paths: Items, classes: Sequence[str]) -> Source:
        (root,) = paths
        files, labels = zip(*list_images(root, others), strict=True)
        masks = None
        if options.masks is not None:
            names = (os.path.splitext(os.path.relpath(path, options.root))[0] for path in files)
            masks = _existing("data.masks", [os.path.join(options.masks, f"{name}.png") for name in names])
        numbers = number_labels(labels, classes, source=root)
        return Files(files, *numbers, masks=masks, mask_format=options, pixels=options.pixels)

    names = ["".join(f"{os.path.basename(os.path.abspath(path))}/" for path in paths) for paths in options.splits]
    unused = unused_folders(options.root, [*chain(*options.splits)])
    data = read_splits(options, options.splits, names, read, unused=[f"{name}/" for name in unused])
    if others:
        suffixes = printable(", ".join(f"{suffix} ({count:,})" for suffix, count in others.most_common(5)))
        suffixes += ", ..." if len(others) > 5 else ""
        summary = f"{data.summary}; {others.total():,} other files are not used: {suffixes}"
        data = replace(data, summary=summary)
    if options.train is not None and are_like_splits(data.classes):
        remedy = "if they are splits, name them by data.train and data.test; if they are classes, set data.train=null"
        classes = printable(", ".join(data.classes))
        return replace(data, summary=f"{data.summary}; warning: the classes {classes} are named like splits: {remedy}")
    return data


def _existing(name: str, paths: list[str]) -> list[str]:
    """Return the paths of images or masks; UserError, which begins with a name, if one of them does not exist."""
    missing = [path for path in paths if not os.path.isfile(path)]
    if missing:
        raise UserError(
            f"{name}: {len(missing):,} of {len(paths):,} files are missing, such as {printable(missing[0])}"
        )
    return paths


def voc(options: datasets_options.Voc) -> Data:
    """Build a data set in the layout of Pascal VOC's segmentation; UserError if a file does not exist."""

    def read(splits: Items, classes: Sequence[str]) -> Source:
        path = options.list_of(splits[0])
        try:
            with open(path, encoding="utf-8") as file:
                names = file.read().split()
        except UnicodeDecodeError as error:
            raise UserError(f"{path}: is not encoded in UTF-8: {error.reason}") from None
        if not names:
            raise UserError(f"{path}: contains no name of an image")
        images, masks = (
            _existing(path, [os.path.join(options.root, folder, f"{name}{suffix}") for name in names])
            for folder, suffix in (("JPEGImages", ".jpg"), ("SegmentationClass", ".png"))
        )
        return Files(images, masks=masks, mask_format=options, pixels=options.pixels)

    return read_splits(options, options.splits, [f"{', '.join(names)}:" for names in options.splits], read)


def shards(options: datasets_options.Shards) -> Data:
    """Build a data set of uncompressed tar files in the layout of WebDataset."""
    unused = list[str]()
    read = partial(open_shards, options.root, pixels=options.pixels, unused=unused)
    data = read_splits(options, options.splits, [f"{len(names)} shards:" for names in options.splits], read)
    if not unused:
        return data
    rule = "a sample has one image, and its files have equal names up to the first dot before a letter"
    summary = f"{len(unused):,} images or classes are not used, such as {printable(unused[0])}: {rule}"
    return replace(data, summary=f"{data.summary}; {summary}")


def csv(options: datasets_options.Csv) -> Data:
    """Build a data set of the image files that a table lists; UserError if a file does not exist."""
    names = [", ".join(names) or os.path.basename(options.table) for names in options.splits]
    return read_splits(options, options.splits, [f"{name}:" for name in names], partial(_of_table, options))


def _of_table(options: datasets_options.Csv, splits: Items, classes: Sequence[str]) -> Files:
    """Return the images of some splits of a table, with labels into `classes` or, for (), the table's classes."""
    paths, labels, masks = list[str](), list[Label](), list[str]()
    for row in tqdm(options.rows(splits), f"list {options.table}", unit=" images", delay=2, leave=False):
        path = os.path.join(options.root_folder, row.path)
        if not os.path.isfile(path):
            raise UserError(f"{options.table}, line {row.line}: there is no file {printable(path)}")
        paths.append(path)
        labels.append(row.label)
        masks.append(os.path.join(options.root_folder, row.mask))
    numbers = number_labels(labels, classes, source=options.table, numeric=True)
    of_images = _existing(options.table, masks) if options.masked else None
    return Files(paths, *numbers, masks=of_images, mask_format=options, named=False, pixels=options.pixels)


def vtab(options: datasets_options.Vtab) -> Data:
    """Build a task of VTAB-1k, with class numbers as names; UserError for a damaged list."""
    lists = [read_vtab_list(os.path.join(options.root, options.task, name)) if name else None for name in options.lists]
    count = 1 + max(max(numbers) for _, numbers in filter(None, lists))
    classes = list(map(str, range(count)))
    train, validation, test = (part and Files(*part, classes, named=False) for part in lists)
    assert train
    called = [f"{options.task}, {name}:" for name in options.lists]
    return split_data(called, train, validation, test, held_out=0.1, seed=0)


def torchvision_set(options: datasets_options.TorchvisionSet) -> Data:
    """Build a public data set with its test images; UserError for missing or damaged files."""
    name, root, download = options.name, options.root, options.download
    parts = (options.split,) if options.split else _TORCHVISION[name][1]
    try:
        with exclusive(Path(root)) if download else nullcontext():  # one process downloads, and the others wait
            train, test = (_torchvision(name, root, which, download) for which in (parts, ("test",)))
    except ModuleNotFoundError as error:
        raise UserError(f"data.name={name}: requires the package {error.name}") from None
    except (RuntimeError, OSError, EOFError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        remedy = "" if download else "; data.download=true downloads it"
        raise UserError(f"data.root={root}: {name} cannot be read: {reason}{remedy}") from None
    return Data(train, None, test, train.classes)


# The class in torchvision.datasets, and the splits that form the training set.
_TORCHVISION = {
    "cifar10": ("CIFAR10", ("train",)),
    "cifar100": ("CIFAR100", ("train",)),
    "stl10": ("STL10", ("train",)),
    "flowers102": ("Flowers102", ("train", "val")),
    "oxford_pets": ("OxfordIIITPet", ("trainval",)),
}


def _torchvision(name: str, root: str, parts: Sequence[str], download: bool) -> Source:
    from torchvision import datasets

    reader = getattr(datasets, _TORCHVISION[name][0])
    if name in ("cifar10", "cifar100"):
        cifar = reader(root, train=parts == ("train",), download=download)
        return Memory(torch.from_numpy(cifar.data).permute(0, 3, 1, 2), cifar.targets, cifar.classes)
    splits = [reader(root, split=part, download=download) for part in parts]
    classes = splits[0].classes
    if name == "stl10":
        images = torch.from_numpy(splits[0].data)
        return Memory(images) if parts == ("unlabeled",) else Memory(images, splits[0].labels, classes)
    attribute = "_image_files" if name == "flowers102" else "_images"
    paths = [path for part in splits for path in getattr(part, attribute)]
    return Files(paths, [label for part in splits for label in part._labels], classes)
