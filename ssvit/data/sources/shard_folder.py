"""List the shards of a folder or an object store and resolve their splits by name (standard library and fsspec)."""

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
INDEX = ".index.json"  # suffix of the index next to a shard that `ssvit pack` writes
_NONE = f"contains no shard (a file ending in {SUFFIX})"


def is_remote(root: object) -> bool:
    """Return whether a root is an address, such as s3://bucket/folder, and not a path."""
    return bool(re.match(r"\w[\w+.-]*://", str(root)))


def open_store(root: str) -> tuple[Any, str]:
    """Return fsspec's file system for an address, and the path of the address in it.

    Raises:
        OptionError: A package is missing, or no file system supports the address.
    """
    import fsspec

    try:
        return fsspec.url_to_fs(root)
    except (ImportError, ValueError, OSError) as error:  # fsspec names the package that an address needs
        raise OptionError("root", root, " ".join(str(error).split())) from None


def holds_shards(root: str) -> bool:
    """Return whether a folder contains shards, in itself or its subfolders, and no images."""
    holds = any(glob.glob(f"{depth}{SUFFIX}", root_dir=root) for depth in ("*", "*/*"))
    return holds and folder.count(root, at_most=1) == 0


def list_shards(root: str) -> list[str]:
    """Return the sorted paths of the shards in a folder and its subfolders, relative to it.

    Raises:
        OptionError: The folder cannot be read or contains no shard.
    """
    if is_remote(root):
        system, remote_root = open_store(root)
        try:
            files = system.find(remote_root, maxdepth=2)
        except Exception as error:  # each store raises different exceptions
            raise OptionError("root", root, f"cannot be read: {' '.join(str(error).split())}") from None
        paths = [path.removeprefix(remote_root).lstrip("/") for path in files if path.endswith(SUFFIX)]
    elif not os.path.isdir(root):
        raise OptionError("root", root, "no such folder")
    else:
        paths = [path for depth in ("*", "*/*") for path in glob.glob(f"{depth}{SUFFIX}", root_dir=root)]
    if not paths:
        raise OptionError("root", root, _NONE)
    return sorted(paths)


def splits(root: str, requested: Mapping[str, str | None]) -> Splits:
    """Resolve the shards for training, validation and test, by their paths below the root.

    A split is named by a subfolder or a pattern (imagenet-val-*). A known name also matches shards whose names contain
    it as a word. Without a match for the training split, all remaining shards are for training.
    """
    shards = list_shards(root)

    def find(name: str) -> Items:
        below = tuple(path for path in shards if path.startswith(f"{name}/") or fnmatch(path, name))
        word = re.compile(rf"(?<![a-z]){re.escape(name)}(?![a-z])")
        return below or tuple(path for path in shards if name in NAMES and word.search(path))

    def rest(held_out: Items) -> Items:
        return tuple(path for path in shards if path not in held_out)

    return resolve(requested, find, rest, expected=f"a subfolder or a pattern of shards in {root}")


def ending(path: str) -> tuple[str, str]:
    """Return the key and suffix of a member, "a/1" and "jpg" of a/1.jpg, split at the first dot as in WebDataset."""
    folder, _, name = path.rpartition("/")
    stem, _, suffix = name.partition(".")
    return (f"{folder}/{stem}" if folder else stem), suffix.lower()
