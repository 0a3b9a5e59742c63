"""Define the options of data sets of the library `datasets`, validated against the description of a data set alone.

`save_to_disk` writes a folder with JSON files: of one data set, or of one in a subfolder for each split. A description
is {split: {column: feature}}, with features in the form of `Features.to_dict`; the split of a single data set is "".
"""

import json
import os
from collections.abc import Iterable, Mapping
from functools import cached_property
from importlib.util import find_spec
from typing import Any, Self

from pydantic import model_validator

from ssvit.config.declaration import Name
from ssvit.data.sources.files_options import ImageFiles
from ssvit.data.sources.splits import AUTO, Items, Splits, resolve
from ssvit.options import OptionError, UserError, printable

Features = Mapping[str, Any]
_CLASSES = ("string", "large_string", "bool", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)))
_LISTS = ("List", "LargeList", "Sequence")


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

    @model_validator(mode="after")
    def _check_set(self) -> Self:
        if not self.root:
            raise OptionError("root", self.root, "must name a folder, or a data set in the cache")
        if find_spec("datasets") is None:
            raise OptionError("root", self.root, "needs datasets: pip install 'ssvit[huggingface]'")
        if not (self.download or os.path.isdir(self.root) or _is_cached(self.root)):
            right = "no such folder, nor a data set in the cache; data.download=true fetches one from the Hub"
            raise OptionError("root", self.root, right)
        if self.described is not None and self.config is not None:
            raise OptionError("config", self.config, "must be null: save_to_disk wrote one configuration")
        _ = self.label_feature
        return self

    @cached_property
    def described(self) -> dict[str, Features] | None:
        """Return the splits of a folder and their columns; None if save_to_disk did not write it."""
        root = self.root
        try:
            if os.path.isfile(os.path.join(root, "state.json")):
                return {"": _json(root, "dataset_info.json")["features"]}
            if not os.path.isfile(os.path.join(root, "dataset_dict.json")):
                return None
            splits = _json(root, "dataset_dict.json")["splits"]
            return {split: _json(root, split, "dataset_info.json")["features"] for split in splits}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"data.root={root}: the data set cannot be read: {error}") from None

    def splits_of(self, there: Iterable[str]) -> Splits:
        """Resolve the splits among the existing ones."""
        every = tuple(there)

        def find(name: str) -> Items:
            return (name,) if name in every else ()

        def rest(held_out: Items) -> Items:
            others = tuple(name for name in every if name not in held_out)
            return others if len(others) == 1 else ()

        has = ", ".join(map(printable, filter(None, every))) or "none"
        return resolve(self.names, find, rest, expected=f"a split of {self.root}, which has {has}")

    def columns_of(self, features: Features) -> tuple[str, str | None]:
        """Return the names of the columns of images and of labels.

        auto selects the only column of images; for labels, the column `label` or the only column of classes. A column
        of lists of classes has to be named.

        Args:
            features: Features of the columns, by name.

        Raises:
            OptionError: A column does not exist, or the column of labels does not contain classes.
        """
        image, label, shown = self.image, self.label, printable(", ".join(features))
        images = [name for name in features if _kind(features[name]) == "Image"]
        if image == AUTO and len(images) != 1:
            raise OptionError("image", image, f"must name the column of images: {self.root} has {shown}")
        image = images[0] if image == AUTO else image
        if label == AUTO:
            classes = [name for name in features if _kind(features[name]) == "ClassLabel"]
            named = "label" in features and _is_class(features["label"])
            label = "label" if named else classes[0] if len(classes) == 1 else None
        for option, name in (("image", image), ("label", label)):
            if name is not None and name not in features:
                raise OptionError(option, name, f"must be a column of {self.root}, which has {shown}")
        if label is not None and not _is_class(element(features[label]) or features[label]):
            right = "must be a column of classes, of names or of whole numbers, or of lists of them"
            raise OptionError("label", label, right)
        return image, label

    @cached_property
    def label_feature(self) -> Any:
        """Return the feature of the training split's labels; None without labels; "" without a description."""
        if self.described is None:
            return ""
        features = self.described[self.splits_of(self.described).train[0]]
        label = self.columns_of(features)[1]
        return None if label is None else features[label]

    @property
    def labelled(self) -> bool | None:
        """Return False without a column of labels, else None, since rows may lack a label."""
        return None if self.label_feature is not None else False  # a row of the column may lack a label

    @property
    def multi_label(self) -> bool | None:
        """Return whether an image may have several classes; None without a description."""
        return None if self.label_feature == "" else element(self.label_feature) is not None

    @property
    def validated(self) -> bool | None:
        """Return whether there are validation images; None without a description."""
        return None if self.described is None else bool(self.splits_of(self.described).validation)


def element(feature: object) -> Any:
    """Return the feature of the elements of a list column; None for a column without lists."""
    if isinstance(feature, list):  # the form of some lists in version 3 of the library
        return feature[0]
    return feature["feature"] if isinstance(feature, Mapping) and _kind(feature) in _LISTS else None


def _kind(feature: object) -> str:
    return str(feature.get("_type")) if isinstance(feature, Mapping) else ""


def _is_class(feature: object) -> bool:
    kind = _kind(feature)
    is_text = isinstance(feature, Mapping) and feature.get("dtype") in _CLASSES
    return kind == "ClassLabel" or (kind == "Value" and is_text)


def _json(*parts: str) -> dict[str, Any]:
    with open(os.path.join(*parts), encoding="utf-8") as file:
        return json.load(file)


def _is_cached(name: str) -> bool:
    """Return whether the library's cache contains a data set called OWNER/NAME."""
    home = os.environ.get("HF_HOME") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "huggingface"
    )
    cache = os.environ.get("HF_DATASETS_CACHE") or os.path.join(home, "datasets")
    # The library writes a folder OWNER___some_name for OWNER/SomeName.
    return os.path.isdir(cache) and any(_letters(entry) == _letters(name) for entry in os.listdir(cache))


def _letters(name: str) -> str:
    return name.replace("_", "").replace("/", "").lower()
