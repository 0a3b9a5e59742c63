"""The builders of data sets: they find the images to train on, to choose by and to report on.

The options of `torchvision_set` are those of `datasets_options.TorchvisionSet`, and so on.
"""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from tqdm import tqdm

from ssvit.data.sources import datasets_options
from ssvit.data.sources import folder as folders
from ssvit.data.sources.base import Data, Source, joined, parted
from ssvit.data.sources.files import Files, Listing, listing
from ssvit.data.sources.index import KEPT_FROM, Index, Row, kept
from ssvit.data.sources.memory import Memory
from ssvit.data.sources.shards import find
from ssvit.options import OptionError, UserError, printable


def folder(options: datasets_options.Folder) -> Data:
    """Image files in a folder, or in several.

    Beside validation images, test=auto skips test images that have no labels of the training set's classes. UserError
    if validation or test images have a class that training lacks.
    """
    splits = [[path for path in paths if path] for paths in zip(*options.splits, strict=True)]
    of_masks = (options.roots[0], options.masks) if options.masks else None

    def read(paths: Sequence[str], classes: Sequence[str] = ()) -> Source:
        return joined([_files(path, classes, options, of_masks) for path in paths])

    train = read(splits[0])
    validation = read(splits[1], train.classes) if splits[1] else None
    test, reason = None, ""
    optional = options.test == folders.AUTO and validation
    try:
        test = read(splits[2], train.classes) if splits[2] else None
        if optional and test and train.classes and test.labels is None:
            test, reason = None, "its images have no labels"
    except UserError as error:
        if not optional:
            raise
        reason = str(error)
    names = [", ".join(dict.fromkeys(map(_short, paths))) for paths in splits]
    data = parted(names, train, validation, test, held_out=options.held_out, seed=options.seed)
    skipped = f"; {names[2]} is not used: {reason}" if reason else ""
    return replace(data, told=data.told + skipped)


def _short(path: str) -> str:
    return f"{os.path.basename(os.path.abspath(path))}/"


def shards(options: datasets_options.Shards) -> Data:
    """Uncompressed tar files in the layout of WebDataset.

    UserError if a shard cannot be read, or if validation or test images have a class that training lacks.
    """
    splits = options.splits
    read = partial(find, options.root, cache=options.cache, pixels=options.pixels)
    train = read(splits.train)
    others = (read(names, train.classes) if names else None for names in splits[1:])
    called = [f"{len(names)} shards:" for names in splits]
    return parted(called, train, *others, held_out=options.held_out, seed=options.seed)


def csv(options: datasets_options.Csv) -> Data:
    """Image files that a table names.

    UserError if a file is not there, or if validation or test images have a class that training lacks.
    """
    splits = options.splits
    train = _of_table(options, "train")
    others = (
        None if getattr(splits, part) is None else _of_table(options, part, train.classes)
        for part in ("validation", "test")
    )
    called = [f"{name or os.path.basename(options.table)}:" for name in splits]
    return parted(called, train, *others, held_out=options.held_out, seed=options.seed)


def _of_table(chosen: datasets_options.Csv, part: str, classes: Sequence[str] = ()) -> Files:
    """The images of a part of a table, labelled by `classes` where given, else by the names in the table."""
    status = os.stat(chosen.table)
    stamp = [status.st_size, status.st_mtime_ns]

    def rows() -> Iterator[Row]:
        of_part = tqdm(chosen.rows(part), f"list {chosen.table}", unit=" images", delay=2, leave=False)
        for row in of_part:
            path = os.path.join(chosen.top, row.path)
            if not os.path.isfile(path):
                raise UserError(f"{chosen.table}, line {row.line}: there is no file {printable(path)}")
            name = os.path.relpath(path, chosen.top) if os.path.isabs(row.path) else row.path
            yield name, os.path.getsize(path), row.label, ()

    def made() -> Index:
        order = label if isinstance(label := chosen.columns.label, tuple) else ()
        return Index.of(rows(), numbered=True, classes=order, table=stamp)

    if chosen.verify == "content" or chosen.count(at_most=KEPT_FROM) < KEPT_FROM:
        index = made()
    else:
        places = os.path.realpath(chosen.table), os.path.realpath(chosen.top)
        key = json.dumps(["table", *places, part, chosen.columns, chosen.splits])
        index = kept(key, lambda index: index.facts["table"] == stamp, made)
    labels = index.labels(classes, root=chosen.table)
    own = () if labels is None else classes or index.classes
    paths = Listing(chosen.top, index)
    return Files(paths, labels, own, named=False, verify=chosen.verify, pixels=chosen.pixels)


