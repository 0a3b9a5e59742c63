"""The data sets: builders that find the images to train on, to choose by and to report on."""

import os
from collections.abc import Sequence
from typing import Any

import torch

from ssvit.data import folder as folders
from ssvit.data import options
from ssvit.data.files import Files
from ssvit.data.memory import Memory
from ssvit.data.source import Data, Source, hold_out
from ssvit.options import OptionError, UserError


def synthetic(**given: Any) -> Data:
    """The embedded set, `options.Synthetic`, drawn anew at each start: nothing to download."""
    from ssvit.data.synthetic import CLASSES, masks, render

    own = options.Synthetic(**given)
    drawn = {"seed": own.seed, "size": own.size}
    train, test = (
        Memory(*render(part, **drawn), CLASSES, masks=masks(part, **drawn))
        for part in torch.arange(own.images + own.held_out_images).split((own.images, own.held_out_images))
    )
    return Data(train, None, test, CLASSES)


def folder(**given: Any) -> Data:
    """Image files in a folder, `options.Folder`.

    Where there are validation and test images, test=auto passes over test images that have no labels of the training
    set's classes. UserError if validation or test images have a class that training lacks.
    """
    own = options.Folder(**given)
    found = own.splits
    read = {"verify": own.verify, "masks": own.masks and (own.root, own.masks)}
    trained = _files(found.train, **read)
    if found.validation is None and found.test is None:
        trained, kept = hold_out(trained, fraction=own.held_out, seed=own.seed)
        told = f"{_short(found.train)} {len(trained):,} images to train on, {len(kept):,} others to measure on"
        return Data(trained, None, kept, trained.classes, f"{told} (data.held_out={own.held_out:g})")
    validated = found.validation and _files(found.validation, trained.classes, **read)
    tested, reason = None, ""
    optional = own.test == folders.AUTO and validated
    try:
        tested = found.test and _files(found.test, trained.classes, **read)
        if optional and tested and trained.classes and tested.labels is None:
            tested, reason = None, "its images have no labels"
    except UserError as error:
        if not optional:
            raise
        reason = str(error)
    choices, figure = ("for choices", "for the reported figure") if validated and tested else ("to measure on",) * 2
    told = [f"{_short(found.train)} {len(trained):,} images to train on"]
    for path, source, purpose in ((found.validation, validated, choices), (found.test, tested, figure)):
        if source is not None:
            told.append(f"{_short(path)} {len(source):,} {purpose}")
    if reason:
        told.append(f"{_short(found.test)} is not used: {reason}")
    return Data(trained, validated, tested, trained.classes, "; ".join(told))


def _short(path: str) -> str:
    return f"{os.path.basename(os.path.abspath(path))}/"


def imagenet(**given: Any) -> Data:
    """ImageNet in its usual layout, `options.Imagenet`."""
    own = options.Imagenet(**given)
    root, verify = own.root, own.verify
    train = _files(os.path.join(root, "train"), verify=verify)
    if not train.classes:
        raise OptionError("root", root, "images lie in train/ itself, not in a folder for each class")
    validation = _files(os.path.join(root, "val"), train.classes, verify=verify)
    if validation.labels is None:
        raise OptionError("root", root, "images lie in val/ itself: sort them into a folder for each class (wnid)")
    return Data(train, validation, None, train.classes)


def torchvision_set(**given: Any) -> Data:
    """A public data set, `options.TorchvisionSet`, measured on its test images. UserError if files are absent or
    damaged.
    """
    own = options.TorchvisionSet(**given)
    name, root, download = own.name, own.root, own.download
    train_parts, test_part = _READERS[name]
    try:
        train = _torchvision(name, root, (own.split,) if own.split else train_parts, download)
        test = _torchvision(name, root, (test_part,), download)
    except ModuleNotFoundError as error:
        raise UserError(f"data.name={name}: reading it needs the package {error.name}") from None
    except (RuntimeError, OSError, EOFError) as error:
        if download:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise UserError(f"data.root={root}: {name} could not be fetched: {reason}") from None
        right = "give the folder that holds it, or set data.download=true to fetch it"
        raise UserError(f"data.root={root}: holds no whole {name}: {right}") from None
    return Data(train, None, test, train.classes)


def _files(root: str, classes: Sequence[str] = (), *, verify: str, masks: tuple[str, str] | None = None) -> Files:
    """The images of a folder, labelled by `classes` where given, else by the names that it holds.

    masks: the folder of all images and that of all masks.
    """
    found = folders.list_images(root)
    paths = [path for path, _ in found]
    names = {name for _, name in found}
    if masks:
        images, of = masks
        masks = [os.path.join(of, os.path.splitext(os.path.relpath(path, images))[0] + ".png") for path in paths]
    if None in names:
        return Files(paths, masks=masks, verify=verify)
    classes = tuple(classes) or tuple(sorted(names))
    if unknown := names - set(classes):
        raise UserError(f"{root}: the class {min(unknown)} is not among the {len(classes)} that are trained on")
    label = {name: number for number, name in enumerate(classes)}
    return Files(paths, [label[name] for _, name in found], classes, masks=masks, verify=verify)


# The parts that make up the training set, and the part that is measured on, of each name.
_READERS = {
    "cifar10": (("train",), "test"),
    "cifar100": (("train",), "test"),
    "stl10": (("train",), "test"),
    "flowers102": (("train", "val"), "test"),
    "oxford_pets": (("trainval",), "test"),
}


def _torchvision(name: str, root: str, parts: Sequence[str], download: bool) -> Source:
    from torchvision import datasets

    if name in ("cifar10", "cifar100"):
        reader = datasets.CIFAR10 if name == "cifar10" else datasets.CIFAR100
        found = reader(root, train=parts == ("train",), download=download)
        return Memory(torch.from_numpy(found.data).permute(0, 3, 1, 2), found.targets, found.classes)
    if name == "stl10":
        found = datasets.STL10(root, split=parts[0], download=download)
        images = torch.from_numpy(found.data)
        return Memory(images) if parts[0] == "unlabeled" else Memory(images, found.labels, found.classes)
    if name == "flowers102":
        found = [datasets.Flowers102(root, split=part, download=download) for part in parts]
        paths, labels = _joined(found, "_image_files"), _joined(found, "_labels")
        return Files(paths, labels, getattr(found[0], "classes", [f"flower {i}" for i in range(102)]))
    found = [datasets.OxfordIIITPet(root, split=part, download=download) for part in parts]
    return Files(_joined(found, "_images"), _joined(found, "_labels"), found[0].classes)


def _joined(sets: Sequence[Any], attribute: str) -> list[Any]:
    return [item for part in sets for item in getattr(part, attribute)]
