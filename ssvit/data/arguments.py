"""Expand the short forms of options of images: data=PATH, data.normalization=FILE and data.fit=NAME (no torch)."""

import os
from collections.abc import Mapping
from pathlib import Path

import yaml

from ssvit.config.command_line import CommandLine
from ssvit.data.sources import shard_folder
from ssvit.errors import Failure
from ssvit.values import text_of

_STATISTICS = {"channels", "range", "mean", "std"}  # options in a file of ssvit normalization


def expand(line: CommandLine, additions: Mapping[str, object] | None = None) -> None:
    """Replace the short forms on a command line by the options that they abbreviate.

    Args:
        line: The command line, which is modified.
        additions: Options that data=PATH adds unless they are typed.

    Raises:
        Failure: The folder does not exist, or the normalization file cannot be read.
    """
    expanded: dict[str, object] = {}
    for name, value in line.typed.items():
        if name == "data":
            images = data_set(line.text(name), line)
            expanded |= images
            if len(images) > 1:
                expanded |= {option: value for option, value in (additions or {}).items() if option not in line.typed}
        elif name == "data.fit":
            expanded["data.view.fit"] = value
        elif name == "data.normalization":
            statistics = {} if value is None else _normalization(str(line.text(name)))
            expanded |= {option: value for option, value in statistics.items() if option not in line.typed}
        else:
            expanded[name] = value
    line.typed = expanded


def data_set(path: str | None, line: CommandLine) -> dict[str, object]:
    """Return the options that data=PATH abbreviates; for any other value, the option itself.

    PATH is a folder of images, a folder of shards (tar files) without images, or a table of images (.csv, .tsv). A
    choice of the group data takes precedence over a path of the same name.

    Args:
        path: Value of the option data.
        line: The command line, whose choices of the group data are known.

    Raises:
        Failure: The path does not exist, or is another file.
    """
    if path is None:
        return {"data": None}
    is_path = os.path.isabs(path) or path.startswith(".")
    if not is_path and line.has_choice("data", path):
        return {"data": path}
    if os.path.isdir(path):
        return {"data": "shards" if shard_folder.holds_shards(path) else "folder", "data.root": path}
    if path.lower().endswith((".csv", ".tsv")) and os.path.isfile(path):
        return {"data": "csv", "data.table": path}
    if os.path.isfile(path):
        raise Failure(f"data={text_of(path)}: must be a folder of images, or a table of them (.csv, .tsv)", 2)
    if "/" in path:
        raise Failure(f"data={text_of(path)}: no such file or folder", 2)
    return {"data": path}


def _normalization(file: str) -> dict[str, object]:
    """Return the options in the file that data.normalization=FILE names."""
    try:
        statistics = yaml.safe_load(Path(file).read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = getattr(error, "strerror", None) or "is not YAML"
        raise Failure(f"data.normalization={text_of(file)}: cannot be read: {reason}", 2) from None
    if not isinstance(statistics, dict) or not statistics or not statistics.keys() <= _STATISTICS:
        raise Failure(f"data.normalization={text_of(file)}: must be a file that ssvit normalization has written", 2)
    return {f"data.{name}": value for name, value in statistics.items()}