def imagenet(options: datasets_options.Imagenet) -> Data:
    """ImageNet in its usual layout."""
    root = options.root
    layout = datasets_options.Folder(root=root, train="train", validation="val", test=None, verify=options.verify)
    data = folder(layout)
    if not data.classes:
        raise OptionError("root", root, "images lie in train/ itself, not in a folder for each class")
    if data.watched.labels is None:
        raise OptionError("root", root, "images lie in val/ itself: sort them into a folder for each class (wnid)")
    return replace(data, told="")


def vtab(options: datasets_options.Vtab) -> Data:
    """A task of VTAB-1k; its classes are called by their numbers. UserError for a damaged list."""
    from ssvit.data.sources.vtab import read

    lists = [read(os.path.join(options.top, name)) if name else None for name in options.lists]
    classes = [str(number) for number in range(1 + max(max(one[1]) for one in lists if one))]
    train, validation, test = (one and Files(*one, classes, named=False, verify=options.verify) for one in lists)
    assert train
    called = [f"{options.task}, {name}:" for name in options.lists]
    return parted(called, train, validation, test, held_out=0.1, seed=0)


def voc(options: datasets_options.Voc) -> Data:
    """Pascal VOC's images with masks; border pixels are 255. UserError for a file that is not there."""

    def read(part: str) -> Files:
        with open(options.names(part), encoding="utf-8", errors="replace") as file:
            names = file.read().split()
        if not names:
            raise UserError(f"{options.names(part)}: names no image")
        paths, masks = (
            [os.path.join(options.root, folder, name + ending) for name in names]
            for folder, ending in (("JPEGImages", ".jpg"), ("SegmentationClass", ".png"))
        )
        for path in [*paths, *masks]:
            if not os.path.isfile(path):
                raise UserError(f"{options.names(part)}: there is no file {printable(path)}")
        return Files(paths, masks=masks, verify=options.verify)

    return parted(("train.txt:", "val.txt:", ""), read("train"), read("val"), held_out=0.1, seed=0)


def torchvision_set(options: datasets_options.TorchvisionSet) -> Data:
    """A public data set, tested on its test images. UserError for absent or damaged files."""
    name, root, download = options.name, options.root, options.download
    parts = (options.split,) if options.split else _TORCHVISION[name][1]
    try:
        train, test = (_torchvision(name, root, which, download) for which in (parts, ("test",)))
    except ModuleNotFoundError as error:
        raise UserError(f"data.name={name}: reading it needs the package {error.name}") from None
    except (RuntimeError, OSError, EOFError) as error:
        if download:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise UserError(f"data.root={root}: {name} could not be fetched: {reason}") from None
        right = "give the folder that holds it, or set data.download=true to fetch it"
        raise UserError(f"data.root={root}: holds no whole {name}: {right}") from None
    return Data(train, None, test, train.classes)


def _files(root: str, classes: Sequence[str], chosen: datasets_options.Folder, masks: tuple[str, str] | None) -> Files:
    """The images of a folder, labelled by `classes` where given, else by the names that it holds.

    masks: the folder of all images and that of all masks.
    """
    paths = listing(root, fresh=chosen.verify == "content")
    of_images = None
    if masks:
        images, of = masks
        of_images = [os.path.join(of, os.path.splitext(os.path.relpath(path, images))[0] + ".png") for path in paths]
    labels = paths.entries.labels(classes, root=root)
    own = () if labels is None else classes or paths.entries.classes
    return Files(paths, labels, own, masks=of_images, verify=chosen.verify, pixels=chosen.pixels)


# The class in torchvision.datasets, and the parts that make up the training set.
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
        found = reader(root, train=parts == ("train",), download=download)
        return Memory(torch.from_numpy(found.data).permute(0, 3, 1, 2), found.targets, found.classes)
    found = [reader(root, split=part, download=download) for part in parts]
    classes = found[0].classes
    if name == "stl10":
        images = torch.from_numpy(found[0].data)
        return Memory(images) if parts == ("unlabeled",) else Memory(images, found[0].labels, classes)
    attribute = "_image_files" if name == "flowers102" else "_images"
    paths = [path for part in found for path in getattr(part, attribute)]
    return Files(paths, [label for part in found for label in part._labels], classes)
