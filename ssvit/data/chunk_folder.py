"""What a set that LitData wrote holds, by its index.json alone. Standard library only.

The file lists the chunks, and says of what leaves an item consists: a dictionary's, a tuple's, or a single one.
"""

import json
import os
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from ssvit.data.folder import AUTO, KNOWN
from ssvit.options import OptionError, UserError, printable

INDEX = "index.json"
PIXELS = "pil"  # a leaf of pixels as they are; the other kinds of images are files
_FILES = ("jpeg", "image", "file")
_LABELS = ("int", "str", "text")
_NAMES = ("label", "class", "cls", "target", "class_name")


class Chunk(NamedTuple):
    """A chunk's file, and how many items it has."""

    name: str
    items: int


class Described(NamedTuple):
    """A folder of chunks: the kinds of an item's leaves, and which of them are its image and its label."""

    chunks: tuple[Chunk, ...]
    kinds: tuple[str, ...]
    image: int
    label: int | None


class Splits(NamedTuple):
    """Folders of chunks by what their images are for."""

    train: str
    validation: str | None
    test: str | None


def splits(root: object, *, train: str | None, validation: str | None, test: str | None) -> Splits:
    """Which folder of chunks is trained on, which is for choices, which for the reported figure.

    Each is named by a subfolder, or auto: that of a KNOWN name, and to train on, the root itself. OptionError if there
    is no such set.
    """
    if not isinstance(root, str) or not os.path.isdir(root):
        raise OptionError("root", root, "must be a folder that LitData wrote (copy one from an address first)")
    found: dict[str, str | None] = {}
    for part, name in (("train", train), ("validation", validation), ("test", test)):
        if name == AUTO:
            known = (os.path.join(root, known) for known in KNOWN[part])
            found[part] = next((path for path in known if os.path.isfile(os.path.join(path, INDEX))), None)
        else:
            found[part] = None if name is None else os.path.join(root, str(name))
    found["train"] = found["train"] or root
    for part, path in found.items():
        if path is not None and not os.path.isfile(os.path.join(path, INDEX)):
            raise OptionError("root" if path == root else part, path, f"has no {INDEX}, which LitData writes")
    return Splits(str(found["train"]), found["validation"], found["test"])


def described(folder: str, *, image: str | None, label: str | None) -> Described:
    """The set in a folder. image, label: the keys of their leaves, as 0 in a tuple; label may be None.

    auto: the only image; the label of a usual name, or in a tuple the only whole number or text. UserError for a set
    that cannot be read, OptionError for a leaf that is not there.
    """
    try:
        with open(os.path.join(folder, INDEX), encoding="utf-8") as file:
            content = json.load(file)
        config = content["config"]
        chunks = tuple(Chunk(str(one["filename"]), int(one["chunk_size"])) for one in content["chunks"])
        kinds = tuple(str(kind) for kind in config["data_format"])
        names = tuple(_names(json.loads(config["data_spec"])[1]))
    except (OSError, ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
        raise UserError(f"{folder}/{INDEX}: is no index of LitData, or a damaged one: {error!r:.100}") from None
    for feature, plain in (("compression", None), ("encryption", None), ("item_loader", "PyTreeLoader")):
        if config.get(feature) not in (None, plain):
            raise UserError(
                f"{folder}: {feature}={printable(str(config[feature]))}: write it again without, to be read"
            )
    if len(names) != len(kinds) or not chunks:
        raise UserError(f"{folder}/{INDEX}: is no index of LitData, or a damaged one")
    if any(os.path.basename(chunk.name) != chunk.name for chunk in chunks):
        raise UserError(f"{folder}/{INDEX}: names a chunk outside of its folder")
    leaves = dict(zip(names, kinds, strict=True))
    shown = ", ".join(f"{name} ({kind})" for name, kind in leaves.items())
    images = [name for name, kind in leaves.items() if _is_image(kind)]
    images = images or [name for name, kind in leaves.items() if kind == "bytes"]
    if image == AUTO and len(images) != 1:
        raise OptionError("image", image, f"must name the leaf of images: {folder} has {shown}")
    image = images[0] if image == AUTO else str(image)
    if image not in leaves or not (_is_image(leaves[image]) or leaves[image] == "bytes"):
        raise OptionError("image", image, f"must be a leaf of images: {folder} has {shown}")
    texts = [name for name, kind in leaves.items() if kind in _LABELS]
    if label == AUTO:
        in_tuple = texts if len(texts) == 1 and texts[0].isdecimal() else [None]
        label = next((name for name in _NAMES if name in texts), in_tuple[0])
    elif label is not None and str(label) not in texts:
        raise OptionError("label", label, f"must be a leaf of whole numbers or text: {folder} has {shown}; null: none")
    return Described(chunks, kinds, names.index(image), None if label is None else names.index(str(label)))


def _is_image(kind: str) -> bool:
    return kind.partition(":")[0] in (PIXELS, *_FILES)


def _names(spec: Mapping[str, Any], above: str = "") -> Iterator[str]:
    """The keys of the leaves, those of nested ones joined by dots."""
    children = spec["children_spec"]
    if not children:
        yield above
        return
    keys = json.loads(spec["context"]) if str(spec["type"]).endswith("dict") else range(len(children))
    for key, child in zip(keys, children, strict=True):
        yield from _names(child, f"{above}.{key}" if above else str(key))
