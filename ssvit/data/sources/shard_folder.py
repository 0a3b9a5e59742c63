"""List the shards of a folder and resolve their splits by name (standard library only)."""

import os
import re
from collections.abc import Mapping
from fnmatch import fnmatch

from ssvit.data.sources import folder
from ssvit.data.sources.splits import NAMES, Items, Splits, resolve, spellings
from ssvit.errors import OptionError

INDEX = ".index.json"  # suffix of the index next to a shard that `ssvit pack` writes


def holds_shards(root: str) -> bool:
    """Return whether a folder contains shards, in itself or its subfolders, and no images."""
    return bool(folder.shards(root)) and folder.count(root, at_most=1) == 0


def splits(root: str, requested: Mapping[str, str | None]) -> Splits:
    """Resolve the shards for training, validation and test, by their paths below the root.

    A split is named by a subfolder or a pattern (imagenet-val-*). A known name also matches shards whose names contain
    it as a word. Without a match for the training split, all remaining shards are for training.

    Raises:
        OptionError: There is no such folder, or it contains no shard.
    """
    if not os.path.isdir(root):
        raise OptionError("root", root, "no such folder")
    shards = sorted(folder.shards(root))
    if not shards:
        raise OptionError("root", root, f"contains no shard (a file ending in {folder.SHARD})")

    def find(name: str) -> Items:
        folders = tuple(f"{folder}/" for folder in spellings(name, {path.rpartition("/")[0] for path in shards}))
        below = tuple(path for path in shards if path.startswith(folders) or fnmatch(path, name))
        word = re.compile(rf"(?<![a-z]){re.escape(name)}(?![a-z])", re.IGNORECASE)
        return below or tuple(path for path in shards if name in NAMES and word.search(path))

    def rest(held_out: Items) -> Items:
        return tuple(path for path in shards if path not in held_out)

    return resolve(requested, find, rest, expected=f"a subfolder or a pattern of shards in {root}")


def ending(path: str) -> tuple[str, str]:
    """Return the key and suffix of a member, "a/1" and "jpg" of a/1.jpg, "22.05" and "jpg" of 22.05.jpg.

    They are split at the first dot before a letter. WebDataset splits at the first dot.
    """
    folder, _, name = path.rpartition("/")
    stem, suffix = (*re.split(r"\.(?=[a-z])", name, maxsplit=1, flags=re.IGNORECASE), "")[:2]
    return (f"{folder}/{stem}" if folder else stem), suffix.lower()
