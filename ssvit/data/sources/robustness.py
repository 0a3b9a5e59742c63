"""Recognise the layouts of robustness benchmarks from file names alone (standard library only).

- classes: root/class/image, as ImageNet-A, -R, -Sketch and ObjectNet (Hendrycks et al. 2021, Wang et al. 2019,
  Barbu et al. 2019);
- corruptions: root/corruption/severity/class/image, as ImageNet-C (Hendrycks and Dietterich 2019);
- cue conflict: images called cat7-elephant3.png, with the shape of a cat and the texture of an elephant (Geirhos et
  al. 2019).
"""

import csv
import json
import os
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ssvit.data.sources import folder
from ssvit.options import OptionError

CLASSES, CORRUPTIONS, CUE_CONFLICT = "classes", "corruptions", "cue conflict"
_CUES = re.compile(r"([a-z_]+)\d+-([a-z_]+)\d+\.\w+")
_WNID = re.compile(r"n\d{8}")
_DOGS = set(range(152, 269)) - {192, 204, 227, 242, 251, 258, 260, 264}
_BIRDS = [8, *range(10, 17), 18, 19, 20, 22, 23, 24, *range(80, 84), *range(87, 97), 98, 99, 100]
# The ImageNet class indices of the 16 cue-conflict classes (Geirhos et al. 2019; their code: human_categories.py).
_ENTRY_LEVEL: dict[str, Sequence[int]] = {
    "airplane": [404],
    "bear": [294, 295, 296, 297],
    "bicycle": [444, 671],
    "bird": [*_BIRDS, *range(127, 134), *range(135, 146)],
    "boat": [472, 554, 625, 814, 914],
    "bottle": [440, 720, 737, 898, 899, 901, 907],
    "car": [436, 511, 817],
    "cat": [281, 282, 283, 284, 285, 286],
    "chair": [423, 559, 765, 857],
    "clock": [409, 530, 892],
    "dog": sorted(_DOGS),
    "elephant": [385, 386],
    "keyboard": [508, 878],
    "knife": [499],
    "oven": [766],
    "truck": [555, 569, 656, 675, 717, 734, 864, 867],
}


class Part(NamedTuple):
    """Images as (path, folder name), of a complete set or of one corruption and severity."""

    images: list[tuple[str, str]]
    corruption: str = ""
    severity: int = 0


def layout(name: str, root: object) -> str:
    """Return the layout of a folder: CLASSES, CORRUPTIONS or CUE_CONFLICT.

    Args:
        name: Option that sets the root, for the message.
        root: The folder.

    Raises:
        OptionError: The folder has none of these layouts.
    """
    folder.check(root, name)
    top = os.fspath(root)  # type: ignore[call-overload]  # checked
    inner = [_folders(os.path.join(top, one)) for one in _folders(top)]
    if inner and all(one and all(severity.isdecimal() for severity in one) for one in inner):
        return CORRUPTIONS
    found = folder.list_images(top)
    if all(cues(path) for path, _ in found):
        return CUE_CONFLICT
    if any(of_class is None for _, of_class in found):
        raise OptionError(
            name, root, "must hold a folder for each class, or for each corruption, or cat7-elephant3.png"
        )
    return CLASSES


def parts(root: str, kind: str) -> list[Part]:
    """Return the images of a set with the layout CLASSES, or one part per corruption and severity.

    Raises:
        UserError: A folder is empty.
    """
    if kind == CLASSES:
        return [Part(_labelled(root))]
    return [
        Part(_labelled(os.path.join(root, corruption, severity)), corruption, int(severity))
        for corruption in _folders(root)
        for severity in sorted(_folders(os.path.join(root, corruption)), key=int)
    ]


def cues(path: str) -> tuple[str, str] | None:
    """Return the classes of shape and texture in the name of a cue-conflict image, or None for any other file."""
    found = _CUES.fullmatch(os.path.basename(path))
    return (found[1], found[2]) if found else None


def read_mapping(name: str, path: object) -> dict[str, list[str]]:
    """Read the classes that count as correct for each folder, from a JSON object or CSV rows `folder,class,class…`.

    In JSON they are a list, or a string separated by semicolons as in ObjectNet's mapping.

    Args:
        name: Option that sets the path, for the message.
        path: The file.

    Raises:
        OptionError: The file is unreadable or has another format.
    """
    right = "must be a JSON object of folders and their classes, or a CSV file of rows folder,class,class…"
    try:
        with open(str(path), encoding="utf-8", newline="") as file:
            if str(path).lower().endswith(".csv"):
                given: object = {row[0]: row[1:] for row in csv.reader(file, skipinitialspace=True) if row}
            else:
                given = json.load(file)
    except OSError as error:
        raise OptionError(name, path, f"cannot be read: {error.strerror}") from None
    except (ValueError, csv.Error, RecursionError):
        raise OptionError(name, path, right) from None
    if not isinstance(given, dict) or not given:
        raise OptionError(name, path, right)
    found = {key: value.split(";") if isinstance(value, str) else value for key, value in given.items()}
    if not all(isinstance(value, list) and all(isinstance(one, str) for one in value) for value in found.values()):
        raise OptionError(name, path, right)
    named = {key: [one.strip() for one in value if one.strip()] for key, value in found.items()}
    return {key: value for key, value in named.items() if value}


def entry_level(classes: Sequence[str]) -> Mapping[str, Sequence[str]]:
    """Return the model classes that belong to each class of cue-conflict images.

    For ImageNet's wnids the mapping is that of Geirhos et al.; other classes are matched by name.
    """
    if are_imagenets(classes):
        return {name: [classes[number] for number in numbers] for name, numbers in _ENTRY_LEVEL.items()}
    return {name: [name] for name in classes}


def are_imagenets(classes: Sequence[str]) -> bool:
    """Return whether classes are the 1,000 of ImageNet, named by wnid and sorted."""
    return len(classes) == 1000 and list(classes) == sorted(one for one in classes if _WNID.fullmatch(one))


def _labelled(root: str) -> list[tuple[str, str]]:
    return [(path, of_class) for path, of_class in folder.list_images(root) if of_class is not None]


def _folders(root: str) -> list[str]:
    with os.scandir(root) as entries:
        return sorted(one.name for one in entries if one.is_dir() and not one.name.startswith("."))
