"""What a data set of the library `datasets` holds, by its description alone. Standard library only.

`save_to_disk` writes a folder with files of JSON: of one set, or of one in a subfolder for each split. A description is
{split: {column: feature}}, with a feature as `Features.to_dict` has it; the split of a single set is "".
"""

import json
import os
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from ssvit.data.sources.folder import AUTO, KNOWN
from ssvit.options import OptionError, UserError, printable

Features = Mapping[str, Any]
_CLASSES = ("string", "large_string", "bool", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)))
_LISTS = ("List", "LargeList", "Sequence")


class Splits(NamedTuple):
    """Splits of a set by what their images are for."""

    train: str
    validation: str | None
    test: str | None


def described(root: str) -> dict[str, Features] | None:
    """What `save_to_disk` wrote into a folder; None if it did not. UserError for a damaged description."""
    try:
        if os.path.isfile(os.path.join(root, "state.json")):
            return {"": _json(root, "dataset_info.json")["features"]}
        if not os.path.isfile(os.path.join(root, "dataset_dict.json")):
            return None
        splits = _json(root, "dataset_dict.json")["splits"]
        return {split: _json(root, split, "dataset_info.json")["features"] for split in splits}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"data.root={root}: the data set cannot be read: {error}") from None


def _json(*parts: str) -> dict[str, Any]:
    with open(os.path.join(*parts), encoding="utf-8") as file:
        return json.load(file)


def is_cached(name: str) -> bool:
    """Whether the library's cache has a set of a name, OWNER/NAME."""
    home = os.environ.get("HF_HOME") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "huggingface"
    )
    cache = os.environ.get("HF_DATASETS_CACHE") or os.path.join(home, "datasets")
    # The library writes a folder OWNER___some_name for OWNER/SomeName.
    return os.path.isdir(cache) and any(_letters(entry) == _letters(name) for entry in os.listdir(cache))


def _letters(name: str) -> str:
    return name.replace("_", "").replace("/", "").lower()


def splits(root: str, there: Iterable[str], *, train: str, validation: str | None, test: str | None) -> Splits:
    """Which split is trained on, which is for choices, which for the reported figure.

    Each is named, or auto: the first of the KNOWN names, and the only other split to train on; validation and test may
    be None. OptionError if there is no such split, or if two are the same.
    """
    names = list(there)
    shown = ", ".join(map(printable, filter(None, names))) or "none"
    asked = {"train": train, "validation": validation, "test": test}
    found: dict[str, str | None] = {}
    for part, name in asked.items():
        if name == AUTO:
            found[part] = next((known for known in KNOWN[part] if known in names), None)
        elif name in names or (name is None and part != "train"):
            found[part] = name
        else:
            raise OptionError(part, name, f"must be {AUTO}, or a split of {root}, which has {shown}")
    chosen = found["train"]
    if chosen is None:
        others = [name for name in names if name not in found.values()]
        if len(others) != 1:
            raise OptionError("train", train, f"must name the split to train on: {root} has {shown}")
        chosen = others[0]
    for part, taken in (("validation", {chosen}), ("test", {chosen, found["validation"]})):
        if found[part] is not None and found[part] in taken:
            raise OptionError(part, asked[part], "must be a split that serves for nothing else; null for none")
    return Splits(chosen, found["validation"], found["test"])


def columns(root: str, features: Features, *, image: str, label: str | None) -> tuple[str, str | None]:
    """The names of the columns of images and of labels.

    auto: the only column of images; the column `label`, or the only one of classes, if there is one. A column of lists
    of classes has to be named. OptionError if there is no such column, or none that holds classes.
    """
    shown = printable(", ".join(features))
    images = [name for name in features if _kind(features[name]) == "Image"]
    if image == AUTO and len(images) != 1:
        raise OptionError("image", image, f"must name the column of images: {root} has {shown}")
    image = images[0] if image == AUTO else image
    if image not in features:
        raise OptionError("image", image, f"must be a column of {root}, which has {shown}")
    if label == AUTO:
        classes = [name for name in features if _kind(features[name]) == "ClassLabel"]
        named = "label" in features and _is_class(features["label"])
        label = "label" if named else classes[0] if len(classes) == 1 else None
    if label is not None and label not in features:
        raise OptionError("label", label, f"must be a column of {root}, which has {shown}; null for none")
    if label is not None and not _is_class(element(features[label]) or features[label]):
        right = "must be a column of classes, of names or of whole numbers, or of lists of them"
        raise OptionError("label", label, right)
    return image, label


def element(feature: object) -> Any:
    """What the lists of a column hold, as the feature of that; None of a column without lists."""
    if isinstance(feature, list):  # as version 3 of the library has some of them
        return feature[0]
    return feature["feature"] if isinstance(feature, Mapping) and _kind(feature) in _LISTS else None


def _kind(feature: object) -> str:
    return str(feature.get("_type")) if isinstance(feature, Mapping) else ""


def _is_class(feature: object) -> bool:
    kind = _kind(feature)
    return kind == "ClassLabel" or (
        kind == "Value" and isinstance(feature, Mapping) and feature.get("dtype") in _CLASSES
    )
