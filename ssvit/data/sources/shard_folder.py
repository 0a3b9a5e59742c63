"""Which shards of a folder serve what, by their names alone. Standard library, and fsspec for an object store."""

import glob
import os
import re
from collections.abc import Mapping
from fnmatch import fnmatch
from typing import Any

from ssvit.data.sources import folder
from ssvit.data.sources.splits import NAMES, Items, Splits, resolve
from ssvit.options import OptionError

SUFFIX = ".tar"
INDEX = "index.safetensors"  # beside the shards that `ssvit pack` makes
PLACE = ("shard", "offset")  # columns of an index: which shard, and where the image's bytes begin in it
CHECKSUM = "crc32"  # a further one beside those shards: zlib's of the image's bytes
_NONE = f"holds no shard (a file ending in {SUFFIX})"


def is_remote(root: object) -> bool:
    """Whether a root is an address, as s3://bucket/folder, and no path."""
    return bool(re.match(r"\w[\w+.-]*://", str(root)))


def opened(root: str) -> tuple[Any, str]:
    """The file system of fsspec that has an address, and the address's path in it. OptionError if none can."""
    import fsspec

    try:
        return fsspec.url_to_fs(root)
    except ImportError as error:
        package = re.search(r"[Ii]nstall (\w+)|named '(\w+)'", str(error))
        name = next(filter(None, package.groups())) if package else str(error)
        raise OptionError("root", root, f"needs the package {name}: pip install {name}") from None
    except (ValueError, OSError) as error:
        raise OptionError("root", root, " ".join(str(error).split())) from None


def is_one(root: str) -> bool:
    """Whether a folder holds shards, also in its subfolders, and no images."""
    holds = any(glob.glob(f"{depth}{SUFFIX}", root_dir=root) for depth in ("*", "*/*"))
    return holds and folder.count(root, at_most=1) == 0


def names(root: str) -> list[str]:
    """Paths of the shards in a folder and in its subfolders, below it, sorted. OptionError if there is none."""
    if is_remote(root):
        system, top = opened(root)
        try:
            found = system.find(top, maxdepth=2)
        except Exception as error:  # each store has errors of its own
            raise OptionError("root", root, f"cannot be read: {' '.join(str(error).split())}") from None
        paths = [path.removeprefix(top).lstrip("/") for path in found if path.endswith(SUFFIX)]
    elif not os.path.isdir(root):
        raise OptionError("root", root, "no such folder")
    else:
        paths = [path for depth in ("*", "*/*") for path in glob.glob(f"{depth}{SUFFIX}", root_dir=root)]
    if not paths:
        raise OptionError("root", root, _NONE)
    return sorted(paths)


def splits(root: str, requested: Mapping[str, str | None]) -> Splits:
    """Resolve the shards to train on, for choices, and for the reported figure, by their paths below the root.

    A name is that of a subfolder, or a pattern (imagenet-val-*). A known name also fits the shards that have such a
    word in their own. Without shards to train on, all others are trained on.
    """
    every = names(root)

    def find(name: str) -> Items:
        below = tuple(path for path in every if path.startswith(f"{name}/") or fnmatch(path, name))
        word = re.compile(rf"(?<![a-z]){re.escape(name)}(?![a-z])")
        return below or tuple(path for path in every if name in NAMES and word.search(path))

    def rest(held_out: Items) -> Items:
        return tuple(path for path in every if path not in held_out)

    return resolve(requested, find, rest, expected=f"a subfolder or a pattern of shards in {root}")


def ending(path: str) -> tuple[str, str]:
    """A member's key and ending, "a/1" and "jpg" of a/1.jpg: the first dot of the name parts them, as in WebDataset."""
    folder, _, name = path.rpartition("/")
    stem, _, suffix = name.partition(".")
    return (f"{folder}/{stem}" if folder else stem), suffix.lower()
