"""Which pictures a user means, and what may be asked of a store of pictures. Standard library only."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ssvit.data import folder
from ssvit.evaluation.options import pooling_of
from ssvit.options import OptionError, flag, one_of, whole

SPLITS = ("train", "validation", "test", "held_out")
ACTIONS = INDEX, ADD, QUERY = ("index", "add", "query")


def check(
    *, action: Any, store: Any, split: Any, k: Any, batch_size: Any, workers: Any, ranking: Any, sheet: Any, output: Any
) -> None:
    """OptionError for options of tools/retrieve.py that cannot be; sheet, output: files to write, or None."""
    one_of("action", action, ACTIONS)
    one_of("split", split, SPLITS)
    if action != INDEX and not Path(str(store)).is_dir():
        raise OptionError("store", store, f"no such folder: action={INDEX} makes a store")
    for name, value in (("k", k), ("batch_size", batch_size), ("workers", workers)):
        whole(name, value)
    flag("ranking", ranking)
    for name, value in (("sheet", sheet), ("output", output)):
        if value is not None and not Path(str(value)).absolute().parent.is_dir():
            raise OptionError(name, value, "there is no such folder to write it into")
        if value is not None and Path(str(value)).is_dir():
            raise OptionError(name, value, "must be a file, and this is a folder")


def pooling(store: Any) -> str | None:
    """How the vectors in a store are pooled; None where its manifest does not tell, as opening it will say."""
    try:
        return pooling_of(json.loads((Path(str(store)) / "manifest.json").read_bytes())["encoder"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def features(options: Mapping[str, Any], *, action: str, store: Any) -> dict[str, Any]:
    """The options of the features, by the pooling of a store that is there where they leave it open."""
    is_open = options["pooling"] is None and action != INDEX
    return {**options, "pooling": pooling(store) if is_open else options["pooling"]}


def pictures(images: Sequence[Any]) -> dict[str, str | None]:
    """Files and folders as {absolute path: class}, each picture once.

    The class is the name of the subfolder where a folder has one for each class, else None. OptionError if one is not
    there, holds no picture, or none is given.
    """
    if not images:
        raise OptionError("images", "", "name pictures, or folders of them, after the options, or a data set (data=…)")
    found: dict[str, str | None] = {}
    for image in map(str, images):
        paths = folder.pictures(image)
        for path, name in folder.list_images(image) if os.path.isdir(image) else [(path, None) for path in paths]:
            path = os.path.abspath(path)
            found[path] = name or found.get(path)
    return found
